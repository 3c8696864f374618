"""ServerOptions: where the server listens and what it refuses. No web framework here: the command line reads this.

Without these limits one request could block all others: a body that never ends, a list of a million prompts, a client
that does not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from nanovllm.errors import ConfigError
from nanovllm.server.hosts import split_host, split_origin

TOOL_CALL_PARSERS = ("hermes", "mistral", "llama")
REASONING_PARSERS = ("qwen3", "deepseek_r1")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

INTEGERS = {
    "port": (0, 65535),
    "max_waiting": (0, 10**6),
    "max_header_kb": (1, 1024),
    "max_prompts": (1, 10**5),
    "max_n": (1, 1024),
    "max_watchers": (1, 1024),
    "max_headers": (1, 10**4),
    "max_connections": (1, 10**6),
    "max_responses": (0, 10**6),
}
POSITIVE = {
    "request_timeout",
    "drain_timeout",
    "encode_timeout",
    "step_timeout",
    "idle_timeout",
    "max_body_mb",
    "max_responses_mb",
}
CHOICES = {"tool_call_parser": TOOL_CALL_PARSERS, "reasoning_parser": REASONING_PARSERS}
TEXTS = {"host", "api_key", "served_model_name", "trace"}
LISTS = {
    "allowed_hosts": ("a name without scheme and port", "gpu-box.example.com"),
    "allowed_origins": ("a scheme and a name, with a port if it needs one", "https://chat.example.com"),
}


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

    events: bool = False  # the engine may be watched and paused, and its policy changed, over HTTP
    max_watchers: int = 8  # at the same time
    trace: str | None = None  # a file to write all events to

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            wanted = None
            if value is None and field.default is None:
                continue
            if name in INTEGERS:
                low, high = INTEGERS[name]
                wanted = None if type(value) is int and low <= value <= high else f"an integer in [{low}, {high}]"
            elif name in POSITIVE:
                wanted = None if type(value) in (int, float) and 0 < value < math.inf else "a positive number"
            elif name in CHOICES:
                wanted = None if value in CHOICES[name] else f"one of {CHOICES[name]}"
            elif name in TEXTS:
                wanted = None if isinstance(value, str) and value.strip() else "a non-empty string"
            elif name == "events":
                wanted = None if isinstance(value, bool) else "True or False"
            if wanted is not None:
                raise ConfigError(f"{name}={value!r}: must be {wanted}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII, since it travels in a header")
        self._check_lists()

    def _check_lists(self) -> None:
        for name, (kind, example) in LISTS.items():
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)):
                raise ConfigError(f"{name}={values!r}: must be a list of texts, for example [{example!r}]")
            for value in values:
                if name == "allowed_hosts":
                    is_sound = isinstance(value, str) and split_host(value) is not None and ":" not in value
                else:
                    is_sound = isinstance(value, str) and split_origin(value.removesuffix("/")) is not None
                if value != "*" and not is_sound:
                    raise ConfigError(f"{name}: {value!r} is not {kind}, for example {example!r}, nor '*' for all")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)

    @property
    def is_open(self) -> bool:
        """Reachable from other machines without a key."""
        return self.host not in LOOPBACK and self.api_key is None
