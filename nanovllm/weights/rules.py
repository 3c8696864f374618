"""Rules: checkpoint names -> parameters of the model, as data.

A rule's source is a pattern over the *whole* name, so no name can match by accident: `{i}` stands for a number,
`{x:a|b}` for one of the listed words, `{x:*}` for anything. The target may use the value of a field; a field called
`part`, or a template of that name over several fields ("{e}.gate"), names the part of a stacked parameter that is
filled. A target of None drops the tensor on purpose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Rule:
    source: str
    target: str | None
    part: str = "{part}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text = re.escape(self.source)
        text = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", text)
        text = re.sub(
            r"\\\{(\w+):(.*?)\\\}", lambda m: f"(?P<{m[1]}>{m[2]})".replace(r"\|", "|").replace(r"\*", ".*"), text
        )
        return re.compile(text)

    def match(self, name: str) -> Destination | None:
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        fields = {"part": "", **found.groupdict()}
        return Destination(self.target and self.target.format(**fields), self.part.format(**fields))


@dataclass(frozen=True)
class Destination:
    parameter: str | None
    part: str


def find_destination(rules: tuple[Rule, ...], name: str) -> Destination | None:
    return next((found for rule in rules if (found := rule.match(name))), None)
