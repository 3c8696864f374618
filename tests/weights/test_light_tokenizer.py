"""LightTokenizer gives what transformers' own tokenizer gives, and imports it only where that is needed."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import tiny_state, write_model
from test_gguf_tokenizer import TEXTS, byte_level, sentencepiece

from nanovllm import LLM
from nanovllm.weights.gguf_tokenizer import build_tokenizer
from nanovllm.weights.light_tokenizer import LightTokenizer, transformers_tokenizer

NORMAL_END = np.array([1] * 259)  # the end token is a word like any other: transformers makes it a special one
FILES = {
    "smollm": byte_level(merges=["h e", "l l"], words=["he", "ll"]),
    "llama 3": byte_level("llama-bpe", words=["qz"]),
    "both ends": byte_level("qwen2", add_bos_token=True, add_eos_token=True, padding_token_id=0),
    "no special types": byte_level(token_type=NORMAL_END),
    "no end": byte_level(eos_token_id=None, add_eos_token=True),
    "sentencepiece": sentencepiece(),
    "no prefix": sentencepiece(add_space_prefix=False, add_bos_token=False),
}


def made(metadata, template=None) -> LightTokenizer:
    return build_tokenizer({**metadata, "tokenizer.chat_template": template}, Path("x.gguf"))


def pair(metadata, template=None):
    """Ours, and transformers' of the same file."""
    return made(metadata, template), transformers_tokenizer(made(metadata, template))


@pytest.mark.parametrize("file", FILES)
def test_tokens_and_texts(file):
    ours, theirs = pair(FILES[file])
    names = ("<|start|>", "<|end|>", "<tool>", "<s>", "</s>", "<unk>")
    for text in [*TEXTS, "".join(TEXTS), *names, *(f"a{name} b{name}hello" for name in names)]:
        for adds in (True, False):
            ids = theirs.encode(text, add_special_tokens=adds)
            assert ours.encode(text, add_special_tokens=adds) == ids, text
            for skips in (True, False):
                assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips), text
        assert ours.encode(text) == theirs.encode(text)
    every = [*range(len(theirs)), len(theirs) + 5]
    assert ours.convert_ids_to_tokens(every) == theirs.convert_ids_to_tokens(every)
    assert [ours.decode([i]) for i in every] == [theirs.decode([i]) for i in every]
    assert ours.convert_ids_to_tokens(3) == theirs.convert_ids_to_tokens(3)
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    assert (ours.unk_token_id, len(ours)) == (theirs.unk_token_id, len(theirs))
    assert "whole" not in vars(ours)  # all that without transformers
    assert (ours.bos_token, ours.eos_token_id) == (theirs.bos_token, theirs.eos_token_id)
    assert ours(TEXTS[2])["input_ids"] == theirs(TEXTS[2])["input_ids"]


CHAT = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "hé 你好 \u2028"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"b": [1, 2.5, None, True], "a": "<é&"}}}]
LOOP = "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}"
TEMPLATES = {
    "blocks": LOOP + "{% if add_generation_prompt %}\n<|start|>{% endif %}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ documents }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}",
    "sorted": "{{ tools | tojson(sort_keys=True, separators=(',', ':'), ensure_ascii=True) }}",
    "namespace": "{% set n = namespace(self=2) %}{% for m in messages %}{% set n.a = m.role %}{% endfor %}{{ n.a }}",
    "skip": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "date": "{{ strftime_now('%d %B %Y') }}",
    "macro": "{% macro f(x) -%}  [{{ x }}]  {%- endmacro %}{{ f(messages|length) }}",
}
WHOLE = {  # what only transformers renders
    "its tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "its dict": "{{ dict(a=1).a }}",
}


@pytest.mark.parametrize("name", [*TEMPLATES, *WHOLE])
def test_chat_templates(name):
    ours, theirs = pair(byte_level(), {**TEMPLATES, **WHOLE}[name])
    for tools in (None, TOOLS):
        for prompt in (True, False):
            options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
            assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(CHAT, **options)
    assert ("whole" in vars(ours)) == (name in WHOLE)


OPTIONS = {
    "another template": {"chat_template": "{{ messages[0].role }}"},
    "continued": {"conversation": [*CHAT, {"role": "assistant", "content": "So"}], "continue_final_message": True},
    "thoughts": {"conversation": [{"role": "assistant", "content": "", "thinking": "hm"}]},
    "own variables": {"note": "n"},
    "an object": {"conversation": [{"role": "user", "content": Path("a")}]},
    "several": {"conversation": [CHAT, CHAT[:1]]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_apply_chat_template(name):
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}{{ note }}"
    ours, theirs = pair(byte_level(), template)
    options = {"conversation": CHAT, "tokenize": False, **OPTIONS[name]}
    assert ours.apply_chat_template(**options) == theirs.apply_chat_template(**options)
    ours, options = made(byte_level(), template), {**options, "tokenize": True, "return_dict": False}
    assert ours.apply_chat_template(**options) == theirs.apply_chat_template(**options)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{% for %}",
        "{% set ns = namespace(_a=1) %}{{ ns._a }}",
        "{% set ns = namespace() %}{% set ns.__call__ = messages %}",
        "{{ messages[0].update({}) }}",
        None,
    ],
)
def test_errors_are_those_of_transformers(template):
    def error_of(tokenizer):
        try:
            tokenizer.apply_chat_template(CHAT, tokenize=False)
        except Exception as error:
            return type(error), str(error)
        return None

    ours, theirs = map(error_of, pair(byte_level(), template))
    assert ours is not None
    assert ours == theirs


def test_a_copy_is_a_tokenizer_too():
    twin = copy.deepcopy(made(byte_level()))
    assert twin.encode("hello") == made(byte_level()).encode("hello")


def test_what_a_user_changes_counts(tmp_path):
    """get_tokenizer() is transformers' own, and it is the engine's."""
    from transformers import PreTrainedTokenizerFast

    path = write_model(tmp_path / "m.gguf", "llama", tiny_state())
    with LLM(str(path), device="cpu", num_kvcache_blocks=8, max_model_len=64) as llm:
        tokenizer = llm.get_tokenizer()
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert llm.get_tokenizer() is tokenizer
        tokenizer.chat_template = "{{ messages[0].content }}!"
        assert llm.engine.inputs.render_chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a!")
        tokenizer("hello", truncation=True, max_length=2)  # a setting that stays in the Rust tokenizer
        assert llm.engine.inputs.encode("hello wo") == tokenizer.encode("hello wo")


def test_a_gguf_file_is_run_without_transformers(tmp_path):
    """`nanovllm generate`: importing transformers would be a third of the time to the first token."""

    def chat(writer):
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    path = write_model(tmp_path / "m.gguf", "llama", tiny_state(), extra=chat)
    script = (
        "import sys; from nanovllm.cli import main\n"
        "try: main()\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "print(sorted({'transformers', 'fastapi', 'llguidance', 'sympy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, "generate", "hello", "--model", str(path), "--device", "cpu"]
    more = ["--num-kvcache-blocks", "8", "--max-model-len", "64", "--max-tokens", "3", "--stop", "zzz", "--ignore-eos"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
