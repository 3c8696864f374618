"""SamplingParams: a value that would hurt the engine (lesson 4) is refused before it gets there, and says why."""

from __future__ import annotations

import dataclasses

import pytest

from nanovllm import NanoVLLMError, RequestError, SamplingParams

NAN, INF = float("nan"), float("inf")


def refusal(**params: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert isinstance(caught.value, NanoVLLMError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "bad", "remedy"),
    [
        ("n", [0, -1, 1025, 10**9, 1.0, True, None, "2", NAN], "at least one"),
        ("temperature", [-0.1, 100.5, NAN, INF, -INF, None, True, "1"], "0 is greedy"),
        ("top_p", [0, 0.0, -0.5, 1.1, NAN, INF, False, None], "1 keeps all"),
        ("min_p", [-0.1, 1.5, NAN, INF, True], "0 keeps all"),
        ("top_k", [-2, 1.5, 2**31, True, None, NAN], "0 or -1"),
        ("presence_penalty", [-2.1, 2.1, NAN, INF, None], "0 is off"),
        ("frequency_penalty", [-3, 3, NAN, "x"], "0 is off"),
        ("repetition_penalty", [0, -1, 101, NAN, INF], "1 is off"),
        ("seed", [2**64, -(2**63) - 1, 1.5, True, "7"], "None"),
        ("max_tokens", [0, -1, 2**31, 1.5, True, INF], "max_model_len"),
        ("min_tokens", [-1, 17, 0.5, True, None], "max_tokens"),
        ("logprobs", [-1, 1001, True, 2.0], "None is off"),
        ("prompt_logprobs", [-1, 1001, False], "None is off"),
    ],
)
def test_bad_numbers_are_refused_with_value_and_remedy(name: str, bad: list[object], remedy: str) -> None:
    for value in bad:
        message = refusal(**{name: value})
        assert f"{name}={value}" in message.replace("'", ""), message
        assert remedy in message, message


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"n": 0}, "[1, 1024]"),
        ({"n": 10**9}, "[1, 1024]"),
        ({"temperature": -1}, "[0, 100]"),
        ({"top_p": 0}, "(0, 1]"),
        ({"max_tokens": 0}, "[1, 2147483647]"),
        ({"repetition_penalty": 0}, "(0, 100]"),
        ({"max_tokens": 4, "min_tokens": 5}, "[0, 4]"),
        ({"logprobs": 5000}, "[0, 1000]"),
    ],
)
def test_a_value_out_of_range_is_answered_with_the_range(params: dict[str, object], limit: str) -> None:
    assert limit in refusal(**params)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"stop": [""]}, "non-empty"),
        ({"stop": ["a", 5]}, "5"),
        ({"stop": ["x"] * 129}, "128"),
        ({"bad_words": [""]}, "non-empty"),
        ({"bad_words": ["x"] * 1025}, "1024"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "integer"),
        ({"stop_token_ids": "abc"}, "integer"),
        ({"stop_token_ids": [2**31]}, "2147483647"),
        ({"allowed_token_ids": []}, "at least one"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"logit_bias": [1]}, "must map"),
        ({"logit_bias": {-1: 1.0}}, "token ids"),
        ({"logit_bias": {"x": 1.0}}, "token ids"),
        ({"logit_bias": {True: 1.0}}, "integer"),
        ({"logit_bias": {3: 101}}, "[-100, 100]"),
        ({"logit_bias": {3: NAN}}, "finite"),
        ({"ignore_eos": 1}, "True or False"),
        ({"detokenize": None}, "True or False"),
        ({"skip_special_tokens": "no"}, "True or False"),
        ({"include_stop_str_in_output": 0}, "True or False"),
        ({"detokenize": False, "stop": "x"}, "stop_token_ids"),
    ],
)
def test_bad_lists_maps_and_flags_are_refused(params: dict[str, object], word: str) -> None:
    assert word in refusal(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 10**400},
        {"logit_bias": {1: 10**400}},
        {"stop": 5},
        {"bad_words": 5},
        {"stop_token_ids": 5},
        {"allowed_token_ids": 5},
        {"logit_bias": {"²": 1.0}},
    ],
)
def test_wrong_types_and_huge_integers_are_refused_too(params: dict[str, object]) -> None:
    try:
        SamplingParams(**params)  # type: ignore[arg-type]
    except RequestError:
        return


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 1024},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 0, "top_k": 1},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 100},
        {"seed": 2**64 - 1},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 5000},
        {"logprobs": 0, "prompt_logprobs": 1000},
    ],
)
def test_good_values_pass(params: dict[str, object]) -> None:
    made = SamplingParams(**params)  # type: ignore[arg-type]
    assert {name: getattr(made, name) for name in params} == params


def test_values_are_normalised_once() -> None:
    params = SamplingParams(
        stop="END", stop_token_ids=[3, 4], top_k=-1, logit_bias={"7": 1, 8: -2.5}, temperature=1, bad_words=iter(["x"])
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert params.top_k == 0
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert isinstance(params.temperature, float)
    assert params.bad_words == ("x",)
    assert SamplingParams().stop == ()
    assert SamplingParams().allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[1]).allowed_token_ids == (1,)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1.1e-5, False), (1, False)])
def test_greedy_is_a_contract(temperature: float, greedy: bool) -> None:
    """Lesson 1: temperature=0 was refused by an assert."""
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_unknown_names_positional_values_and_later_changes_are_errors() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
