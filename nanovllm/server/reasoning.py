"""The text in <think>...</think> before an answer becomes `reasoning_content`.

    start = where(parser, prompt_text)                   # does the prompt leave a <think> open?
    source = after_thoughts(source, start, tokenizer)    # a grammar that binds what follows the thoughts only
    reader = ThoughtReader(start)                        # one for a completion
    reasoning, content = reader.feed(new_text, finished)

Line ends around the tags are neither reasoning nor content.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from nanovllm.server.tools import symbol

OPEN, CLOSE = "<think>", "</think>"


class Start(Enum):
    INSIDE = "inside"  # a completion is reasoning from its first character
    MAYBE = "maybe"  # if it begins with <think>
    OUTSIDE = "outside"


def where(parser: str, prompt_text: str, continued: str | None = None) -> Start:
    """Templates may write the tags themselves: the first to make the model think, both to prevent it. Otherwise models
    of deepseek_r1 always think, those of qwen3 write the tag. `continued`: the message that a completion continues."""
    if continued is not None:
        return Start.INSIDE if continued.rfind(OPEN) > continued.rfind(CLOSE) else Start.OUTSIDE
    end = prompt_text.rstrip()
    if end.endswith(CLOSE):
        return Start.OUTSIDE
    return Start.INSIDE if end.endswith(OPEN) or parser == "deepseek_r1" else Start.MAYBE


def after_thoughts(source: str, start: Start, tokenizer: Any) -> str:
    """A grammar of thoughts, then `source`; both in llguidance's variant of Lark."""
    if start is Start.OUTSIDE:
        return source
    opener, closer = symbol(OPEN, tokenizer), symbol(CLOSE, tokenizer)
    # The suffix is where a text ends that could go on. A tag that is one token is no text, so it ends the text anyway.
    is_token = closer.startswith("<[")
    thoughts = f": ANY {closer}\nANY: /(?s:.*)/" if is_token else f"[suffix={closer}]: /(?s:.*)/"
    begin = f"{opener}? thoughts LINES" if start is Start.INSIDE else f"({opener} thoughts LINES)?"
    return f"start: {begin} answer\nthoughts{thoughts}\nLINES: /\\n{{0,2}}/\nanswer: %lark {{\n{source}\n}}"


class ThoughtReader:
    def __init__(self, start: Start) -> None:
        self._inside = start is Start.INSIDE
        self._has_begun = False
        self._is_bare = True  # nothing of this part was given out, so line ends are dropped
        self._rest = ""  # not given out yet: it may be (part of) a tag, or the white space before one

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        self._rest += text
        if not self._has_begun:
            start = self._rest.lstrip()
            if len(start) < len(OPEN) and OPEN.startswith(start) and not finished:
                return "", ""
            self._has_begun = True
            if start.startswith(OPEN):
                self._rest, self._inside = start[len(OPEN) :], True
            elif not self._inside:
                self._is_bare = False  # white space before a plain answer is the model's own
        reasoning = ""
        if self._inside:
            before, found, after = self._rest.partition(CLOSE)
            kept = 0 if found or finished else next(n for n in range(len(CLOSE), -1, -1) if before.endswith(CLOSE[:n]))
            reasoning = before[: len(before) - kept].rstrip()
            self._rest = after if found else "" if finished else before[len(reasoning) :]
            if self._is_bare:
                reasoning = reasoning.lstrip("\n")
            self._is_bare = bool(found) or (self._is_bare and not reasoning)
            self._inside = not found
            if not found:
                return reasoning, ""
        content = self._rest.lstrip("\n") if self._is_bare else self._rest
        self._rest, self._is_bare = "", self._is_bare and not content
        return reasoning, content
