"""A long mixed load on `nanovllm serve`: every endpoint, streams that are left, wrong bodies, structures, tools.

    python -m tests.server.soak --minutes 10     # prints a table, writes a JSON file; exit code 1 if anything is wrong

Each client asks one thing after another, drawn at random, and checks the answer: the status it should have, a stream
that ends, JSON that follows its schema. At the end nothing may be left in the engine (its own metrics say so), its
memory may not have grown, and SIGTERM must end it with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from nanovllm.bench import report
from tests.server.rig import command

RESULT = Path("benchmarks/results/2026-11-15-cpu-serve-soak.json")
WORDS = ["the", "rain", "in", "a", "town", "on", "river", "and", "men", "of", "land", "sing", "all", "day", "long"]
ASK = [{"role": "user", "content": "a"}]
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "trains")]
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": "a", "nothing": 1}, "nothing"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "n": 10**6}, "n"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": ASK, "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": ASK, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
]


# A small cache: its memory becomes resident as blocks are used for the first time, which a large one does for an hour
# and which would look like a leak. It also makes sequences give way to others now and then.
SERVER = ("--max-waiting", "64", "--max-num-seqs", "16", "--max-model-len", "1024", "--num-kvcache-blocks", "256")


class Wrong(Exception):
    """An answer that is not what it should be."""


class Soak:
    def __init__(self, url: str, seed: int, health_seconds: float = 0.5) -> None:
        self.url = url
        self.rng = random.Random(seed)
        self.health_seconds = health_seconds
        self.done: Counter[str] = Counter()
        self.refused = 0  # 429: allowed, if it says when to come back
        self.errors: Counter[str] = Counter()
        self.health: list[float] = []
        self.actions: dict[str, tuple[int, Callable[[httpx.AsyncClient], Awaitable[None]]]] = {
            "completion": (3, self.completion),
            "chat": (3, self.chat),
            "stream": (5, self.stream),
            "leave": (4, self.leave),
            "bad body": (3, self.bad_body),
            "structure": (2, self.structure),
            "tools": (2, self.tools),
            "tokens": (2, self.tokens),
            "facts": (2, self.facts),
        }

    # ---- the things a client does ------------------------------------------------------------------------------

    def text(self, most: int = 40) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, most)))

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text()}]

    def sampling(self) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"max_tokens": rng.randint(1, 32), "temperature": rng.choice([0, 0.7, 1.3])}
        for name, value in (
            ("n", 2),
            ("seed", 5),
            ("top_k", 5),
            ("top_p", 0.8),
            ("presence_penalty", 1.0),
            ("stop", ["a b", "\n\n"]),
            ("logit_bias", {"5": 2.0}),
            ("cache_salt", "x"),
        ):
            if rng.random() < 0.2:
                found[name] = value
        return found

    async def post(self, client: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
        answer = await client.post(self.url + path, json=body)
        self.check_status(answer, status)
        return answer.json()

    def check_status(self, answer: httpx.Response, status: int = 200) -> None:
        if answer.status_code == 429 and "retry-after" in answer.headers:
            raise BusyError
        if answer.status_code != status:
            raise Wrong(f"{answer.request.url.path} answered {answer.status_code}, not {status}")

    async def completion(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": [self.text(), self.text()], "logprobs": self.rng.choice([None, 2]), **self.sampling()}
        found = await self.post(client, "/v1/completions", body)
        if len(found["choices"]) != 2 * body.get("n", 1) or not all(c["finish_reason"] for c in found["choices"]):
            raise Wrong("a completion is missing or did not end")

    async def chat(self, client: httpx.AsyncClient) -> None:
        found = await self.post(client, "/v1/chat/completions", {"messages": self.messages(), **self.sampling()})
        if any(choice["message"]["content"] is None for choice in found["choices"]):
            raise Wrong("a chat answer without content")

    async def stream(self, client: httpx.AsyncClient) -> None:
        body = {"stream": True, "stream_options": {"include_usage": True}, **self.sampling()}
        if self.rng.random() < 0.5:
            await self.read(client, "/v1/completions", {"prompt": self.text(), **body}, None)
        else:
            await self.read(client, "/v1/chat/completions", {"messages": self.messages(), **body}, None)

    async def leave(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": self.text(), "max_tokens": 200, "ignore_eos": True, "n": self.rng.randint(1, 3)}
        await self.read(client, "/v1/completions", {**body, "stream": True}, self.rng.randrange(12))

    async def read(self, client: httpx.AsyncClient, path: str, body: Any, leave_after: int | None) -> None:
        lines = []
        async with client.stream("POST", self.url + path, json=body) as answer:
            self.check_status(answer)
            async for line in answer.aiter_lines():
                if leave_after is not None and len(lines) >= leave_after:
                    return
                if line:
                    lines.append(line)
                if '"error"' in line[:20]:
                    raise Wrong(f"an error in a stream: {line[:120]}")
        if leave_after is None and (lines[-1] != "data: [DONE]" or json.loads(lines[-2][6:])["usage"] is None):
            raise Wrong("a stream did not end as it should")

    async def bad_body(self, client: httpx.AsyncClient) -> None:
        if self.rng.random() < 0.2:
            answer = await client.post(
                self.url + "/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"}
            )
            return self.check_status(answer, 400)
        path, body, param = self.rng.choice(BAD)
        found = await self.post(client, path, body, 400)
        if found["error"]["param"] != param:
            raise Wrong(f"the error of {path} names {found['error']['param']}, not {param}")

    async def structure(self, client: httpx.AsyncClient) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
        body = {"messages": self.messages(), "response_format": form, "max_tokens": 60}
        [choice] = (await self.post(client, "/v1/chat/completions", body))["choices"]
        if choice["finish_reason"] == "stop":
            check_trip(choice["message"]["content"])

    async def tools(self, client: httpx.AsyncClient) -> None:
        choice = self.rng.choice(["required", {"type": "function", "function": {"name": "trains"}}])
        body = {
            "messages": self.messages(),
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 80,
        }
        [found] = (await self.post(client, "/v1/chat/completions", body))["choices"]
        if found["finish_reason"] == "length":
            return
        [call] = found["message"]["tool_calls"]
        check_trip(call["function"]["arguments"])

    async def tokens(self, client: httpx.AsyncClient) -> None:
        text = self.text()
        found = await self.post(client, "/tokenize", {"prompt": text, "add_special_tokens": False})
        back = await self.post(client, "/detokenize", {"tokens": found["tokens"]})
        if back["prompt"].strip() != text:
            raise Wrong("a text did not survive its tokens")

    async def facts(self, client: httpx.AsyncClient) -> None:
        for path in ("/health", "/version", "/metrics", "/v1/models"):
            self.check_status(await client.get(self.url + path))

    # ---- many clients, for a while -----------------------------------------------------------------------------

    async def run(self, seconds: float, clients: int, sample: Callable[[], None]) -> None:
        self.deadline = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits, verify=False) as client:
            await asyncio.gather(*(self._ask(client) for _ in range(clients)), self._watch(client, sample))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        names, weights = list(self.actions), [weight for weight, _ in self.actions.values()]
        while time.monotonic() < self.deadline:
            [name] = self.rng.choices(names, weights)
            try:
                await self.actions[name][1](client)
                self.done[name] += 1
            except BusyError:
                self.refused += 1
                await asyncio.sleep(0.1)
            except Exception as error:
                self.errors[f"{name}: {type(error).__name__}: {error}"[:200]] += 1
                await asyncio.sleep(0.1)

    async def _watch(self, client: httpx.AsyncClient, sample: Callable[[], None]) -> None:
        while time.monotonic() < self.deadline:
            started = time.perf_counter()
            try:
                self.check_status(await client.get(self.url + "/health"))
                self.health.append(time.perf_counter() - started)
            except Exception as error:
                self.errors[f"health: {type(error).__name__}: {error}"[:200]] += 1
            sample()
            await asyncio.sleep(self.health_seconds)


class BusyError(Exception):
    """429, with Retry-After."""


def check_trip(text: str) -> None:
    value = json.loads(text)
    if set(value) != {"town", "days"} or value["town"] not in ("Oslo", "Rome") or value["days"] not in (1, 2, 3):
        raise Wrong(f"JSON that does not follow its schema: {text[:80]}")


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def still_held(url: str) -> dict[str, float]:
    """What the engine says it holds, once it has had time to let go."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    held: dict[str, float] = {}
    for _ in range(100):
        text = httpx.get(f"{url}/metrics").text
        held = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)}
        if not any(held.values()):
            break
        time.sleep(0.1)
    return held


def soak(model: str, minutes: float, clients: int, seed: int) -> dict[str, Any]:
    with command(model, *SERVER) as (process, url):
        memory: list[float] = []
        work = Soak(url, seed)
        asyncio.run(work.run(60 * minutes, clients, lambda: memory.append(resident_mb(process.pid))))
        held = still_held(url)
        process.send_signal(signal.SIGTERM)
        code = process.wait(90)
    warm = memory[len(memory) // 3 :]  # by then every kind of request has been there
    return {
        "minutes": minutes,
        "clients": clients,
        "requests": dict(work.done),
        "num_requests": sum(work.done.values()),
        "refused_429": work.refused,
        "num_errors": sum(work.errors.values()),
        "errors": dict(work.errors.most_common(20)),
        "held_at_the_end": held,
        "leaked": any(held.values()),
        "exit_code": code,
        "health_seconds": report.summary(work.health) if work.health else None,
        "memory_samples_mb": [round(value) for value in memory[:: max(1, len(memory) // 60)]],
        "memory_mb": {"at_a_third": warm[0], "at_the_end": warm[-1], "growth": warm[-1] - warm[0], "peak": max(memory)},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    found = soak(asked.model, asked.minutes, asked.clients, asked.seed)
    rows = [[name, count] for name, count in found["requests"].items()]
    report.print_table(f"{found['num_requests']} requests in {asked.minutes:g} minutes", ["", "answered"], rows)
    memory = found["memory_mb"]
    print(
        f"{found['num_errors']} errors, {found['refused_429']} refused; leaked: {found['leaked']}; "
        f"memory {memory['at_a_third']:.0f} -> {memory['at_the_end']:.0f} MB; exit code {found['exit_code']}"
    )
    for error, count in found["errors"].items():
        print(f"  {count} x {error}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    written = report.make_report("serve-soak", None, model=asked.model, results=found)
    asked.out.write_text(json.dumps(written, indent=1) + "\n")
    return int(bool(found["num_errors"] or found["leaked"] or found["exit_code"]))


if __name__ == "__main__":
    sys.exit(main())
