"""TokenBytes: the bytes that one token stands for, also where they are only part of a character.

    to_bytes = TokenBytes(tokenizer)
    to_bytes(token_id, decoded)        # decoded: what the tokenizer makes of this token alone

A tokenizer decodes half a character to U+FFFD, whose bytes are not the token's. The vocabulary has the right ones:
byte-level tokenizers write each byte as a letter of an alphabet of 256, those with byte fallback write <0xE6>.
"""

from __future__ import annotations

import re
from typing import Any

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# GPT-2's alphabet: bytes that can be seen stand for themselves, the others are moved behind the first 256 characters.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTES = {chr(byte): byte for byte in VISIBLE} | {chr(256 + number): byte for number, byte in enumerate(HIDDEN)}


class TokenBytes:
    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()
        self._is_byte_level, self._has_fallback = b"ByteLevel" in state, b"ByteFallback" in state

        self._known: dict[int, bytes] = {}  # the tokenizer takes some microseconds, and there may be 20 for a position

    def __call__(self, token_id: int, decoded: str | None) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._find(token_id, decoded)
        return self._known[token_id]

    def _find(self, token_id: int, decoded: str | None) -> bytes:
        if token_id not in self._added and (self._is_byte_level or self._has_fallback):
            piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""  # type: ignore[union-attr]
            if self._has_fallback and (found := BYTE_TOKEN.fullmatch(piece)):
                return bytes.fromhex(found[1])
            if self._is_byte_level and all(char in BYTES for char in piece):
                return bytes(BYTES[char] for char in piece)
            if self._has_fallback:  # alone, a decoder would strip the space
                return piece.replace("▁", " ").encode(errors="replace")
        return (decoded or "").encode(errors="replace")
