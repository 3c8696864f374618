"""The bodies that clients send, as OpenAI and vLLM name their fields.

A field that decides what is written is honoured or refused by name: an unknown one is an error, and one of OpenAI's
that this server cannot honour passes only with a value that changes nothing (HARMLESS). What changes no text (IGNORED,
and unknown keys inside messages, which clients send back as they received them) is left out, with one line in the log.
`null` means "not given", as in OpenAI's API: then the model's generation_config.json decides (`defaults` below), and
where that is silent, vLLM's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.body import FEW, Body, SentBack, ShortText, parse_object
from nanovllm.server.errors import ApiError, bad_field

# Each of these is walked once a step, or decoded for each token, by a thread that all requests share.
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_IDS = 4096
MAX_STOPS = 16
MAX_BAD_WORDS = 128
MAX_TOOLS = 128
MAX_PROMPTS = 10**5
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens")

BadWord = Annotated[str, Field(max_length=64)]
ROLES = Literal["system", "developer", "user", "assistant", "tool"]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    name: ShortText
    description: str | None = None  # not shown to the model: its template has no place for it
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # the text always follows the schema


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_if_asked(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise bad_field("response_format", "json_schema goes with type json_schema")
        return self


class Sampling(Body):
    """What completions and chat have in common."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "store",
            "metadata",
            "reasoning_effort",
            "verbosity",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
            "guided_decoding_backend",
        }
    )

    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: ShortText | Annotated[list[ShortText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's: one of json, json_object, regex, choice, grammar
    guided_json: str | dict[str, Any] | None = None  # vLLM's older names of the same
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_IDS, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # keep the last so many; -1: as many as fit
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: ShortText | None = None
    user: ShortText | None = None  # goes to the log beside the request id

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_field("prompt_logprobs", "not available with stream=true")
        if self.truncate_prompt_tokens == 0:
            raise bad_field("truncate_prompt_tokens", "0 would leave nothing; -1 keeps what fits")
        return self

    def _params(self, defaults: Mapping[str, Any], max_tokens: int | None, **others: Any) -> SamplingParams:
        """The default of max_tokens is also a limit, as in vLLM."""
        same = (
            "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias",
            "allowed_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output",
        )  # fmt: skip
        values = {name: value for name in same if (value := getattr(self, name)) is not None}
        limits = [limit for limit in (max_tokens, defaults.get("max_tokens")) if limit is not None]
        others |= {"max_tokens": min(limits, default=None), "structured_outputs": self._structure()[1]}
        try:
            return SamplingParams(**{**defaults, **values, **others})
        except RequestError as error:
            if str(error).startswith("structured_outputs"):
                raise self.in_own_words(error) from None
            limit, given = others["max_tokens"], [getattr(self, name, None) for name in MAX_TOKENS_FIELDS]
            if not str(error).startswith("min_tokens") or limit in given:
                raise
            file = "the model's generation_config.json (--generation-config vllm turns it off)"
            source = file if limit == defaults.get("max_tokens") else "the default of completions: give max_tokens"
            raise RequestError(f"{error}; max_tokens={limit} is {source}") from None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """What response_format demands of the text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_

    def _structure(self) -> tuple[str, dict[str, Any] | None]:
        """Which field demands a form of the text, and which form."""
        found: dict[str, dict[str, Any]] = {}
        if self.answer_schema is not None:
            found["response_format"] = {"json": self.answer_schema}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
            if (value := getattr(self, name)) is not None:
                found[name] = {name.removeprefix("guided_"): value}
        if len(found) > 1:
            first, second, *_ = found
            raise bad_field(first, f"cannot be combined with {second}")
        return next(iter(found.items()), ("structured_outputs", None))

    def in_own_words(self, error: RequestError) -> RequestError:
        """An error of the grammar, by the name of the field that the client used."""
        return RequestError(str(error).replace("structured_outputs", self._structure()[0]))


TokenIds = Annotated[list[int], FEW]
Many = Field(max_length=MAX_PROMPTS, fail_fast=True)


class CompletionBody(Sampling):
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,)}

    prompt: str | TokenIds | Annotated[list[str], Many] | Annotated[list[TokenIds], Many]
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]

    @property
    def only_scores(self) -> bool:
        """max_tokens=0 with echo: the prompt and its log probabilities, nothing new."""
        return self.max_tokens == 0 and self.echo

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        wanted = 1 if self.only_scores else self.max_tokens
        if wanted is None and "max_tokens" not in defaults:
            wanted = SamplingParams.max_tokens
        asked = [count for count in (self.logprobs if self.echo else None, self.prompt_logprobs) if count is not None]
        prompt_logprobs = max(asked, default=None)
        return self._params(defaults, wanted, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class TextPart(SentBack):
    type: Literal["text"]
    text: str


class CalledFunction(SentBack):
    name: ShortText
    arguments: str  # a JSON object, as text; some clients write nothing where there are none

    @property
    def as_object(self) -> Any:
        return parse_object(self.arguments or "{}")


class PastCall(SentBack):
    """One that an earlier answer of the model made, as the client received it."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, which is what templates write out."""
        function = {"name": self.function.name, "arguments": self.function.as_object}
        return {"id": self.id, "type": "function", "function": function}

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> PastCall:
        if not isinstance(self.function.as_object, dict):
            raise bad_field("messages", f"the arguments of the call {self.id!r:.60} are not a JSON object")
        return self


class Message(SentBack):
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {"function_call": (), "audio": ()}

    role: ROLES
    content: str | Annotated[list[TextPart], FEW] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="after")
    def _whose_fields(self) -> Message:
        fault = None
        if self.tool_calls and self.role != "assistant":
            fault = "tool_calls belong to the assistant"
        elif (self.tool_call_id is not None) != (self.role == "tool"):
            fault = "tool_call_id belongs to messages of role tool, each of which needs it"
        elif self.content is None and self.role != "assistant":  # its answer may be all calls, reasoning or refusal
            fault = "content is missing"
        if fault is not None:
            raise bad_field("messages", fault)
        return self

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        parts = data.get("content") if isinstance(data, dict) else None
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                named = f"{kind!r:.40}" if isinstance(kind, str) else "without a type"
                fault = f"a content part {named}: this server reads text only and fetches nothing"
                raise bad_field("messages", fault, "unsupported_content")
        return data

    def for_template(self) -> dict[str, Any]:
        parts = [] if self.content is None else self.content
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        # OpenAI's newer name of the same role; templates of open models know the older one
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        calls = [call.for_template() for call in self.tool_calls or ()]
        return {**message, "tool_calls": calls} if calls else message


Messages = Annotated[list[Message], Field(min_length=1, max_length=2048, fail_fast=True)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Function(Body):
    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; none: takes no arguments
    strict: bool = False  # the arguments follow the schema, also where the model decides whether to call


class Tool(Body):
    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        named = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**named, "parameters": self.arguments_schema}}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        if self.function.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", "properties": {}, **self.function.parameters}


class FunctionChoice(Body):
    name: FunctionName


class ToolChoice(Body):
    type: Literal["function"]
    function: FunctionChoice


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def check_tools(tools: list[Tool] | None) -> None:
    names = set()
    for number, tool in enumerate(tools or ()):
        schema, where = tool.arguments_schema, f"tools.{number}.function"
        if schema["type"] != "object" or not isinstance(schema["properties"], dict):
            raise ApiError(400, f"{where}.parameters: must be a JSON schema of type object", param="tools")
        if tool.function.name in names:
            raise ApiError(400, f"{where}.name: {tool.function.name!r} is there twice", param="tools")
        names.add(tool.function.name)


class ChatBody(Sampling):
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "chat_template": (),
    }

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on where the last message ends
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the model's template, such as enable_thinking

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        check_tools(self.tools)
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if not names and choice not in ("none", "auto"):
            raise bad_field("tool_choice", "there are no tools to call")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise bad_field("tool_choice", f"{choice.function.name!r} is not one of the tools")
        name, structure = self._structure()
        if self.binds_calls and structure is not None and name != "response_format":
            raise bad_field(name, "cannot be combined with strict tools or a tool_choice that demands calls")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_field("continue_final_message", "begins no new message; set add_generation_prompt=false")
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "only with logprobs=true")
        if None not in (limits := (self.max_tokens, self.max_completion_tokens)) and limits[0] != limits[1]:
            raise bad_field("max_tokens", "differs from max_completion_tokens; give one")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call in this answer."""
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, ToolChoice):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        return [] if choice == "none" else tools

    @property
    def answers_json(self) -> bool:
        """Where the model does not call, its text is bound by response_format."""
        return bool(self.offered) and self.answer_schema is not None

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def binds_calls(self) -> bool:
        """Calls are held to their schemas while they are written. Beside a response_format always, since one grammar
        has to cover both."""
        return self.must_call or any(tool.function.strict for tool in self.offered) or self.answers_json

    @property
    def one_call(self) -> bool:
        return isinstance(self.tool_choice, ToolChoice) or not self.parallel_tool_calls

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        return self._params(
            defaults,
            self.asked_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # as in a chat with these messages
    add_special_tokens: bool = True  # of a prompt; a chat template brings its own
    add_generation_prompt: bool = True  # of messages, as the next two
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise bad_field("prompt", "give exactly one of prompt and messages")
        if self.tools and self.messages is None:
            raise bad_field("tools", "only with messages")
        check_tools(self.tools)
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
