"""Special tokens inside texts that users write.

A tokenizer reads "<|im_end|>" as the control token of that name in any text, so a user can end their own message and
begin one of another role. transformers and vLLM do so, and prompts that are written out by hand need it; the option
special_tokens_in_text="refuse" or "escape" turns it off. Whether a text holds a control token is decided by its token
ids, so no other text changes. Each text is checked alone, before the chat template puts its own tokens around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.errors import RequestError

BREAK = "\u200b"  # a space without width, put after the first character of what would be a special token


class ControlTokens:
    """`encode(text, add_special_tokens, what)` gives the token ids of a text."""

    def __init__(self, tokenizer: Any | None, mode: str, encode: Callable[[str, bool, str], list[int]]) -> None:
        self._mode = mode
        self._encode = encode
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {token_id: str(token) for token_id, token in added.items() if token.special}
        self._unknown = getattr(tokenizer, "unk_token_id", None)

    def clean(self, text: str, where: str) -> str:
        """The text without control tokens; RequestError if it has some and they are refused."""
        if self._mode == "allow" or not (found := self._find(text, where)):
            return text
        if self._mode == "escape":
            for token in found:
                text = text.replace(token, f"{token[0]}{BREAK}{token[1:]}")
            if not (found := self._find(text, where)):
                return text
        raise RequestError(
            f"{where}: contains {found[0]!r}, a special token of this model that could end a message or begin another "
            f"(special_tokens_in_text={self._mode!r}): leave it out"
        )

    def clean_chat(
        self, messages: Sequence[Any], tools: Sequence[Any] | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        if self._mode == "allow":
            return list(messages), list(tools or ())
        cleaned = [self.clean_all(message, f"messages[{index}]") for index, message in enumerate(messages)]
        return cleaned, [self.clean_all(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]

    def clean_all(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            return self.clean(value, where)
        if isinstance(value, dict):
            return {self.clean_all(key, where): self.clean_all(inner, where) for key, inner in value.items()}
        return [self.clean_all(inner, where) for inner in value] if isinstance(value, list | tuple) else value

    def _find(self, text: str, where: str) -> list[str]:
        """Without the unknown token where the text only has a character that the tokenizer does not have."""
        ids = dict.fromkeys(self._encode(text, False, where))
        found = [(token_id, self._special[token_id]) for token_id in ids if token_id in self._special]
        return [token for token_id, token in found if token_id != self._unknown or token in text]
