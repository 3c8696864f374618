"""A server on a free port of the loopback, in a thread of this process, so that a test can look into its engine; and
clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from transformers import AddedToken, AutoTokenizer

from nanovllm.config import EngineConfig
from nanovllm.engine.async_engine import AsyncLLMEngine
from nanovllm.server.app import make_app
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import DrainingServer, address_of, listen, make_server
from nanovllm.server.service import Service
from tests.tiny_models import Variant, hf_model, save_tokenizer

TAGS = ["<tool_call>", "</tool_call>"]
ENGINE = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kvcache_blocks": 128}


@dataclass(frozen=True)
class Running:
    service: Service
    url: str

    @property
    def engine(self) -> Any:
        return self.service.engine.engine

    @property
    def model(self) -> str:
        return self.service.model_name

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"api_key": "none", "base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 30, **options}
        return openai.OpenAI(**settings)

    def http(self, **options: Any) -> httpx.Client:
        # Without verify=False each client reads all certificates of the system first
        return httpx.Client(base_url=self.url, timeout=30, verify=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)

    def connect(self, timeout: float = 20) -> socket.socket:
        return connect(self.url, timeout)

    def raw(self, data: bytes) -> bytes:
        """The answer to these bytes, until the server closes. A reset is an end too: it comes when the server did not
        read what was sent."""
        found = b""
        with self.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            while part := connection.recv(65536):
                found += part
        return found

    def is_empty(self) -> bool:
        engine = self.engine
        return (
            not engine.has_unfinished_requests()
            and engine.scheduler.blocks.num_used == 0
            and self.service.num_admitted == 0
            and not self.service.engine._streams
        )


@contextlib.contextmanager
def running(model: Any, engine_options: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    engine = AsyncLLMEngine(EngineConfig.from_options(**{"model": str(model), **ENGINE, **(engine_options or {})}))
    service = Service(engine, ServerOptions(port=0, **options))
    with contextlib.closing(service), in_thread(make_server(service), service.options) as url:
        yield Running(service, url)


@contextlib.contextmanager
def in_thread(server: DrainingServer, options: ServerOptions) -> Iterator[str]:
    listener = listen(options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def connect(url: str, timeout: float = 20) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=timeout)


def raw_post(body: dict[str, Any], path: str = "/v1/completions", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def raw_stream(url: str, body: dict[str, Any], leave_after: int | None = None) -> list[Any] | None:
    """The events of a stream to its end; None for a client that left. A full HTTP client would take its share of the
    cores that the server computes on."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(raw_post({**body, "stream": True}))
        events: list[Any] = []
        if leave_after == 0:
            await writer.drain()
            return None
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(1000)
        while (line := (await reader.readline()).strip()) != b"data: [DONE]":
            assert not reader.at_eof(), "the stream broke off"
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                assert "error" not in events[-1], events[-1]
            if leave_after is not None and len(events) >= leave_after:
                return None
        return events
    finally:
        writer.close()


def events_of(text: str) -> list[dict[str, Any]]:
    """Of a stream: what its events hold. Where they have a name, it is their type."""
    found = []
    for name, data in re.findall(r"^(?:event: (.*)\n)?data: (\{.*)$", text, re.MULTILINE):
        found.append(json.loads(data))
        assert not name or name == found[-1]["type"]
    return found


def make_talker(folder: Path, with_tags: bool) -> Path:
    """A random model with room for a prompt with tools; the tags of Hermes as two tokens, or spelt in letters."""
    hf_model(Variant("Llama", {"vocab_size": 304, "max_position_embeddings": 2048}), 0).save_pretrained(folder)
    save_tokenizer(folder)
    if with_tags:
        add_tokens(folder, TAGS)
    return folder


def add_tokens(folder: Path, texts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.save_pretrained(folder)


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@contextlib.contextmanager
def command(model: Any, *options: str, files: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`nanovllm serve` as a process of its own: (process, address). Its log goes to a file, since a pipe that is not
    read would stop it. `files` is its `ulimit -n`; this process, which may have more of them open, keeps its own."""
    words = [sys.executable, "-m", "nanovllm", "serve", "--model", str(model), "--device", "cpu", "--port", "0"]
    if files is not None:
        words = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *words]
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        with open(log.name, "wb") as written:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen([*words, *options], stderr=written, env=environment, start_new_session=True)
        try:
            text = ""
            while " at http://127.0.0.1:" not in text:
                assert process.poll() is None, text
                time.sleep(0.05)
                text += log.read()
            yield process, text.split(" at ")[1].split("/v1")[0]
        finally:
            process.kill()
            process.wait()


def answers_of_a_stalled_client(model: Any, path: str, body: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    """(the answer in one go, what was sent of a stream). The client's connection takes no more after the first event:
    the server waits in `send`, and the engine goes on."""
    options = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 300}
    engine = AsyncLLMEngine(EngineConfig.from_options(model=str(model), **options))
    service = Service(engine, ServerOptions(port=0))

    async def ask(stream: bool) -> list[bytes]:
        parts = [{"type": "http.request", "body": json.dumps({**body, "stream": stream}).encode(), "more_body": False}]
        sent: list[bytes] = []

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])
                while stream and len(sent) == 1 and engine.engine.has_unfinished_requests():
                    await asyncio.sleep(0.01)

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "asgi": {"version": "3.0"},
            "client": None,
            "server": None,
        }
        await asyncio.wait_for(make_app(service)(scope, receive, send), 100)
        return sent

    try:
        return b"".join(asyncio.run(ask(stream=False))), asyncio.run(ask(stream=True))
    finally:
        service.close()
