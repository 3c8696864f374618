"""Calls of functions: their description in the prompt, the grammar that binds them, and how they are read from text.

    messages = as_plain_text(messages, tools, form)      # for a chat template without tools
    source = grammar(form, body, tokenizer)              # that the sampler follows, if calls are bound
    reader = CallReader(form, body)                      # one for a completion
    part = reader.feed(new_text, finished)               # what of it is content, what belongs to which call

A call is the JSON object {"name": ..., "arguments": {...}}. Where it stands in a text differs between families of
models (FORMS). What the client gets as a call names a function that was offered and has arguments that parse;
everything else that looks like one stays text, since a client can do nothing with half a call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.sampling.json_schema import without_unions
from nanovllm.sampling.structured import JSON_SPACES
from nanovllm.server.body import parse_object
from nanovllm.server.protocol import ChatBody

# A grammar writes exactly this, so what follows can be sent on while it is written.
HEAD = re.compile(r'\{"name": "([\w-]+)", "(?:arguments|parameters)": ')


@dataclass(frozen=True)
class Form:
    """How a family of models writes calls."""

    opener: str  # before a call, or before all of them
    closer: str = ""  # after each call; without it the calls must be the whole text, and the opener may be missing
    key: str = "arguments"  # of the arguments
    between: str = ", "
    around: tuple[str, str] = ("", "")  # a list of calls

    @property
    def is_tagged(self) -> bool:
        return self.closer != ""

    def write(self, calls: Sequence[dict[str, Any]]) -> str:
        """As the model itself would have written them."""
        objects = [json.dumps({"name": c["name"], self.key: c["arguments"]}, ensure_ascii=False) for c in calls]
        if self.is_tagged:
            objects = [f"{self.opener}\n{text}\n{self.closer}" for text in objects]
        return self.around[0] + self.between.join(objects) + self.around[1]


FORMS = {
    "hermes": Form("<tool_call>", "</tool_call>", between="\n"),  # Hermes, Qwen
    "mistral": Form("[TOOL_CALLS]", around=("[", "]")),
    "llama": Form("<|python_tag|>", key="parameters", between="; "),  # Llama 3
}


# ---- what the model reads --------------------------------------------------------------------------------------------


def as_plain_text(messages: list[dict[str, Any]], tools: Sequence[Any], form: Form) -> list[dict[str, Any]]:
    """Tools in the system message, calls as the model would write them, results as messages of the user. Whether the
    model understands this is up to the model."""
    rows: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            text = f"{text}\n{form.write([call['function'] for call in calls])}".lstrip("\n")
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if rows and rows[-1]["content"].endswith("</tool_response>"):  # many templates want roles in turn
                rows[-1]["content"] += f"\n{text}"
                continue
        rows.append({"role": role, "content": text, **({"name": message["name"]} if "name" in message else {})})
    if tools:
        first = rows[0]["content"] + "\n\n" if rows[0]["role"] == "system" else ""
        rows[: 1 if first else 0] = [{"role": "system", "content": first + _instructions(tools, form)}]
    return rows


def _instructions(tools: Sequence[Any], form: Form) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.write([{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}])
    return (
        f"These functions can be called, here as JSON with a schema of their parameters:\n{listed}\n"
        f"To call one, answer with its name and its arguments in exactly this form, and nothing after it:\n{example}\n"
        "What it returns comes in the next message. If no function helps, answer in words."
    )


# ---- what the model may write ----------------------------------------------------------------------------------------


def grammar(form: Form, body: ChatBody, tokenizer: Any) -> str:
    """In llguidance's variant of Lark, for a body that binds calls. Without it a model writes freely, and CallReader
    finds what is a call."""
    first, rules = [], []
    for number, tool in enumerate(body.offered):
        head = json.dumps({"name": tool.function.name, form.key: 0})[:-2]
        first.append(f'{json.dumps(head)} args_{number} "}}"')
        rules.append(f"args_{number}: %json {_spaced(tool.arguments_schema)}")
    opener, closer = (symbol(tag, tokenizer) for tag in (form.opener, form.closer))
    one = f'{opener} "\\n" object "\\n" {closer}' if form.is_tagged else "object"
    calls = "call" if body.one_call else f"call ({json.dumps(form.between)} call)*"
    if form.around[0]:
        calls = f"{json.dumps(form.around[0])} {calls} {json.dumps(form.around[1])}"
    start = calls
    if body.answers_json and not body.must_call:
        # Only the opener makes a difference: the answer may be JSON of the same shape as a call
        start = f"{'' if form.is_tagged else opener} {calls} | answer"
        rules.append(f"answer: %json {_spaced(body.answer_schema or {})}")
    elif not body.must_call:
        tag = re.escape(form.opener).replace("/", r"\/")
        if form.is_tagged:
            start = "TEXT call?" if body.one_call else "TEXT (call TEXT)*"
            rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/")
        else:  # text that a reader cannot take for calls
            start = f"TEXT | {calls}"
            rules.append(rf"TEXT: /([^\[{{\s](?s:.*))?/ & ~/{tag}(?s:.*)/")
    return "\n".join([f"start: {start}", f"call: {one}", "object: " + "\n  | ".join(first), *rules])


def _spaced(schema: dict[str, Any]) -> str:
    """A document of its own for each schema: its "#/$defs/..." refer to its own root."""
    return without_unions(json.dumps({**schema, "x-guidance": JSON_SPACES}, ensure_ascii=False))


def symbol(tag: str, tokenizer: Any) -> str:
    """A tag that is one token of the vocabulary cannot be spelt in letters: llguidance matches it only by its id."""
    number = tokenizer.get_added_vocab().get(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"


# ---- what the model wrote --------------------------------------------------------------------------------------------


@dataclass
class CallPiece:
    """What is new of one call. The first piece of a call has its name."""

    index: int
    arguments: str
    name: str | None = None

    def as_delta(self) -> dict[str, Any]:
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **new_call(self.name, self.arguments)}


def new_call(name: str, arguments: str) -> dict[str, Any]:
    # Nine letters and digits: Mistral's templates refuse an id of any other length, other templates take any.
    function = {"name": name, "arguments": arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


@dataclass
class AnswerPart:
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    thought: str = ""  # before the content

    def whole_calls(self) -> list[dict[str, Any]]:
        texts: dict[int, list[str]] = {}
        for piece in self.calls:
            texts.setdefault(piece.index, [piece.name] if piece.name else []).append(piece.arguments)
        return [new_call(name, "".join(parts)) for name, *parts in texts.values()]


class Braces:
    """Looks for the end of a JSON object that begins with the first character it is fed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        for at, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class CallReader:
    """Reads the text of one completion as it comes. If a grammar binds the calls (`has_grammar`), they are well-formed
    and arguments are passed on as they are written; else a call is held until it is whole. `must_call`: the text is
    nothing but calls. `needs_opener`: a text without the opener at its start has no calls, whatever it looks like."""

    def __init__(self, form: Form, body: ChatBody) -> None:
        self._form = form
        self._names = frozenset(tool.function.name for tool in body.offered)
        self._must_call, self._has_grammar, self._needs_opener = body.must_call, body.binds_calls, body.answers_json
        self._most = 1 if body.one_call else 1 << 30
        self.num_calls = 0
        self._rest = ""  # not read yet
        self._lead = ""  # tags and brackets since the last call: content after all, if no call follows
        self._after_call = False  # line ends and a closing tag are no content
        self._is_plain = False  # a form without tags, and this text is not (or no longer) a list of calls
        self._object: list[str] | None = None  # what led to the object that is open, and its parts
        self._braces = Braces()
        self._head: str | None = None  # of that object, until HEAD is found in it

    def feed(self, text: str, finished: bool) -> AnswerPart:
        part = AnswerPart()
        self._rest += text
        while self._rest and self._advance(part):
            pass
        if finished:
            self._release(part)
        if self._must_call:
            part.content = ""
        return part

    def _advance(self, part: AnswerPart) -> bool:
        """One step through the text; False if more of it is needed."""
        if self._object is not None:
            return self._in_object(self._object, part)
        if self._is_plain:
            part.content, self._rest = part.content + self._rest, ""
            return False
        if self._must_call:
            return self._open_at(self._rest.find("{"))
        if self._needs_opener:
            opener, text = self._form.opener, self._rest.lstrip()
            self._needs_opener = len(text) < len(opener) and opener.startswith(text)
            self._is_plain = not opener.startswith(text[: len(opener)])
            return not self._needs_opener
        if not self._form.is_tagged:
            return self._in_list(part)
        if self._after_call:
            return self._past_closer()
        return self._past_opener(part) if self._lead else self._in_text(part)

    def _in_text(self, part: AnswerPart) -> bool:
        """Content, up to a tag that opens a call."""
        opener = self._form.opener
        before, found, after = self._rest.partition(opener)
        if not found:  # the end of the text may be the beginning of a tag
            kept = next((n for n in range(len(opener) - 1, 0, -1) if before.endswith(opener[:n])), 0)
            before, after = before[: len(before) - kept], before[len(before) - kept :]
        part.content, self._rest, self._lead = part.content + before, after, found
        return bool(found)

    def _past_opener(self, part: AnswerPart) -> bool:
        blank = len(self._rest) - len(self._rest.lstrip())
        if self._rest[blank:].startswith("{"):
            return self._open_at(blank)
        if blank < len(self._rest):  # something else: no call
            part.content, self._lead = part.content + self._lead, ""
            return True
        return False

    def _past_closer(self) -> bool:
        closer = self._form.closer
        self._rest = self._rest.lstrip()
        if self._rest.startswith(closer):
            self._rest = self._rest[len(closer) :]
        elif closer.startswith(self._rest):
            return False
        else:
            self._after_call = False
        return True

    def _in_list(self, part: AnswerPart) -> bool:
        """Before, between and after calls that are the whole text."""
        opener, text = self._form.opener, self._rest.lstrip()
        if not self.num_calls and not self._lead and opener.startswith(text[: len(opener)]):
            if len(text) < len(opener):
                return False
            self._lead, self._rest = opener, text[len(opener) :]
            return True
        at = next((i for i, char in enumerate(self._rest) if char not in " \n\t[],;"), -1)
        if at >= 0 and self._rest[at] != "{":
            self._is_plain = True
            part.content, self._lead = part.content + self._lead, ""
            return True
        return self._open_at(at)

    def _open_at(self, at: int) -> bool:
        """An object begins there; -1: not yet."""
        if at < 0:
            self._lead, self._rest = self._lead + self._rest, ""
            return False
        self._object = [self._lead + self._rest[:at]]
        self._rest, self._lead = self._rest[at:], ""
        self._braces, self._head = Braces(), ""
        return True

    def _in_object(self, parts: list[str], part: AnswerPart) -> bool:
        end = self._braces.end(self._rest)
        text, self._rest = self._rest[:end], "" if end is None else self._rest[end:]
        parts.append(text)
        if self._has_grammar:
            self._pass_on(text if end is None else text[:-1], part)
        if end is None:
            return False
        self._object = None
        if self._has_grammar or self._take("".join(parts[1:]), part):
            self.num_calls += 1
            self._after_call = True
        else:
            part.content += "".join(parts)
            self._is_plain = not self._form.is_tagged
        return True

    def _pass_on(self, text: str, part: AnswerPart) -> None:
        if self._head is None:
            part.calls.append(CallPiece(self.num_calls, text))
            return
        self._head += text
        if found := HEAD.match(self._head):
            part.calls.append(CallPiece(self.num_calls, self._head[found.end() :], found[1]))
            self._head = None

    def _take(self, text: str, part: AnswerPart) -> bool:
        """A whole object without a grammar: is it a call?"""
        value = parse_object(text)
        value = value if isinstance(value, dict) else {}
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return False
        if self.num_calls < self._most:  # further calls were not wanted, and as content they would only confuse
            part.calls.append(CallPiece(self.num_calls, json.dumps(arguments, ensure_ascii=False), name))
        return True

    def _release(self, part: AnswerPart) -> None:
        """The end: what was held back and did not become a call is content, except separators and tags of calls."""
        held = self._lead + self._rest
        if self._object is not None and not (self._has_grammar and self._head is None):
            held = "".join(self._object)
        rest = held.strip(" \n\t[],;")
        if self.num_calls and (not rest or self._form.closer.startswith(rest)):
            held = ""
        part.content += held
        self._rest, self._lead, self._object = "", "", None
