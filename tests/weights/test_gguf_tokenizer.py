"""Tokenizers built from GGUF metadata, against transformers' conversion and against hand-computed tokens."""

import unicodedata
from contextlib import suppress
from pathlib import Path

import jinja2
import numpy as np
import pytest
from gguf_samples import byte_alphabet, tiny_state, write_model

from nanovllm.errors import ModelError
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.gguf_tokenizer import build_tokenizer
from nanovllm.weights.resolve import cache_folder
from nanovllm.weights.wheel_model import SMOLLM2, find_cached

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\n\n\tx  ",
    "你好，世界！",
    "😀👩‍👩‍👧‍👦 e\u0301 é",
    "it's WE'LL I'm",
    "0 12 345 6789 3.14",
    "def f(x):\n    return x ** 2  # ok\r\n",
    "a\u00a0b\u200bc",
    "ﬁ½ß ДЖ العربية",
]


def byte_level(pre="smollm", merges=(), words=(), **extra):
    tokens = ["<|end|>", "<|start|>", *byte_alphabet(), *words, "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(tokens) - 3) + [4]),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


PRES = ["smollm", "qwen2", "llama-bpe", "gpt-2", "default", "deepseek-llm", "deepseek-coder", "deepseek-v3"]


def pieces(metadata, text):
    tokenizer = build_tokenizer(metadata, Path("x.gguf"))
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_comes_back(pre, text):
    if pre == "qwen2":
        text = text.replace("e\u0301", "é")  # Qwen's normaliser composes accents
    tokenizer = build_tokenizer(byte_level(pre), Path("x.gguf"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_how_words_are_cut_before_merging():
    """A merge across a cut must not happen: that is what `pre` decides."""
    merges, words = ["1 2", "12 3", "Ġ 1", "ab ab", "a b"], ["12", "123", "Ġ1", "abab", "ab"]

    def cut(pre, text):
        return pieces(byte_level(pre, merges, words, add_bos_token=False), text)

    assert cut("smollm", "123 1") == ["1", "2", "3", "Ġ", "1"]
    assert cut("qwen2", "123 1") == ["1", "2", "3", "Ġ", "1"]
    assert cut("llama-bpe", "1231 1") == ["123", "1", "Ġ", "1"]
    assert cut("gpt-2", "123 1") == ["123", "Ġ1"]
    assert cut("default", "123 1") == ["123", "Ġ1"]
    assert cut("deepseek-v3", "1231 1") == ["123", "1", "Ġ", "1"]
    assert cut("deepseek-v3", ".abab abab") == [".", "abab", "Ġ", "abab"]


# (text, its words by deepseek-llm, by deepseek-coder; None: the same), worked out from the published patterns
DEEPSEEK_WORDS = [
    ("", [], None),
    ("Hello, world!", ["Hello", ",", " world", "!"], None),
    ("a  b", ["a", " ", " b"], None),  # one blank leads a word, the others stay
    ("a\tb c ", ["a", "\tb", " c", " "], None),
    ("a \n\n b\r\n", ["a", " ", "\n", "\n", " b", "\r", "\n"], None),  # each line end by itself
    ("it's WE'LL", ["it", "'", "s", " WE", "'", "LL"], None),  # contractions are no words
    ("x1234 56", ["x", "1", "2", "3", "4", " ", "5", "6"], None),
    ("3.14 ½²", ["3", ".", "1", "4", " ", "½", "²"], None),
    # The signs of V2 are written as ranges of ASCII, one of which includes the letters: it cuts where others stand
    ("Führer Привет", ["F", "ü", "hrer", " Привет"], ["Führer", " Привет"]),
    ("你好世界 abc", ["你好世界", " abc"], None),
    ("你好，世界！", ["你好", "，", "世界", "！"], None),
    ("日本語のテスト 한국어", ["日本語のテスト", " ", "한국어"], None),  # a blank leads none of these
    ("مرحبا بك", ["مرحبا بك"], ["مرحبا", " بك"]),  # letters without case: V2 does not cut them
    ("a+b = $c^2", ["a", "+", "b", " =", " $", "c", "^", "2"], ["a", "+", "b", " = $", "c", "^", "2"]),
    ("x<=y", ["x", "<=", "y"], None),
    ("— “quoted”", ["—", " ", "“", "quoted", "”"], None),  # typographic signs are among the East Asian ones
    ("😀😀 ok", ["😀😀", " ok"], None),
    ("նա Նա", ["նա", " Ն", "ա"], ["նա", " Նա"]),  # Armenian: V2 lists only its capitals
]


def deepseek_words(pre, text):
    backend = build_tokenizer(byte_level(pre), Path("x.gguf")).backend_tokenizer
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(("text", "llm", "coder"), DEEPSEEK_WORDS)
def test_words_of_deepseek(text, llm, coder):
    assert deepseek_words("deepseek-llm", text) == llm
    assert deepseek_words("deepseek-coder", text) == (llm if coder is None else coder)


def test_the_letters_of_deepseek_llm():
    """The published pattern lists ranges with 2,729 letters; ours names a property and blocks."""
    pre_tokenizer = build_tokenizer(byte_level("deepseek-llm"), Path("x.gguf")).backend_tokenizer.pre_tokenizer
    cased = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in ("Lu", "Ll", "Lt")]
    # The blank goes with a letter, if only at first, and so not with what is before it.
    letters = [c for c in cased if pre_tokenizer.pre_tokenize_str(f"😀 {c}")[0][1] == (0, 1)]
    assert len(letters) == 2729
    assert {*"azAZµßžǅΩяֆა𝐀ꞏ"} & {*letters} == {*"azAZµßžǅΩя"}


def test_llama3_takes_whole_words_without_merges():
    words = ["qz"]
    assert pieces(byte_level("llama-bpe", [], words, add_bos_token=False), "qz") == ["qz"]
    assert pieces(byte_level("smollm", [], words), "qz") == ["q", "z"]


def test_special_and_user_defined_tokens():
    tokenizer = build_tokenizer(byte_level(), Path("x.gguf"))
    ids = tokenizer.encode("<|start|>a<tool>b<|end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|start|>", "a", "<tool>", "b", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    assert (tokenizer.unk_token, tokenizer.pad_token) == (None, None)


def test_bos_and_eos_as_the_file_says():
    assert pieces(byte_level(), "a") == ["a"]
    assert pieces(byte_level("llama-bpe"), "a") == ["<|start|>", "a"]
    assert pieces(byte_level("llama-bpe", add_bos_token=False), "a") == ["a"]
    assert pieces(byte_level(add_bos_token=True, add_eos_token=True), "a") == ["<|start|>", "a", "<|end|>"]


# The pieces of "hello" in the order SentencePiece would learn them; scores fall with the rank.
PIECES = ["▁", "h", "e", "l", "o", "▁h", "ll", "he", "▁he", "llo", "▁hello", "▁▁", "a", "aa"]


def sentencepiece(**extra):
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *PIECES, "<tool>"]
    types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def test_sentencepiece_merges_by_score():
    assert pieces(sentencepiece(), "hello") == ["<s>", "▁hello"]
    # "▁h" (score -5) beats "he" (-7), so "▁he" + "llo" is reached through "▁h" + "e".
    assert pieces(sentencepiece(), "he") == ["<s>", "▁he"]
    assert pieces(sentencepiece(), "aaa") == ["<s>", "▁", "aa", "a"]  # equal pairs: leftmost first
    assert pieces(sentencepiece(add_space_prefix=False), "hello") == ["<s>", "he", "llo"]
    assert pieces(sentencepiece(add_bos_token=False), "  he") == ["▁▁", "▁he"]


def test_sentencepiece_bytes_and_special_tokens():
    metadata = sentencepiece(add_bos_token=False)
    assert pieces(metadata, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert pieces(metadata, "he<tool>he</s>") == ["▁he", "<tool>", "▁he", "</s>"]
    tokenizer = build_tokenizer(metadata, Path("x.gguf"))
    for text in TEXTS:
        if text:
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "holds no tokenizer"),
        (byte_level("tekken"), "tokenizer.ggml.pre is 'tekken'"),
        (byte_level(model="bert"), "tokenizer.ggml.model is 'bert'"),
        (byte_level(merges=["q q"]), "cannot be built"),
        (byte_level(merges=["noblank"]), "cannot be built"),
        (byte_level(words=["a"]), "'a' occurs twice"),
        (byte_level(token_type=np.array([1, 2])), "token_type has 2 items"),
        (byte_level(eos_token_id=10**6), "eos_token_id is 1000000"),
        (byte_level(add_bos_token=1), "add_bos_token must be of type bool"),
        (sentencepiece(scores=None), "scores is missing"),
        (sentencepiece(scores=np.zeros(3)), "scores has 3 items"),
    ],
)
def test_refused_by_name(metadata, message):
    with pytest.raises(ModelError, match=message):
        build_tokenizer(metadata, Path("x.gguf"))


def test_large_vocabularies_ask_no_network(monkeypatch):
    """transformers looks up models with over 100,000 tokens on the network unless it knows they are local."""
    import socket

    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: asked.append(args))
    build_tokenizer(byte_level(words=[f"<w{i}>" for i in range(100_001)]), Path("x.gguf"))
    assert not asked


def render(template):
    metadata = {**byte_level(), "tokenizer.chat_template": template}
    return build_tokenizer(metadata, Path("x.gguf")).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )


def test_chat_template():
    template = "{% for m in messages %}{{ '<|start|>' + m['role'] + ':' + m['content'] }}{% endfor %}"
    assert render(template) == "<|start|>user:hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch MARK') }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__['os'].system('touch MARK') }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '%s'|format(messages.__class__) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_chat_template_cannot_reach_python(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    text = ""
    with suppress(jinja2.TemplateError, TypeError):
        text = render(template)
    assert not any(word in text for word in ("class", "object", "root:"))
    assert not any(tmp_path.iterdir())


def compare_with_transformers(path: Path):
    from transformers import AutoTokenizer

    witness = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer = open_checkpoint(path).load_tokenizer()
    for text in [*TEXTS, "".join(TEXTS), *(token + "x " + token for token in witness.all_special_tokens)]:
        # transformers does not isolate digits for `smollm`; the vocabulary makes up for it with ASCII digits only.
        text = text.replace("½", "")
        ids = tokenizer.encode(text)
        assert ids == witness.encode(text), text
        assert tokenizer.decode(ids) == witness.decode(ids) == text
    assert tokenizer.vocab_size == witness.vocab_size
    assert (tokenizer.bos_token, tokenizer.eos_token) == (witness.bos_token, witness.eos_token)
    return tokenizer, witness


def test_a_small_file_as_transformers_reads_it(tmp_path):
    def gpt2_rules(writer):  # transformers knows these, and the sample has merges that digits rules would forbid
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "gpt-2"

    compare_with_transformers(write_model(tmp_path / "m.gguf", "llama", tiny_state(), extra=gpt2_rules))


def test_the_default_model_as_transformers_reads_it():
    path = find_cached(SMOLLM2, cache_folder())
    if path is None:
        pytest.skip("the default model is not in the cache")
    tokenizer, witness = compare_with_transformers(path)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == witness.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert tokenizer.encode("Hi")[0] != tokenizer.bos_token_id
