"""LLM, the offline interface: every form of prompt, chat, token ids without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, RequestError, SamplingParams
from tests.tiny_models import CHAT_TEMPLATE, NEW_TOKENS, TinyModel, save_tokenizer

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def test_every_form_of_prompt(llm: LLM) -> None:
    text = "the river"
    ids = llm.get_tokenizer().encode(text)
    single = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}, [text], [ids], [{"prompt": text}]]
    outputs = [llm.generate(prompt, GREEDY, use_tqdm=False) for prompt in single]
    assert all(len(one) == 1 for one in outputs)
    assert len({tuple(one[0]["token_ids"]) for one in outputs}) == 1
    mixed = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in mixed] == [outputs[0][0]["token_ids"]] * 4
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_one_params_for_all_or_one_for_each(llm: LLM, llama: TinyModel) -> None:
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(llama.prompts[:2], [GREEDY, short], use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [llama.tokens[0], llama.tokens[1][:2]]
    assert len(llm.generate("the", use_tqdm=False)[0]["token_ids"]) <= 16  # vLLM's default


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    decode = llm.get_tokenizer().decode
    prompts = ["the", "the town on", "é", "in the rain ☔", "a b  c", " "]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False):
        assert output.prompt + output["text"] == decode(
            output.prompt_token_ids + output["token_ids"], skip_special_tokens=True
        )


def test_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "sing"}, {"role": "user", "content": "the rain"}]
    text = "<|system|>sing<|end|><|user|>the rain<|end|><|assistant|>"
    expected = llm.get_tokenizer().encode(text, add_special_tokens=False)  # the template says what is special
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in one] == [expected]
    two = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert two[0]["token_ids"] == one[0]["token_ids"]
    assert len(two) == 2
    without = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert without[0].prompt_token_ids == expected[:-1]
    sent = llm.generate({"prompt_token_ids": expected}, GREEDY, use_tqdm=False)
    assert sent[0]["token_ids"] == one[0]["token_ids"]


@pytest.mark.parametrize(
    "messages",
    [[], {}, "hello", 5, None, [[]], [{}], [{"role": "user"}], [{"content": "x"}], ["x"], [[{"role": "user"}]],
     [{"role": "forbidden", "content": "x"}], [{"role": "user", "content": None}], [{"role": 3, "content": "x"}]],
)  # fmt: skip
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_chat_without_a_template(make_llm: MakeLLM, llama_copy: Path) -> None:
    (llama_copy / "chat_template.jinja").unlink()
    llm = make_llm(llama_copy)
    with pytest.raises(RequestError, match=r"no chat template: use generate\(\)"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)
    assert CHAT_TEMPLATE not in str(llm.get_tokenizer().init_kwargs)


def test_without_a_tokenizer(make_llm: MakeLLM, llama: TinyModel) -> None:
    llm = make_llm(skip_tokenizer_init=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in llama.prompts], GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == llama.tokens
    assert {o["text"] for o in outputs} == {""}
    assert llm.get_tokenizer() is None
    logprobs = llm.generate([5], SamplingParams(temperature=0, logprobs=1, max_tokens=1), use_tqdm=False)[0]
    assert next(iter(logprobs["logprobs"][0].values())).decoded_token is None
    for use in (
        lambda: llm.generate("text", use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "x"}], use_tqdm=False),
        lambda: llm.generate([5], SamplingParams(stop="x"), use_tqdm=False),
        lambda: llm.generate([5], SamplingParams(bad_words=["x"]), use_tqdm=False),
    ):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            use()


def test_a_tokenizer_from_elsewhere(make_llm: MakeLLM, llama_copy: Path, tmp_path: Path) -> None:
    (llama_copy / "tokenizer.json").unlink()
    other = tmp_path / "tokenizer"
    save_tokenizer(other)
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert make_llm(llama_copy, tokenizer=str(other)).get_tokenizer().encode("the")[0] == 1


def test_progress_bar_tells_both_speeds(llm: LLM, llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(llama.prompts, GREEDY)
    shown = capsys.readouterr().err
    assert "11/11" in shown
    assert "prefill" in shown
    assert "decode" in shown
    llm.generate(llama.prompts, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_import_does_not_need_torch() -> None:
    """`import nanovllm` and `nanovllm --help` are instant: torch is imported when an engine is made."""
    import subprocess
    import sys

    script = (
        "import sys, nanovllm; nanovllm.SamplingParams(); "
        "assert not {'torch', 'transformers', 'triton', 'fastapi', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_of_the_package() -> None:
    import nanovllm

    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None
    with pytest.raises(AttributeError, match="LMM"):
        _ = nanovllm.LMM
