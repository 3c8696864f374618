"""Where sampling parameters come from when a caller gives none: the model's generation_config.json, or another."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.engine.generation_config import NEUTRAL, read_sampling_defaults
from nanovllm.errors import ConfigError, ModelError
from tests.tiny_models import EOS

MakeLLM = Callable[..., LLM]
ALL = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 3,
}
AS_PARAMS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, max_tokens=3)
PROMPT = "the men of the town"
MESSAGES = [{"role": "user", "content": "the rain"}]


def write(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def params_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Filled with what every request from now on is sampled by."""
    seen: list[SamplingParams] = []
    sequence = llm.engine._sequence

    def note(parsed: Any, params: SamplingParams, seed: int) -> Any:
        seen.append(params)
        return sequence(parsed, params, seed)

    monkeypatch.setattr(llm.engine, "_sequence", note)
    return seen


def test_generate_and_chat_start_from_the_models_file(
    make_llm: MakeLLM, llama_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(write(llama_copy, **ALL, eos_token_id=EOS))
    assert llm.get_default_sampling_params() == AS_PARAMS
    seen = params_of(llm, monkeypatch)
    llm.generate(PROMPT, use_tqdm=False)
    llm.chat(MESSAGES, use_tqdm=False)
    llm.engine.add_request("0", PROMPT)  # what AsyncLLMEngine.generate calls
    assert seen == [AS_PARAMS] * 3
    llm.engine.abort_request("0")


def test_given_parameters_are_taken_as_given(
    make_llm: MakeLLM, llama_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not merged, as in vLLM: SamplingParams do not say which of their fields were written out."""
    llm = make_llm(write(llama_copy, **ALL))
    seen = params_of(llm, monkeypatch)
    given = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len(llm.generate(PROMPT, given, use_tqdm=False)[0].outputs[0].token_ids) == 5
    llm.generate([PROMPT, PROMPT], [given, given], use_tqdm=False)
    assert seen == [given] * 3


def test_vllm_is_neutral_and_keeps_the_end_tokens(make_llm: MakeLLM, llama_copy: Path) -> None:
    llm = make_llm(write(llama_copy, **ALL, eos_token_id=[EOS, 7]), generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert set(llm.engine.model_config.eos_token_ids) >= {EOS, 7}


def test_a_folder_gives_another_file(make_llm: MakeLLM, llama_copy: Path, tmp_path: Path) -> None:
    write(llama_copy, **ALL, eos_token_id=7)
    other = write(tmp_path / "other", top_k=5, eos_token_id=9)
    llm = make_llm(llama_copy, generation_config=str(other))
    assert llm.get_default_sampling_params() == SamplingParams(top_k=5)
    assert 7 in llm.engine.model_config.eos_token_ids  # these stay the model's own
    assert 9 not in llm.engine.model_config.eos_token_ids


def test_a_folder_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(write(tmp_path, top_k=5)))
    assert read_sampling_defaults("~", tmp_path / "model").values == {"top_k": 5}


def test_a_folder_that_is_not_there_or_has_no_file(make_llm: MakeLLM, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path, write(tmp_path / "it") / "generation_config.json"):
        with pytest.raises(ConfigError, match=rf"generation_config='{path}': .*'auto'.*'vllm'"):
            make_llm(generation_config=str(path))


def test_another_file_that_is_no_json(make_llm: MakeLLM, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=str(tmp_path / "generation_config.json")):
        make_llm(generation_config=str(tmp_path))


@pytest.mark.parametrize("value", ["", 3, True])
def test_bad_options(value: Any) -> None:
    with pytest.raises(ConfigError, match="generation_config="):
        EngineConfig(generation_config=value)


def test_without_a_file(tmp_path: Path) -> None:
    """A GGUF model has none; one that lies beside it is another model's."""
    model = write(tmp_path, **ALL) / "model.gguf"
    model.write_bytes(b"GGUF")
    for path in (model, tmp_path / "empty"):
        found = read_sampling_defaults("auto", path)
        assert found.values == {}
        assert f"{found}" == f"{NEUTRAL}; the model has no generation_config.json"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 0}, SamplingParams(temperature=0)),
        ({"temperature": 0.0, "do_sample": True}, SamplingParams(temperature=0)),
        ({"top_k": -1}, SamplingParams()),
        ({"top_k": 0}, SamplingParams()),
        ({"top_k": None, "temperature": None, "max_new_tokens": None}, SamplingParams()),
        ({"top_k": 50}, SamplingParams(top_k=50)),
        ({"do_sample": False, "top_p": 0.9}, SamplingParams(top_p=0.9)),  # do_sample is not read, as in vLLM
        ({"max_length": 20, "presence_penalty": 1.0, "n": 4, "transformers_version": "4.51.0"}, SamplingParams()),
    ],
    ids=str,
)
def test_what_the_file_may_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict[str, Any], expected: SamplingParams
) -> None:
    assert SamplingParams(**read_sampling_defaults("auto", write(tmp_path, **values)).values) == expected
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("temperature", "hot", "'hot'"), ("temperature", float("nan"), "nan"), ("temperature", -1, "-1"),
        ("temperature", True, "True"), ("temperature", float("inf"), "inf"), ("top_k", -7, "-7"), ("top_k", 2.5, "2.5"),
        ("top_k", [20], "[20]"), ("top_p", 0, "0"), ("top_p", 1.5, "1.5"), ("min_p", "0.1", "'0.1'"),
        ("repetition_penalty", 0, "0"), ("repetition_penalty", {"a": 1}, "{'a': 1}"), ("max_new_tokens", 0, "0"),
        ("max_new_tokens", -5, "-5"), ("max_new_tokens", "20", "'20'"), ("temperature", "x" * 10_000, "'xxx"),
        ("top_k", 10**400, "1000"),
    ],
)  # fmt: skip
def test_bad_values_are_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any, shown: str
) -> None:
    good = "min_p" if name != "min_p" else "top_p"
    found = read_sampling_defaults("auto", write(tmp_path, **{name: value, good: 0.5}))
    assert found.values == {good: 0.5}
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    line = record.getMessage()
    assert line.startswith(f"{tmp_path / 'generation_config.json'}: {name}={shown}")
    assert " is ignored: must be " in line
    assert "\n" not in line
    assert len(line) < 400 + len(str(tmp_path))


def test_what_the_server_says(tmp_path: Path) -> None:
    file = write(tmp_path, **ALL) / "generation_config.json"
    assert f"{read_sampling_defaults('auto', tmp_path)}" == (
        f"temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, max_tokens=3, from {file}"
    )
    assert f"{read_sampling_defaults('vllm', tmp_path)}" == f"{NEUTRAL}; generation_config='vllm'"
    write(tmp_path, eos_token_id=3)
    assert f"{read_sampling_defaults('auto', tmp_path)}" == f"{NEUTRAL}; {file} sets none"
