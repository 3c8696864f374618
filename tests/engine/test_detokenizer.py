"""Detokenizer: streams of any cut give the same growing text, half characters and stop strings stay hidden."""

import functools
import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.detokenizer import MAX_PENDING, MAX_SPAN, MAX_WINDOW, StopMatch
from nanovllm.engine.detokenizer import Detokenizer as Taking
from nanovllm.engine.token_bytes import TokenBytes
from nanovllm.sampling_params import SamplingParams

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop here, stop there; the end is near.\n\n",
    "你好,世界。今天天气很好,我们去公园吧。你好吗?",
    "Emoji 😀😁 and 👩‍👩‍👧 families, déjà vu, naïve café.",
] * 4
SPECIAL = ["<s>", "</s>", "<|end|>"]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(kind):
    """No Chinese in the vocabulary: it comes out as runs of byte tokens."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz.,;TSHW", "▁", "th", "▁th", "▁the", "he", "st", "op", "stop", "▁stop", "▁fox"]
    vocab = {
        piece: i for i, piece in enumerate(["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    }
    pairs = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("h", "e"), ("s", "t"), ("o", "p"), ("st", "op"), ("▁", "stop")]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


@functools.cache
def tokenizer_of(kind):
    inner = byte_level() if kind == "byte_level" else sentencepiece(kind)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


KINDS = ["byte_level", "metaspace", "llama"]
kinds = pytest.mark.parametrize("kind", KINDS)


def encode(kind, text):
    return tokenizer_of(kind).encode(text, add_special_tokens=False)


def byte_ids(kind, data):
    """One token per byte."""
    tokenizer = tokenizer_of(kind)
    if kind == "byte_level":
        chars = _byte_chars()
        return [tokenizer.convert_tokens_to_ids(chars[byte]) for byte in data]
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


def _byte_chars():
    """The character byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(other)) for byte in range(256)]


class Detokenizer(Taking):
    """With all the text that could be taken so far."""

    taken = ""

    @property
    def text(self):
        self.taken += self.take()
        return self.taken


def make(kind, prompt_ids=(), **params):
    return Detokenizer(tokenizer_of(kind), list(prompt_ids), SamplingParams(**params))


def stream(detokenizer, chunks):
    """Feed chunk by chunk: (all texts seen, the match, tokens taken)."""
    texts, match, taken = [detokenizer.text], None, 0
    for chunk in chunks:
        match = detokenizer.feed(chunk)
        texts.append(detokenizer.text)
        if match is not None:
            taken += match.num_tokens
            break
        taken += len(chunk)
    detokenizer.finish()
    texts.append(detokenizer.text)
    for earlier, later in itertools.pairwise(texts):
        assert later.startswith(earlier), (earlier, later)
    return texts, match, taken


def singles(ids):
    return [[i] for i in ids]


def chunked(ids, cuts):
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


def reference(kind, prompt_ids, ids, skip=True):
    decode = functools.partial(tokenizer_of(kind).decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return decode(list(prompt_ids) + list(ids))[len(decode(list(prompt_ids))) :]


# --- text ------------------------------------------------------------------------------------------------------------

TEXTS = st.text(alphabet=st.sampled_from("the stop fox.,\n ab你好世界😀é👩\u200d"), max_size=60)
# They begin or end inside a character.
CUT_TEXTS = st.tuples(TEXTS.map(str.encode), st.integers(0, 3), st.integers(0, 3))
BYTES = st.one_of(st.binary(max_size=30), CUT_TEXTS.map(lambda cut: cut[0][cut[1] : len(cut[0]) - cut[2]]))
CUTS = st.lists(st.integers(0, 500), max_size=8)


@kinds
@settings(max_examples=120, deadline=None)
@given(prompt=TEXTS, text=TEXTS, cuts=CUTS)
def test_any_cut_gives_the_whole_text(kind, prompt, text, cuts):
    prompt_ids, ids = encode(kind, prompt), encode(kind, text)
    expected = reference(kind, prompt_ids, ids)
    for chunks in (singles(ids), [ids], chunked(ids, cuts)):
        texts, match, taken = stream(make(kind, prompt_ids, max_tokens=None), chunks)
        assert texts[-1] == expected
        assert (match, taken) == (None, len(ids))


@kinds
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_at_all(kind, data):
    """Random tokens: invalid bytes, special tokens, ids outside the vocabulary."""
    size = len(tokenizer_of(kind))
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=80))
    skip = data.draw(st.booleans())
    prompt_ids = data.draw(st.one_of(TEXTS.map(lambda text: encode(kind, text)), st.lists(st.integers(0, size + 3))))
    outcomes = {
        stream(make(kind, prompt_ids, skip_special_tokens=skip), chunks)[0][-1]
        for chunks in (singles(ids), [ids], chunked(ids, data.draw(CUTS)))
    }
    assert len(outcomes) == 1
    expected = reference(kind, prompt_ids, ids, skip)
    is_whole = "\ufffd" not in reference(kind, [], prompt_ids, skip)
    if is_whole and (kind == "byte_level" or "\ufffd" not in expected):
        assert outcomes == {expected}


def text_of(kind, data):
    """Byte-fallback decoders show every byte that is no character as U+FFFD of its own, byte-level ones do not."""
    if kind == "byte_level":
        return data.decode(errors="replace")
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))


@kinds
@settings(max_examples=200, deadline=None)
@given(prompt=BYTES, data=BYTES, cuts=CUTS)
def test_any_bytes_after_any_bytes(kind, prompt, data, cuts):
    """What the prompt broke off is completed by the output or is not shown; whole characters always are."""
    prompt_ids, ids = encode(kind, "the fox") + byte_ids(kind, prompt), byte_ids(kind, data)
    before, both = text_of(kind, prompt), text_of(kind, prompt + data)
    common = next((at for at, pair in enumerate(zip(before, both)) if pair[0] != pair[1]), min(len(before), len(both)))
    for chunks in (singles(ids), [ids], chunked(ids, cuts)):
        assert stream(make(kind, prompt_ids), chunks)[0][-1] == both[common:]


@pytest.mark.parametrize("kind", ["metaspace", "llama"])
@pytest.mark.parametrize("skip", [True, False])
def test_broken_bytes_do_not_destroy_the_characters_beside_them(kind, skip):
    """tokenizers' ByteFallback writes U+FFFD for each byte of a run of byte tokens if any of the run is invalid."""
    you, end = byte_ids(kind, "你".encode()), tokenizer_of(kind).convert_tokens_to_ids("<|end|>")
    the = encode(kind, "the")
    for ids, expected in (
        (you * 5, "你" * 5),
        (you * 30, "你" * 30),
        ([*you, *you[:1], *you * 2], "你\ufffd你你"),
        ([*you, *encode(kind, " stop")[-1:], *you], "你 stop你"),
        ([*you, *you[:1], len(tokenizer_of(kind)) + 3, *you[1:]], "你你"),  # an id outside the vocabulary shows nothing
        ([*you, *you[:1], end, *you[1:]], "你你" if skip else "你\ufffd<|end|>\ufffd\ufffd"),
    ):
        for chunks in (singles(ids), [ids]):
            texts, _, _ = stream(make(kind, the + you[:2], skip_special_tokens=skip), chunks)
            assert texts[-1] == expected


@kinds
def test_half_characters_are_never_shown(kind):
    text = "a你😀é"
    ids = byte_ids(kind, text.encode())
    texts, _, _ = stream(make(kind, encode(kind, "the")), singles(ids))
    seen = [t for i, t in enumerate(texts) if i == 0 or t != texts[i - 1]]
    assert seen == ["", "a", "a你", "a你😀", "a你😀é"]


@kinds
def test_finish_releases_half_a_character(kind):
    detokenizer = make(kind, encode(kind, "the"))
    detokenizer.feed(byte_ids(kind, b"ok\xe4\xbd"))
    assert detokenizer.text == "ok"
    detokenizer.finish()
    assert detokenizer.text == ("ok\ufffd" if kind == "byte_level" else "ok\ufffd\ufffd")
    detokenizer.finish()
    assert detokenizer.feed(encode(kind, "more")) is None
    assert detokenizer.text.rstrip("\ufffd") == "ok"


@kinds
def test_a_character_begun_in_the_prompt_is_completed_in_the_output(kind):
    you = byte_ids(kind, "你".encode())
    texts, _, _ = stream(make(kind, encode(kind, "the") + you[:2]), singles(you[2:] + encode(kind, "fox")))
    assert texts[1] == "你"
    nothing = make(kind, encode(kind, "the") + you[:2])
    nothing.finish()
    assert nothing.text == ""


@pytest.mark.parametrize("kind", ["metaspace", "llama"])
def test_leading_space_follows_the_prompt(kind):
    the, stop = encode(kind, "the"), encode(kind, "the stop")[-1:]
    assert tokenizer_of(kind).decode(stop) == "stop"
    for prompt_ids, first in ((the, " stop"), ([], "stop"), ([1], "stop"), ([*the, 1, 1, 1, 1, 1, 1, 1, 1], " stop")):
        for chunks in (singles(stop * 40), [stop * 40]):
            texts, _, _ = stream(make(kind, prompt_ids), chunks)
            assert texts[-1] == first + " stop" * 39
    # special tokens between words show nothing and do not swallow the space after them
    for gap in (1, MAX_PENDING, MAX_PENDING + 1, 3 * MAX_PENDING, MAX_SPAN + 1):
        for chunks in (singles([*stop, *[2] * gap, *stop]), [[*stop, *[2] * gap, *stop]]):
            assert stream(make(kind, the), chunks)[0][-1] == " stop stop"


@kinds
@pytest.mark.parametrize("length", range(1, 14))
def test_prompt_that_ends_in_a_run_of_bytes(kind, length):
    prompt_ids = encode(kind, "the") + byte_ids(kind, ("世" * length).encode())
    ids = byte_ids(kind, "界".encode()) + encode(kind, "stop")
    expected = reference(kind, prompt_ids, ids)
    assert expected.startswith("界")
    assert stream(make(kind, prompt_ids), singles(ids))[0][-1] == expected


@kinds
def test_long_runs_of_whole_characters(kind):
    text = "你好世界" * (3 * MAX_WINDOW)
    ids = byte_ids(kind, text.encode())
    assert stream(make(kind), singles(ids))[0][-1] == text
    assert stream(make(kind), [ids])[0][-1] == text


@kinds
def test_invalid_bytes_for_ever_are_shown_and_stay_cheap(kind):
    ids = byte_ids(kind, b"\xff" * 300)
    detokenizer = make(kind, encode(kind, "the"))
    longest = 0
    decode = detokenizer._decode
    detokenizer._decode = lambda window: decode(window) if len(window) <= 3 * MAX_WINDOW else pytest.fail("window grew")
    for i in ids:
        detokenizer.feed([i])
        longest = max(longest, len(detokenizer._window))
    assert longest <= MAX_WINDOW + MAX_PENDING + 1
    assert len(detokenizer.text) >= 290  # shown as they come, not held until the end
    detokenizer.feed(encode(kind, "fox"))
    detokenizer.finish()
    assert detokenizer.text.startswith("\ufffd" * 300)
    assert detokenizer.text.lstrip("\ufffd ") == "fox"


@kinds
def test_skip_special_tokens(kind):
    end = tokenizer_of(kind).convert_tokens_to_ids("<|end|>")
    ids = [*encode(kind, "fox"), end, *encode(kind, "dog")]
    for chunks in (singles(ids), [ids]):
        assert "<|end|>" in stream(make(kind, skip_special_tokens=False), chunks)[0][-1]
        assert "<|end|>" not in stream(make(kind), chunks)[0][-1]
        assert stream(make(kind, stop="<|end|>"), chunks)[1] is None  # not visible, not matched
        assert stream(make(kind, stop="<|end|>", skip_special_tokens=False), chunks)[1].string == "<|end|>"


class Pieces:
    """A byte-level tokenizer whose token i is any piece of bytes."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_tokens_that_never_end_with_a_character():
    text = "你" * 30  # cut as 2 bytes, 3 bytes, 3 bytes, ..., 1 byte
    data = text.encode()
    pieces = [data[:2], *(data[i : i + 3] for i in range(2, len(data), 3))]
    for chunks in (singles(range(31)), [list(range(31))]):
        detokenizer = Detokenizer(Pieces(pieces), [], SamplingParams())
        texts, _, _ = stream(detokenizer, chunks)
        assert texts[-1] == text
        assert len(detokenizer._window) <= MAX_WINDOW + MAX_PENDING
    assert texts[1] == text


@settings(max_examples=200, deadline=None)
@given(data=st.one_of(st.binary(max_size=80), TEXTS.map(str.encode)), cuts=st.lists(st.integers(0, 99)), more=CUTS)
def test_any_bytes_in_any_pieces(data, cuts, more):
    pieces = chunked(data, cuts)
    ids = list(range(len(pieces)))
    for chunks in (singles(ids), [ids], chunked(ids, more)):
        assert stream(Detokenizer(Pieces(pieces), [], SamplingParams()), chunks)[0][-1] == data.decode(errors="replace")


def test_tokenizer_with_its_own_decode_is_respected():
    class Shouting:
        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            assert clean_up_tokenization_spaces is False
            return "".join(chr(i) for i in ids).upper()

    detokenizer = Detokenizer(Shouting(), [97], SamplingParams(stop="C"))
    assert detokenizer.feed([98, 99, 100]) == StopMatch("C", 2)
    assert detokenizer.text == "B"


# --- stop strings ----------------------------------------------------------------------------------------------------


def fed(kind, pieces, **params):
    """Each piece is encoded by itself and fed as one chunk."""
    ids = [byte_ids(kind, piece.encode()) for piece in pieces]
    return stream(make(kind, encode(kind, "the"), **params), ids)


@kinds
def test_stop_across_tokens_and_chunks(kind):
    texts, match, taken = fed(kind, ["ab", "cST", "OP", "de"], stop=["STOP"])
    assert (texts[-1], match, taken) == ("abc", StopMatch("STOP", 2), 7)
    assert texts == ["", "ab", "abc", "abc", "abc"]
    texts, match, taken = fed(kind, ["ab", "cST", "OPq", "de"], stop=["STOP"], include_stop_str_in_output=True)
    assert (texts[-1], match, taken) == ("abcSTOP", StopMatch("STOP", 2), 7)
    assert texts == ["", "ab", "abcST", "abcSTOP", "abcSTOP"]


@kinds
def test_held_text_is_released(kind):
    texts, match, _ = fed(kind, ["aST", "O", "x"], stop=["STOP"])
    assert (texts, match) == (["", "a", "a", "aSTOx", "aSTOx"], None)
    texts, match, _ = fed(kind, ["aST", "O"], stop=["STOP"])
    assert (texts, match) == (["", "a", "a", "aSTO"], None)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "string", "taken"),
    [
        ("abcabd", ["abd"], "abc", "abd", 6),
        ("aab", ["ab"], "a", "ab", 3),
        ("ababac", ["abac"], "ab", "abac", 6),  # a failed match may contain the start of the next
        ("aaab", ["aab", "ab"], "a", "aab", 4),  # both end here: the one that begins first
        ("xabc", ["abc", "ab"], "x", "ab", 3),
        ("xabc", ["bc", "abc"], "x", "abc", 4),
        ("xbc", ["c", "bc", "xbcd"], "x", "bc", 3),
        ("\n\n", ["\n\n", "\n"], "", "\n", 1),
        ("aéb", ["é"], "a", "é", 3),
        ("a😀b", ["b"], "a😀", "b", 6),
        ("abc", ["z"], "abc", None, 3),
        ("a", ["a"], "", "a", 1),
    ],
)
@kinds
def test_which_stop(kind, text, stops, shown, string, taken):
    ids = byte_ids(kind, text.encode())
    for chunks in (singles(ids), [ids], [ids + byte_ids(kind, b"tail")] if string else [ids]):
        texts, match, used = stream(make(kind, encode(kind, "the"), stop=stops), chunks)
        assert (texts[-1], match.string if match else None, used) == (shown, string, taken)
        with_stop = stream(make(kind, encode(kind, "the"), stop=stops, include_stop_str_in_output=True), chunks)
        assert with_stop[0][-1] == shown + (string or "")


def test_stop_inside_one_token():
    (token,) = encode("llama", "stop")
    for stop, shown in (("to", " s"), ("s", " "), (" st", ""), ("p", " sto")):
        texts, match, taken = stream(make("llama", encode("llama", "the"), stop=stop), [[token, token]])
        assert (texts[-1], match, taken) == (shown, StopMatch(stop, 1), 1)


def test_text_before_half_a_character_is_searched():
    detokenizer = make("byte_level", stop="b")
    assert detokenizer.feed(byte_ids("byte_level", b"ab\xe4\xbd")) == StopMatch("b", 2)


@kinds
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab\n你", max_size=40),
    stops=st.lists(st.text(alphabet="ab\n你", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    cuts=CUTS,
)
def test_stops_like_a_naive_search(kind, text, stops, include, cuts):
    ids = byte_ids(kind, text.encode())  # so the text after n tokens is known without the class under test
    expected, string, taken = text, None, len(ids)
    for num in range(len(ids) + 1):
        so_far = text.encode()[:num].decode(errors="ignore")
        found = [(so_far.find(stop), len(stop), stop) for stop in stops if stop in so_far]
        if found:
            at, length, string = min(found)
            expected, taken = so_far[: at + (length if include else 0)], num
            break
    for chunks in (singles(ids), [ids], chunked(ids, cuts)):
        detokenizer = make(kind, encode(kind, "the"), stop=stops, include_stop_str_in_output=include)
        texts, match, used = stream(detokenizer, chunks)
        assert (texts[-1], match.string if match else None, used) == (expected, string, taken)


@kinds
@pytest.mark.parametrize("bulk", [False, True])
def test_text_before_min_tokens_is_not_searched(kind, bulk):
    def outcome(exempt, searched, **params):
        detokenizer = make(kind, encode(kind, "the"), **params)
        for chunk in [byte_ids(kind, exempt)] if bulk else singles(byte_ids(kind, exempt)):
            assert detokenizer.feed(chunk, look_for_stops=False) is None
        ids = byte_ids(kind, searched)
        texts, match, _ = stream(detokenizer, [ids] if bulk else singles(ids))
        return texts[-1], match.string if match else None

    assert outcome(b"aSTOPb", b"cSTOPd", stop="STOP") == ("aSTOPbc", "STOP")
    assert outcome(b"aSTO", b"Pb", stop="STOP") == ("a", "STOP")  # completed by a token that is searched
    assert outcome(b"aSTOP", b"b", stop="STOP") == ("aSTOPb", None)
    assert outcome(b"aSTOP", b"X", stop=["STOP", "STOPX"]) == ("a", "STOPX")
    assert outcome(b"aSTOP", b"Y", stop=["STOP", "STOPX"]) == ("aSTOPY", None)
    assert outcome(b"aaa", b"a", stop="aa") == ("aa", "aa")
    assert outcome(b"aSTOP", b"", stop="STOP") == ("aSTOP", None)


def test_cost_does_not_grow_with_the_text():
    ids = encode("byte_level", " the quick brown fox" * 500)
    assert len(ids) > 1500
    detokenizer = make("byte_level", ids[:50])
    start = time.perf_counter()
    for i in ids:
        detokenizer.feed([i])
        assert len(detokenizer._window) <= MAX_WINDOW
    one_by_one = (time.perf_counter() - start) / len(ids)
    calls = []
    bulk = make("byte_level", ids[:50], stop="never")
    decode = bulk._decode
    bulk._decode = lambda window: calls.append(len(window)) or decode(window)
    bulk.feed(ids)
    assert bulk.text == detokenizer.text
    assert max(calls) <= 3 * MAX_SPAN
    assert sum(calls) < 5 * len(ids)
    assert one_by_one < 500e-6  # 5 us on a quiet machine


@kinds
def test_bytes_of_single_tokens(kind):
    """Put together they are the text; decoded one by one, half characters are lost."""
    tokenizer = tokenizer_of(kind)
    to_bytes = TokenBytes(tokenizer)
    for text in ("the fox 狐狸 stop é", "😀", "the</s>"):
        ids = encode(kind, text)
        found = b"".join(to_bytes(token, tokenizer.decode([token])) for token in ids).decode()
        assert found.lstrip(" ") == text
    assert [to_bytes(token, "x") for token in byte_ids(kind, "é".encode())] == [b"\xc3", b"\xa9"]
    assert to_bytes(tokenizer.eos_token_id, "</s>") == b"</s>"
    assert TokenBytes(None)(5, None) == b""
