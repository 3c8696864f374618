"""`nanovllm serve`: an OpenAI-compatible server. Its packages are an extra: what is missing is named here."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated

import typer

from nanovllm.cli.options import ENGINE, OptionGroup, is_given, with_options
from nanovllm.cli.stream import note
from nanovllm.cli.trace import check_trace
from nanovllm.config import EngineConfig
from nanovllm.engine.interrupts import import_torch
from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
API_KEY = "NANOVLLM_API_KEY"
LISTS = ("allowed_hosts", "allowed_origins")

SERVER = OptionGroup(
    title="Server",
    of=ServerOptions,
    build=lambda values: ServerOptions(**values | {name: tuple(values[name] or ()) for name in LISTS}),
    types=dict.fromkeys(LISTS, list[str]),
    common=frozenset({"host", "port", "api_key", "served_model_name", "tool_call_parser", "events"}),
    help={
        "host": "Address to listen on; the default is reachable from this machine only.",
        "port": "Port to listen on; 0 takes any free one.",
        "api_key": f"Key that clients must send; better in the variable {API_KEY}, which other users cannot see.",
        "allowed_hosts": "A name that this server is reached by, beside IP addresses and localhost; '*' = any. Give it "
        "again for more.",
        "allowed_origins": "A web page of another site that may use this server, say https://chat.example.com; "
        "'*' = any. Give it again for more.",
        "served_model_name": "The model's name in requests and answers; default: its own.",
        "max_waiting": "Completions that may wait for their turn; beyond that clients get 429.",
        "request_timeout": "Seconds a request may take.",
        "drain_timeout": "Seconds that running requests get after SIGTERM.",
        "encode_timeout": "Seconds for the tokenizer and the chat template of one request.",
        "max_body_mb": "Largest body of a request, in megabytes.",
        "max_header_kb": "Largest headers of a request, in kilobytes.",
        "max_headers": "Most headers of a request.",
        "max_connections": "Most connections at the same time; none = what `ulimit -n` allows, at most 4096.",
        "idle_timeout": "Seconds a client may take for headers, between requests, or without reading an answer.",
        "max_prompts": "Most prompts in one request.",
        "max_n": "Most completions of one prompt.",
        "max_responses": "Most answers of /v1/responses that are kept for previous_response_id; 0 keeps none.",
        "max_responses_mb": "Most megabytes that they may take together.",
        "events": "Let the page watch the engine, pause it and change its policy; off in production.",
        "max_watchers": "Most pages that may watch at the same time.",
        "trace": "Write every event of the engine to this file, for `nanovllm trace view`.",
        "tool_call_parser": "How the model writes calls of functions: hermes (also Qwen), mistral or llama.",
        "reasoning_parser": "Give <think>...</think> as reasoning_content: qwen3 or deepseek_r1; none = it stays text.",
        "step_timeout": "Seconds a step may take before /health says that the engine hangs.",
    },
)


@with_options(options=SERVER, config=ENGINE)
def serve(
    ctx: typer.Context,
    model_name: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model MODEL.")] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, max=1024, metavar="INT", help="So many engines on Ray; prompts that begin alike meet the same one."
        ),
    ] = 1,
    *,
    options: ServerOptions,
    config: EngineConfig,
) -> None:
    """Serve a model over HTTP, as OpenAI's API. SIGTERM or Ctrl-C: running requests finish, then it exits."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install 'nano-vllm[server]'")
    if model_name is not None:
        if is_given(ctx, "model") and config.model != model_name:
            raise ConfigError(f"two models, {model_name!r} and --model {config.model!r}: a server has one; give one")
        config = replace(config, model=model_name)
    if options.api_key is None and os.environ.get(API_KEY):
        options = replace(options, api_key=os.environ[API_KEY])
    check_trace(options.trace)
    import_torch()
    if replicas > 1:
        try:
            from nanovllm.server.replicas import serve_replicas
        except ImportError as error:
            install = "pip install 'nano-vllm[ray]'"
            raise ConfigError(f"replicas={replicas}: needs Ray Serve 2.60 or later ({error}): {install}") from None

        serve_replicas(config, options, replicas, note)
        return
    from nanovllm.server.run import serve as run

    run(config, options, note)
