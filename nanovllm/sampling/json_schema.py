"""`oneOf` of a JSON schema as `anyOf`, where no text can match two of its branches.

A grammar cannot count matches, so llguidance accepts a oneOf only if it finds the branches disjoint, and it does not
follow `$ref` for that. A discriminated union, as pydantic and OpenAPI write it, is disjoint: a property such as "kind"
has other values in every branch. There exactly one match is the same as at least one. A branch in which the property
may be missing is narrowed to objects that have it: every text that is then written is valid for the original schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
DATA = ("const", "enum", "default", "examples", "required")  # values, whatever they look like
MAX_LOOKS = 50_000  # at branches, 0.1 s: unions of unions of unions are exponentially many


def without_unions(text: str) -> str:
    """The schema with every discriminated union as an anyOf. Anything else, broken or endless schemas too, stays as it
    is: llguidance names what it cannot compile."""
    if '"oneOf"' not in text and '"uniqueItems"' not in text:
        return text
    try:
        root = json.loads(text)
        return json.dumps(_Unions(root).rewritten(root))
    except (ValueError, RecursionError):
        return text


class _Unions:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._looks = 0

    def rewritten(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.rewritten(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "uniqueItems" and value is False:
                continue  # the default; llguidance refuses the key with any value
            if key in OF_NAMES and isinstance(value, Mapping):
                made[key] = {name: self.rewritten(part) for name, part in value.items()}
            else:
                made[key] = value if key in DATA else self.rewritten(value)
        branches = schema.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in schema and (name := self._discriminator(schema, branches)):
            narrow = {"type": "object", "required": [name]}
            made["anyOf"] = [
                branch if self._demands(original, name) else {"allOf": [branch, narrow]}
                for original, branch in zip(branches, made.pop("oneOf"))
            ]
            made.pop("discriminator", None)  # llguidance refuses unknown keys beside a recursive $ref
        return made

    def _discriminator(self, schema: Mapping[str, Any], branches: list[Any]) -> str | None:
        """A property that has other values in every branch."""
        named = schema.get("discriminator")
        if isinstance(named, Mapping):
            names = [named.get("propertyName")]
        else:
            names = list(_properties(self._leaves(branches[0])[0])) if branches else []
        for name in names:
            found = [self._values(branch, name) for branch in branches]
            together = [value for values in found for value in values or ()]
            if isinstance(name, str) and None not in found and len(set(together)) == len(together):
                return name
        return None

    def _values(self, branch: Any, name: Any) -> set[str] | None:
        """What the property may be in an object of this branch, as JSON; None if that is not known."""
        found: set[str] = set()
        for leaf in self._leaves(branch):
            values = self._resolved(_properties(leaf).get(str(name)))
            several = [values["const"]] if "const" in values else values.get("enum")
            if not isinstance(several, list):
                return None
            found.update(json.dumps(value, sort_keys=True) for value in several)
        return found

    def _leaves(self, branch: Any) -> list[Mapping[str, Any]]:
        """The branch itself, or, if it is a union, its branches."""
        branch = self._resolved(branch)
        parts = branch.get("oneOf", branch.get("anyOf"))
        if not isinstance(parts, list) or not parts:
            return [branch]
        return [leaf for part in parts for leaf in self._leaves(part)]

    def _demands(self, branch: Any, name: str) -> bool:
        branch = self._resolved(branch)
        required = branch.get("required")
        return branch.get("type") == "object" and isinstance(required, list) and name in required

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a local `$ref` stands for; an empty schema if that is nowhere."""
        while isinstance(schema, Mapping):
            self._looks += 1
            if self._looks > MAX_LOOKS:
                raise ValueError("too many branches")
            if not isinstance(ref := schema.get("$ref"), str):
                return schema
            schema = self._root if ref.startswith("#") else None
            for step in unquote(ref).split("/")[1:]:
                schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
        return {}


def _properties(branch: Mapping[str, Any]) -> Mapping[str, Any]:
    found = branch.get("properties")
    return found if isinstance(found, Mapping) else {}
