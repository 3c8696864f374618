"""Body: how a JSON body is read. `null` means "not given", and a field is honoured, ignored or refused by its name.

class Question(Body):
    IGNORED = frozenset({"mood"})     # changes nothing, so it is left out
    text: str

question, ignored = Question.read(raw)
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from nanovllm.server.errors import bad_field

MAX_NAMED = 32  # ignored fields in a line of the log

# pydantic collects every fault while it holds the interpreter's lock: 4 MB of wrong numbers took 43 s. So the check of
# a list ends at its first fault, and lists that are tried as several types have a greatest length.
FEW = Field(fail_fast=True)

ShortText = Annotated[str, Field(max_length=1024)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {}  # fields we cannot honour -> values that ask for nothing
    IGNORED: ClassVar[frozenset[str]] = frozenset()  # fields that change no text

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        for name in data.keys() & cls.HARMLESS.keys():
            if not any(_same(data[name], value) for value in cls.HARMLESS[name]):
                raise bad_field(name, "this server does not support it", "unsupported_field")
            del data[name]
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in data if name not in known]
        is_loose = cls.model_config["extra"] == "ignore"
        ignored = [name for name in unknown if is_loose or name in cls.IGNORED]
        refused = [] if is_loose else [name for name in unknown if name not in cls.IGNORED]
        for name in ignored + refused[1:]:  # one is enough to refuse the body: see FEW
            del data[name]
        if info.context is not None:
            info.context.update(f"{name:.64}" for name in ignored[: MAX_NAMED - len(info.context)])
        return data

    @classmethod
    def read(cls, raw: bytes) -> tuple[Any, list[str]]:
        """The body, and the names of what was left out of it, for the log."""
        ignored: set[str] = set()
        return cls.model_validate_json(raw, context=ignored), sorted(ignored)

    @classmethod
    def fields(cls) -> frozenset[str]:
        return frozenset(cls.model_fields)


class SentBack(Body):
    """Part of a message: clients send it back with what they have added, so unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


def parse_object(text: str) -> Any:
    """The value of a JSON text; None if it is none. JSON has no NaN, though Python's reader takes it."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _same(given: Any, value: Any) -> bool:
    return type(given) is type(value) and given == value  # False is not 0
