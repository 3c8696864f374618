"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library.

GGUF stores the vocabulary and names a recipe (`tokenizer.ggml.model`); the recipe itself is known, not stored:
  "gpt2"   byte-level BPE. `tokenizer.ggml.pre` names the rule that cuts text into words before BPE. A wrong rule gives
           plausible but wrong tokens, so an unknown name is refused.
  "llama"  SentencePiece BPE: spaces are written as U+2581, unknown characters fall back to one token per byte, and
           instead of a merge list each piece has a score; the pair that makes the best piece is merged first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.errors import ModelError
from nanovllm.weights.light_tokenizer import LightTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' name -> GGUF's

# English contractions | word with one leading sign | number | signs | line ends | trailing blanks | blanks.
# Qwen 2 and Llama 3 differ only in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with an upper and a lower case: Latin, Greek, Cyrillic, ..., but no Armenian small letters, no Georgian, no
# mathematical ones. DeepSeek's own rule names each range; this is the same set.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[\x{0}-\x{55F}\x{589}-\x{10C5}\x{1100}-\x{1C7F}\x{1C90}-\x{2CFF}\x{A640}-\x{A78E}"
    r"\x{AB70}-\x{FFFF}\x{10400}-\x{104FF}\x{10C80}-\x{10CFF}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]]"
)
_EAST_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_GPT2, _SMOLLM, _QWEN2, _LLAMA3 = "gpt-2", "smollm", "qwen2", "llama-bpe"
_DEEPSEEK, _DEEPSEEK_CODER, _DEEPSEEK3 = "deepseek-llm", "deepseek-coder", "deepseek-v3"
# Several patterns cut one after the other: each cuts the pieces that those before it left. What none of them matches
# stays whole. V3: numbers, then Chinese characters and kana, then the rest. V2's signs ":-~" include ASCII letters, in
# the rule it was trained with too. It and the coder's end with single digits; llama.cpp has whole numbers for V2, which
# is the same, since no token of V2 has two digits.
_CUTS = {
    _QWEN2: (_WORDS % 1,),
    _LLAMA3: (_WORDS % 3,),
    _DEEPSEEK: (
        r"[\r\n]",
        r"\s?" + _CASED + "+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _EAST_ASIAN,
        r"\p{N}",
    ),
    _DEEPSEEK_CODER: (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    _DEEPSEEK3: (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
_PRE = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "deepseek-llm": _DEEPSEEK,  # V2 and V2-Lite too
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
}


class _Vocabulary:
    """The checked `tokenizer.*` metadata."""

    def __init__(self, metadata: dict[str, Any], path: Path):
        self.metadata, self.path = metadata, path
        self.model = self.get("model", str)
        self.tokens = self.get("tokens", list)
        if not self.model or not self.tokens:
            raise ModelError(f"{path}: holds no tokenizer (tokenizer.ggml.model, .tokens); use a file that does.")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise ModelError(f"{path}: token {twice!r} occurs twice in tokenizer.ggml.tokens.")
        types = self.get("token_type", np.ndarray)
        self.types = [_NORMAL] * len(self.tokens) if types is None else self.per_token("token_type", types)

    def get(self, key: str, kind: type) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and type(value) is not kind:
            raise ModelError(f"{self.path}: tokenizer.ggml.{key} must be of type {kind.__name__}, got {value!r:.80}.")
        return value

    def per_token(self, key: str, values: np.ndarray) -> list:
        if len(values) != len(self.tokens):
            raise ModelError(f"{self.path}: tokenizer.ggml.{key} has {len(values)} items, not {len(self.tokens)}.")
        return values.tolist()

    def token(self, key: str) -> str | None:
        token_id = self.get(f"{key}_token_id", int)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            name = f"tokenizer.ggml.{key}_token_id"
            raise ModelError(f"{self.path}: {name} is {token_id}, but there are {len(self.tokens)} tokens.")
        return self.tokens[token_id]


def build_tokenizer(metadata: dict[str, Any], path: Path) -> LightTokenizer:
    vocabulary = _Vocabulary(metadata, path)
    if vocabulary.model == "gpt2":
        build, adds_bos = _byte_level, _PRE.get(vocabulary.get("pre", str) or "default") == _LLAMA3
    elif vocabulary.model == "llama":
        build, adds_bos = _sentencepiece, True
    else:
        raise ModelError(f"{path}: tokenizer.ggml.model is {vocabulary.model!r}; supported: gpt2, llama.")
    try:
        return _wrap(vocabulary, build(vocabulary), adds_bos)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception, for instance for a merge of no token
        raise ModelError(f"{path}: the tokenizer in this file cannot be built ({error}).") from error


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.get("pre", str) or "default"
    pre = _PRE.get(name)
    if pre is None:
        raise ModelError(
            f"{vocabulary.path}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(_PRE)}. The tokenizer of the "
            "original model can be used: give its folder as tokenizer."
        )
    merges = vocabulary.get("merges", list)
    if merges is None:
        raise ModelError(f"{vocabulary.path}: tokenizer.ggml.merges is missing.")
    # "left right"; a left part may itself begin with a space, hence the search from 1.
    pairs = [(merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :]) for merge in merges]
    # Llama 3 was trained with words that are whole tokens taken as they are, even where no merge leads to them.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=pre == _LLAMA3))
    if pre in (_GPT2, _SMOLLM):
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == _SMOLLM else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))  # GPT-2's own pattern
    else:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _CUTS[pre]]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = vocabulary.get("scores", np.ndarray)
    if scores is None:
        raise ModelError(f"{vocabulary.path}: tokenizer.ggml.scores is missing.")
    merges = _merges_from_scores(vocabulary, vocabulary.per_token("scores", scores))
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # Every stretch of text between special tokens gets the leading space, as llama.cpp does.
    prefix = vocabulary.get("add_space_prefix", bool) is not False
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces, best score first.

    SentencePiece merges the pair whose *result* scores highest, so all splits of one piece are equally good; their
    order among themselves only breaks ties that SentencePiece breaks by position.
    """
    ids = {t: i for i, (t, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types)) if kind == _NORMAL}
    ranked = []
    for piece, token_id in ids.items():
        # Real pieces end at 16 characters, runs of spaces at 31; a hostile one would cost its length squared.
        if len(piece) > 512:
            raise ModelError(f"{vocabulary.path}: token {token_id} has {len(piece)} characters; the limit is 512.")
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in ranked]


def _wrap(vocabulary: _Vocabulary, tokenizer: Tokenizer, adds_bos: bool) -> LightTokenizer:
    from tokenizers import AddedToken

    typed = list(zip(vocabulary.tokens, vocabulary.types))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in typed if kind in (_CONTROL, _UNKNOWN) and t]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, kind in typed if kind == _USER_DEFINED and t]
    )
    template = vocabulary.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{vocabulary.path}: tokenizer.chat_template must be a string.")
    add_bos, bos = vocabulary.get("add_bos_token", bool), vocabulary.token("bos")
    if add_bos and bos is None:
        raise ModelError(f"{vocabulary.path}: add_bos_token is true but tokenizer.ggml.bos_token_id is missing.")
    return LightTokenizer(
        tokenizer,
        {f"{short}_token": vocabulary.token(name) for short, name in _NAMED.items()},
        template,
        bos=bos is not None and (adds_bos if add_bos is None else add_bos),
        eos=bool(vocabulary.get("add_eos_token", bool)),
    )
