"""What a model thinks before it answers, apart from the answer: <think>...</think> becomes `reasoning_content`.

    inside = begins_inside(parser, prompt_text)          # does the prompt leave a <think> open?
    reader = ThoughtReader(inside)                       # one for a completion
    reasoning, content = reader.feed(new_text, finished)

Line ends around the tags are neither reasoning nor content.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def begins_inside(parser: str, prompt_text: str) -> bool:
    """Whether a completion that does not begin with <think> is reasoning. Templates may write the tags themselves: one
    to make the model think, both to keep it from it. Else deepseek_r1's models think always, qwen3's write the tag."""
    end = prompt_text.rstrip()
    return end.endswith(OPEN) or (parser == "deepseek_r1" and not end.endswith(CLOSE))


class ThoughtReader:
    def __init__(self, inside: bool) -> None:
        self._inside = inside
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
