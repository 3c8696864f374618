"""A server on a free port of the loopback, in a thread of this process, so that a test can look into its engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from nanovllm.config import EngineConfig
from nanovllm.engine.async_engine import AsyncLLMEngine
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import address_of, listen, make_server
from nanovllm.server.service import Service

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

    def is_empty(self) -> bool:
        engine = self.engine
        return (
            not engine.has_unfinished_requests() and engine.scheduler.blocks.num_used == 0
            and self.service.num_admitted == 0 and not self.service.engine._streams
        )  # fmt: skip


@contextlib.contextmanager
def running(model: Any, engine_options: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    engine = AsyncLLMEngine(EngineConfig.from_options(**{"model": str(model), **ENGINE, **(engine_options or {})}))
    service = Service(engine, ServerOptions(port=0, **options))
    listener = listen(service.options)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield Running(service, address_of(listener))
    finally:
        server.should_exit = True
        thread.join(30)
        service.close()
        assert not thread.is_alive()


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@contextlib.contextmanager
def command(model: Any, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`nanovllm serve` as a process of its own: (process, address). Its log goes to a file, since a pipe that nobody
    reads would stop it."""
    words = [sys.executable, "-m", "nanovllm", "serve", "--model", str(model), "--device", "cpu", "--port", "0"]
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        with open(log.name, "wb") as written:
            process = subprocess.Popen([*words, *options], stderr=written)
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
