"""A closed loop for `bench serve --clients`: each of so many clients waits for its answer before its next request.

What a server can do at most, not how long strangers would wait (serve.py). The clients are divided over processes, and
read raw sockets: parsing 30,000 events a second would make one Python process the bottleneck, and the figure its own.

    python -m nanovllm.bench.closed_loop      # one process: a job as JSON in, {"results": [...]} as JSON out
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from nanovllm.bench.serve import Load, Seen, ServerUnderTest, requests_of
from nanovllm.errors import ConfigError

MAX_PROCESSES = 8
COUNT = re.compile(rb'"(completion|prompt)_tokens": ?(\d+)')
ENDING = 2048  # bytes: the last event has the usage


def run_clients(server: ServerUnderTest, load: Load) -> tuple[list[Seen], float]:
    """The answers, and the seconds from the first request to the last answer."""
    assert load.clients is not None
    if not server.url.startswith("http://"):
        raise ConfigError(f"--url {server.url}: --clients speaks plain http:// only; leave --clients out")
    bodies = [{**server.body, **own} for own in requests_of(load)]
    num = min(MAX_PROCESSES, load.clients)
    jobs = [
        {
            "url": server.url,
            "headers": server.headers,
            "timeout": load.timeout,
            "clients": len(range(i, load.clients, num)),
            "bodies": bodies[i::num],
        }
        for i in range(num)
    ]
    command = [sys.executable, "-m", "nanovllm.bench.closed_loop"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in jobs]  # type: ignore[call-overload]
    try:
        for child in children:  # each has imported what it needs and waits: they begin together
            assert child.stdout.readline() == "ready\n"
        for child, job in zip(children, jobs):
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.close()
        found = [one for child in children for one in json.loads(child.stdout.read())["results"]]
    finally:
        for child in children:
            child.kill()
            child.wait()
    begins = [one.pop("began") for one in found]
    seen = [Seen(**one) for one in found]
    return seen, max(began + one.end for began, one in zip(begins, seen)) - min(begins)


async def _ask(host: str, port: int, head: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    seen, began = Seen(), time.time()  # the clock that all processes share
    start = time.perf_counter()
    try:
        answer = asyncio.ensure_future(_read_answer(host, port, head, body, seen, start))
        await asyncio.wait([answer], timeout=timeout)
        if not answer.done():
            answer.cancel()
            raise TimeoutError(f"no whole answer within {timeout:g} s")
        answer.result()
    except (OSError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"[:200]
    seen.end = time.perf_counter() - start
    return {**asdict(seen), "began": began}


async def _read_answer(host: str, port: int, head: str, body: dict[str, Any], seen: Seen, start: float) -> None:
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        first, ending = b"", b""
        while chunk := await reader.read(1 << 16):
            first = first or chunk
            ending = (ending + chunk)[-ENDING:]
            if b"data: {" in chunk:
                seen.events.append(time.perf_counter() - start)
    finally:
        writer.close()
    if b" 200" not in first.split(b"\r\n", 1)[0]:
        raise ValueError(first[-200:].decode(errors="replace"))
    if b"data: [DONE]" not in ending or not seen.events:
        raise ValueError("the stream broke off")
    counts = {kind: int(number) for kind, number in COUNT.findall(ending)}
    seen.num_tokens = counts.get(b"completion", len(seen.events))
    seen.num_prompt_tokens = counts.get(b"prompt", 0)


async def _clients(job: dict[str, Any]) -> list[dict[str, Any]]:
    place = urlsplit(job["url"])
    lines = [f"POST {place.path}/v1/completions HTTP/1.1", f"Host: {place.netloc}", "Content-Type: application/json"]
    lines += ["Connection: close", *(f"{name}: {value}" for name, value in job["headers"].items())]
    head, left, found = "\r\n".join(lines) + "\r\n", iter(job["bodies"]), []

    async def client() -> None:
        for body in left:  # shared: the next request goes to whichever client is free
            found.append(await _ask(place.hostname or "", place.port or 80, head, body, job["timeout"]))

    await asyncio.gather(*(client() for _ in range(job["clients"])))
    return found


if __name__ == "__main__":
    print("ready", flush=True)
    print(json.dumps({"results": asyncio.run(_clients(json.loads(sys.stdin.readline())))}))
