"""Detokenizer: turns the tokens of one sequence into text, piece by piece, and finds stop strings in it.

    detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)
    match = detokenizer.feed(token_ids)   # None, or which stop string ended the text and how many tokens it took
    detokenizer.take()                    # what may be shown now and was not taken before
    detokenizer.finish()                  # no more tokens follow: release what was held back

Text is what follows the prompt's text. Half characters are held back, and so is text that may turn out to be the
beginning of a stop string (unless stop strings are part of the output). How the tokens are split over `feed` calls
makes no difference. The cost of a token does not grow with the text (about 5 us one by one, 0.6 us in bulk), and text
that was taken is not kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.light_tokenizer import LightTokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no (whole) character
# A character has at most 4 bytes, so at most 3 are waiting for more. Byte-level decoders show those as one U+FFFD,
# byte-fallback decoders as one each: only the last three can still change.
MAX_UNDECIDED = 3
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of byte-fallback tokenizers
MAX_WINDOW = 12  # tokens decoded per token; the left part is context, dropped when the window is full
MAX_PENDING = 8  # tokens without a clean end before the window is cut anyway: a model may emit invalid bytes for ever
MAX_SPAN = 256  # tokens decoded at once in bulk; also bounds how long a context can be
# Prompt tokens tried as left context, shortest first. 4 to 7 because a cut inside a run of byte tokens is a whole
# character's border for one of four neighbouring lengths at least.
CONTEXT_SIZES = (4, 5, 6, 7, 16, 64)


@dataclass(frozen=True, slots=True)
class StopMatch:
    string: str
    num_tokens: int  # of the tokens of this feed, up to and including the one that completed the string


class Detokenizer:
    """Only a window of the last tokens is ever decoded: `context + pending`.

    The text of a sequence is not the sum of its tokens' texts: a SentencePiece decoder strips the space of the first
    token, and a character may be spread over tokens. So the window keeps some tokens whose text was released already
    (`_window[:_num_settled]`), and new text is what its decoding has beyond `_shown`.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decode = _decoder(tokenizer, params.skip_special_tokens)
        self._stops: tuple[str, ...] = tuple(params.stop or ())
        self._stop_heads = {stop[0] for stop in self._stops}
        self._longest_stop = max(map(len, self._stops), default=0)
        self._hold = not params.include_stop_str_in_output
        self._ended = False
        self._ready: list[str] = []  # may be shown, not taken yet
        self._tail = ""  # the end of the text that may become a stop string; shown already unless _hold
        self._num_exempt = 0  # a stop string that ends within these first characters of _tail does not count
        self._window = self._prompt_context(prompt_token_ids)
        text = self._decode(self._window)
        # A half character at the end of the prompt belongs to the output that completes it; if none does, it is prompt.
        self._shown = text[: _decided(text)]
        self._num_broken = len(text) - len(self._shown)  # U+FFFD of the prompt that the next text may begin with
        self._num_settled = 0
        self._settle()

    def take(self) -> str:
        ready, self._ready = self._ready, []
        return "".join(ready)

    def feed(self, token_ids: Sequence[int], look_for_stops: bool = True) -> StopMatch | None:
        """Append tokens. After a match, or `finish`, nothing more is taken.

        With look_for_stops=False (min_tokens not reached) stop strings that these tokens complete are plain text; one
        that only begins in them counts when later tokens complete it.

        Large feeds are decoded in spans of half of what is left, so that the last span, the context of the next feed,
        is one token.
        """
        done = 0
        while done < len(token_ids) and not self._ended:
            size = min((len(token_ids) - done + 1) // 2, MAX_SPAN)
            match = self._feed_span(list(token_ids[done : done + size]), look_for_stops)
            if match is not None:
                return StopMatch(match.string, done + match.num_tokens)
            done += size
        return None

    def finish(self) -> None:
        if self._ended:
            return
        if self._hold:
            self._ready.append(self._tail)
        if len(self._window) > self._num_settled:
            self._ready.append(self._without_prompt(self._decode(self._window)[len(self._shown) :]))
        self._ended = True

    # Tokens to text ----------------------------------------------------------------------------------------------

    def _feed_span(self, token_ids: list[int], look_for_stops: bool) -> StopMatch | None:
        """All at once if `_advance_span` can, else in halves; the result is that of one token at a time."""
        if len(token_ids) == 1:
            stop = self._append(self._without_prompt(self._advance(token_ids[0])), look_for_stops)
            return None if stop is None else StopMatch(stop, 1)
        if self._advance_span(token_ids, look_for_stops):
            return None
        half = len(token_ids) // 2
        match = self._feed_span(token_ids[:half], look_for_stops)
        if match is None:
            match = self._feed_span(token_ids[half:], look_for_stops)
            match = None if match is None else StopMatch(match.string, half + match.num_tokens)
        return match

    def _advance_span(self, token_ids: list[int], look_for_stops: bool) -> bool:
        """Take all tokens if their text is new, whole and without a stop string; else change nothing."""
        text = self._decode(self._window + token_ids)
        new = text[len(self._shown) :]
        if not new or REPLACEMENT in new:
            return False
        if look_for_stops and self._find_stop(new) is not None:
            return False
        self._append(self._without_prompt(new), look_for_stops)
        self._window = self._window[self._num_settled :] + token_ids
        self._shown = self._decode(self._window)
        self._settle()
        return True

    def _advance(self, token_id: int) -> str:
        """Take one token; returns the text that it completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        end = max(_decided(text), len(self._shown))
        new = text[len(self._shown) : end]
        self._shown = text[:end]
        if end == len(text) and end > self._settled_len:  # ends with a whole character, and has new text
            if len(self._window) >= MAX_WINDOW:
                del self._window[: self._num_settled]
                self._shown = self._decode(self._window)
            self._settle()
        elif len(self._window) - self._num_settled > MAX_PENDING:
            new += self._cut_window(text, end)
        return new

    def _cut_window(self, text: str, end: int) -> str:
        """Too many tokens without a whole character at the end: keep a short window; returns text released by it."""
        if end == len(text):  # tokens without text (skipped special tokens): drop them and keep the context
            del self._window[self._num_settled :]
            return ""
        undecided = text[end:]
        self._window = self._window[-MAX_PENDING // 2 :]
        self._shown = self._decode(self._window)
        self._num_settled = self._settled_len = 0
        if self._shown.endswith(undecided):
            self._shown = self._shown[: -len(undecided)]
            return ""
        return undecided

    def _without_prompt(self, new: str) -> str:
        """Drops U+FFFD that stand for bytes at the prompt's end that were never completed to a character."""
        num_dropped = min(self._num_broken, len(new) - len(new.lstrip(REPLACEMENT)))
        self._num_broken = self._num_broken - num_dropped if num_dropped == len(new) else 0
        return new[num_dropped:]

    def _settle(self) -> None:
        self._num_settled, self._settled_len = len(self._window), len(self._shown)

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last few prompt tokens that show something and do not begin inside a character."""
        for size in CONTEXT_SIZES:
            context = list(prompt_token_ids[-size:])
            text = self._decode(context)
            visible = text[: _decided(text)]
            if (visible and REPLACEMENT not in visible) or size >= len(prompt_token_ids):
                break
        return context

    # Stop strings ------------------------------------------------------------------------------------------------

    def _append(self, new: str, look_for_stops: bool) -> str | None:
        """Add decided text; the stop string it completes, if any, ends the text."""
        if not self._stops:
            self._ready.append(new)
            return None
        found = self._find_stop(new) if look_for_stops else None
        num_shown = 0 if self._hold else len(self._tail)
        tail = self._tail + new
        if found is not None:
            start, stop = found
            self._ready.append(tail[num_shown : start if self._hold else start + len(stop)])
            self._ended = True
            return stop
        if not look_for_stops:
            self._num_exempt = len(tail)
        # A place that cannot begin a stop string now never will, so it leaves the tail and is not tried again.
        start = max(0, len(tail) - self._longest_stop + 1)
        while start < len(tail):
            if tail[start] in self._stop_heads:
                rest = tail[start:]
                if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                    break
            start += 1
        self._ready.append(tail[num_shown : start if self._hold else None])
        self._tail, self._num_exempt = tail[start:], max(0, self._num_exempt - start)
        return None

    def _find_stop(self, new: str) -> tuple[int, str] | None:
        """Where in `_tail + new` the first stop string begins; of two that begin there, the shorter came first."""
        if not self._stops:
            return None
        tail = self._tail + new
        found = [
            (at, len(stop), stop)
            for stop in self._stops
            if (at := tail.find(stop, max(0, self._num_exempt - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, _, stop = min(found)
        return at, stop


def _decided(text: str) -> int:
    """How much of a decoded text no further byte can change."""
    end = len(text)
    while end > 0 and len(text) - end < MAX_UNDECIDED and text[end - 1] == REPLACEMENT:
        end -= 1
    return end


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Without clean-up of spaces, which would change text that was released already.

    Unless the tokenizer has a `_decode` of its own, the Rust tokenizer inside is called directly: six tokens take
    2.4 us instead of 8.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    method = getattr(type(tokenizer), "_decode", None)
    is_usual = getattr(method, "__module__", "").startswith("transformers.tokenization_utils")
    if backend is None or not (is_usual or isinstance(tokenizer, LightTokenizer)):
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return lambda ids: tokenizer.decode(ids, **options)

    def decode(ids: list[int]) -> str:
        return backend.decode(ids, skip_special_tokens=skip_special_tokens)

    has_bytes = all(backend.token_to_id(_byte_token(byte)) is not None for byte in REPLACEMENT.encode())
    if not has_bytes or backend.decoder is None or b"ByteFallback" not in backend.decoder.__getstate__():
        return decode

    def decode_whole_characters(ids: list[int]) -> str:
        text = decode(ids)
        return text if REPLACEMENT not in text else decode(_mend_bytes(backend, decode, ids))

    return decode_whole_characters


def _mend_bytes(backend: Any, decode: Callable[[list[int]], str], ids: list[int]) -> list[int]:
    """The ids with every byte that belongs to no character replaced by the bytes of U+FFFD.

    tokenizers' ByteFallback decodes a run of byte tokens as a whole: one invalid byte, such as the last of a prompt
    that was cut inside a character, turns all characters of the run into U+FFFD, for ever. Mended, only that byte is.
    """
    mended: list[int] = []
    run = bytearray()

    def end_run() -> None:
        text = run.decode(errors="surrogateescape")  # one surrogate for each byte that is no character
        data = re.sub("[\udc80-\udcff]", REPLACEMENT, text).encode()
        mended.extend(backend.token_to_id(_byte_token(byte)) for byte in data)
        run.clear()

    probe = [backend.token_to_id(_byte_token(REPLACEMENT.encode()[0]))]
    for token_id in ids:
        token = backend.id_to_token(token_id) or ""
        if BYTE_TOKEN.fullmatch(token):
            run.append(int(token[3:5], 16))
        elif decode([*probe, token_id, *probe]) != decode(probe + probe):  # not skipped: it ends a run of bytes
            end_run()
            mended.append(token_id)
    end_run()
    return mended


def _byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"
