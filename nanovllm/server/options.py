"""ServerOptions: where the server listens and what it refuses. No web framework here: the command line reads this.

Every limit exists because without it one request could take the server from the others: a body that is never ended, a
list of a million prompts, a client that waits for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanovllm.errors import ConfigError
from nanovllm.server.hosts import split_host, split_origin

TOOL_CALL_PARSERS = ("hermes", "mistral", "llama")
REASONING_PARSERS = ("qwen3", "deepseek_r1")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    host: str = "127.0.0.1"  # only this machine; anything else should come with an api_key
    port: int = 8000  # 0 = any free one
    api_key: str | None = None  # clients send it as "Authorization: Bearer KEY"; /health needs none
    allowed_hosts: tuple[str, ...] = ()  # names it is reached by, beside IP addresses and localhost; "*" = any
    allowed_origins: tuple[str, ...] = ()  # web pages of other sites that may use it (CORS); "*" = any
    served_model_name: str | None = None  # None = the model's own name
    max_waiting: int = 256  # sequences beyond max_num_seqs that may wait; more are answered 429
    request_timeout: float = 600.0  # seconds from arrival to the last token
    drain_timeout: float = 60.0  # seconds for running requests after SIGTERM
    encode_timeout: float = 10.0  # seconds for tokenising and templating one request
    max_body_mb: float = 4.0
    max_header_kb: int = 16
    max_headers: int = 128
    max_connections: int | None = None  # at the same time; None = as many as `ulimit -n` allows, at most 4096
    idle_timeout: float = 15.0  # seconds to send headers, between two requests, and without reading an answer
    max_prompts: int = 128  # in one request
    max_n: int = 128  # completions of one prompt
    max_responses: int = 1024  # answers of /v1/responses kept for previous_response_id; 0 = none
    max_responses_mb: float = 64.0  # that they may take together
    tool_call_parser: str = "hermes"  # how the model writes calls of functions: one of TOOL_CALL_PARSERS
    reasoning_parser: str | None = None  # <think> becomes reasoning_content: one of REASONING_PARSERS; None = text
    step_timeout: float = 120.0  # seconds a step may take before /health says that the engine hangs

    events: bool = False  # the engine may be watched, paused and told another policy over HTTP
    max_watchers: int = 8  # at the same time
    trace: str | None = None  # a file to write all events to

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_waiting", 0, 10**6),
            ("max_header_kb", 1, 1024),
            ("max_prompts", 1, 10**5),
            ("max_n", 1, 1024),
            ("max_watchers", 1, 1024),
            ("max_headers", 1, 10**4),
            ("max_connections", 1, 10**6),
            ("max_responses", 0, 10**6),
        ):
            value = getattr(self, name)
            if value is None and name == "max_connections":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r}: must be an integer in [{low}, {high}]")
        seconds = ("request_timeout", "drain_timeout", "encode_timeout", "step_timeout", "idle_timeout")
        for name in (*seconds, "max_body_mb", "max_responses_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}: must be a positive number")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise ConfigError(f"tool_call_parser={self.tool_call_parser!r}: must be one of {TOOL_CALL_PARSERS}")
        if self.reasoning_parser is not None and self.reasoning_parser not in REASONING_PARSERS:
            raise ConfigError(f"reasoning_parser={self.reasoning_parser!r}: must be None or one of {REASONING_PARSERS}")
        if not isinstance(self.events, bool):
            raise ConfigError(f"events={self.events!r}: must be True or False")
        for name in ("host", "api_key", "served_model_name", "trace"):
            value = getattr(self, name)
            if value is None and name != "host":
                continue
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"{name}={value!r}: must be a non-empty string")
            if name == "api_key" and not (value.isascii() and value.isprintable()):
                raise ConfigError("api_key: must be printable ASCII, since it travels in a header")
        self._check_lists()

    def _check_lists(self) -> None:
        for name, kind, example in (
            ("allowed_hosts", "a name without scheme and port", "gpu-box.example.com"),
            ("allowed_origins", "a scheme and a name, with a port if it needs one", "https://chat.example.com"),
        ):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)):
                raise ConfigError(f"{name}={values!r}: must be a list of texts, for example [{example!r}]")
            for value in values:
                if value == "*":
                    continue
                found = isinstance(value, str) and (
                    split_host(value) if name == "allowed_hosts" else split_origin(value.removesuffix("/"))
                )
                if not found or (name == "allowed_hosts" and ":" in value):
                    raise ConfigError(f"{name}: {value!r} is not {kind}, for example {example!r}, nor '*' for all")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)

    @property
    def is_open(self) -> bool:
        """Reachable from other machines by anyone."""
        return self.host not in LOOPBACK and self.api_key is None
