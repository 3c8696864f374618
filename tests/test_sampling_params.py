"""SamplingParams: a value that would harm the engine is refused with the reason before the engine gets it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from nanovllm import NanoVLLMError, RequestError, SamplingParams, StructuredOutputsParams

NAN, INF = float("nan"), float("inf")


def refusal(**params: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert isinstance(caught.value, NanoVLLMError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "bad", "remedy"),
    [
        ("n", [0, -1, 1025, 10**9, 1.0, True, "2", NAN], "at least one"),
        ("temperature", [-0.1, 100.5, NAN, INF, -INF, True, "1", 1j], "0 is greedy"),
        ("top_p", [0, 0.0, -0.5, 1.1, NAN, INF, False], "1 keeps all"),
        ("min_p", [-0.1, 1.5, NAN, INF, True], "0 keeps all"),
        ("top_k", [-2, 1.5, 2**31, True, NAN], "0 or -1"),
        ("presence_penalty", [-2.1, 2.1, NAN, INF], "0 is off"),
        ("frequency_penalty", [-3, 3, NAN, "x"], "0 is off"),
        ("repetition_penalty", [0, -1, 101, NAN, INF], "1 is off"),
        ("seed", [2**64, -(2**63) - 1, 1.5, True, "7"], "None"),
        ("max_tokens", [0, -1, 2**31, 1.5, True, INF], "max_model_len"),
        ("min_tokens", [-1, 17, 0.5, True], "max_tokens"),
        ("logprobs", [-2, 1001, True, 2.0], "None is off, -1 is the whole vocabulary"),
        ("prompt_logprobs", [-2, 1001, False], "None is off"),
    ],
)
def test_bad_numbers_are_refused_with_value_and_remedy(name: str, bad: list[object], remedy: str) -> None:
    for value in bad:
        message = refusal(**{name: value})
        assert f"{name}={value}" in message.replace("'", ""), message
        assert remedy in message, message


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
        ({"skip_special_tokens": "no"}, "True or False"),
        ({"include_stop_str_in_output": 0}, "True or False"),
        ({"detokenize": False, "stop": "x"}, "stop_token_ids"),
        ({"n": 10**9}, "[1, 1024]"),
        ({"temperature": -1}, "[0, 100]"),
        ({"top_p": 0}, "(0, 1]"),
        ({"max_tokens": 0}, "[1, 2147483647]"),
        ({"repetition_penalty": 0}, "(0, 100]"),
        ({"max_tokens": 4, "min_tokens": 5}, "[0, 4]"),
        ({"logprobs": 5000}, "[-1, 1000]"),
        ({"temperature": 10**400}, "finite"),
        ({"logit_bias": {1: 10**400}}, "finite"),
        ({"logit_bias": {"²": 1.0}}, "token ids"),
        ({"stop": 5}, "list of strings"),
        ({"bad_words": 5}, "list of strings"),
        ({"allowed_token_ids": 5}, "list of token ids"),
    ],
)
def test_bad_values_are_refused_with_the_reason(params: dict[str, object], word: str) -> None:
    assert word in refusal(**params)


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
        {"logprobs": -1, "prompt_logprobs": -1},
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
    """A temperature below 1e-5 would overflow the logits."""
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_unknown_names_and_later_changes_are_errors() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_first_arguments_stand_in_the_order_of_vllm() -> None:
    values = (2, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.7, 8, ["nine"], [10], True, 110, 12, 13, 14)
    names = (
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    )  # fmt: skip
    assert SamplingParams(*values) == SamplingParams(**dict(zip(names, values)))
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(*values, {3: 1.0})  # what follows differs between versions of vLLM


def test_a_temperature_in_the_place_of_n_is_refused() -> None:
    """The first parameter of the smaller engines is the temperature."""
    with pytest.raises(RequestError, match=r"n=0\.6: must be an integer"):
        SamplingParams(0.6, 256)  # type: ignore[arg-type]


def test_none_is_the_default_of_every_field() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    nothing = SamplingParams(**dict.fromkeys(names))  # type: ignore[arg-type]
    assert nothing == SamplingParams(max_tokens=None)  # which means: until max_model_len
    assert nothing.n == 1
    assert nothing.detokenize is True


def test_clone() -> None:
    params = SamplingParams(n=3, stop="END", logit_bias={5: 1}, structured_outputs={"regex": "a"})
    copy = params.clone()
    assert copy == params
    assert copy is not params
    assert params.clone(seed=5, stop=None) == dataclasses.replace(params, seed=5, stop=None)
    with pytest.raises(RequestError, match="n=0"):
        params.clone(n=0)
    with pytest.raises(TypeError, match="best_of"):
        params.clone(best_of=2)


def test_numbers_of_numpy_become_those_of_python() -> None:
    """Parameters are sent between ranks as JSON, which has no numbers of numpy."""
    integers = {"n": 2, "top_k": -1, "max_tokens": 7, "min_tokens": 3, "logprobs": 4, "prompt_logprobs": -1}
    floats = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.0, "presence_penalty": 1.0}
    others = {"stop_token_ids": [3, 4], "allowed_token_ids": [5, 6], "logit_bias": {7: 1.5}, "seed": 2**64 - 1}
    made = SamplingParams(
        **{name: np.int8(value) for name, value in integers.items()},
        **{name: np.float16(value) for name, value in floats.items()},
        stop_token_ids=np.array([3, 4]),
        allowed_token_ids=[np.int32(5), 6],
        logit_bias={np.int64(7): np.float32(1.5)},
        seed=np.uint64(2**64 - 1),
    )
    assert SamplingParams(**json.loads(json.dumps(dataclasses.asdict(made)))) == made
    assert made == SamplingParams(**integers, **floats, **others)


@pytest.mark.parametrize(
    ("name", "bad", "word"),
    [
        ("n", [np.int64(0), np.float64(2), np.bool_(True), np.array([1, 2])], "at least one"),
        ("temperature", [np.float32(-1), np.float16(NAN), np.float64(INF), np.bool_(1), np.array(1.0)], "0 is greedy"),
        ("bad_words", [np.array(1), torch.tensor(1)], "bad_words="),
        ("stop", [np.array("x")], "stop="),
        ("stop_token_ids", [np.array([1.0]), np.array([-1]), np.array(["a"]), np.array(5)], "token ids"),
        ("logit_bias", [np.array([1, 2]), {np.int64(1): np.float32(NAN)}, {np.float64(1): 1.0}], "logit_bias"),
    ],
)
def test_bad_numbers_of_numpy_are_refused_as_those_of_python_are(name: str, bad: list[object], word: str) -> None:
    for value in bad:
        assert word in refusal(**{name: value})


def test_structured_outputs_params_as_in_vllm() -> None:
    assert StructuredOutputsParams({"type": "object"}) == StructuredOutputsParams(json='{"type": "object"}')
    made = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+", json_object=None))
    assert made == SamplingParams(structured_outputs={"regex": "a+"})
    with pytest.raises(TypeError, match="structural_tag"):
        StructuredOutputsParams(structural_tag="{}")  # type: ignore[call-arg]
