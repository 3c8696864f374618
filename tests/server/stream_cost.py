"""What a streamed token costs the server, by HTTP parser: python -m tests.server.stream_cost [--clients 64 256]

One server process for each parser, with steps that compute nothing and end every --step-ms, one event a token; clients
are raw sockets of this process. Processor time of the whole server process, divided by the tokens. The parsers take
turns; medians over the rounds, after one that is not counted. Events that were merged because the machine did not keep
up are reported: they would make a token look cheap.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanovllm.ranks.local import LocalExecutor
from nanovllm.runner.model_runner import InFlight
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.server import connections
from nanovllm.server import run as server_run
from tests.server.rig import raw_stream, running
from tests.tiny_models import build, save_tokenizer

PARSERS = {"h11": "H11Connection", "httptools": "HttpToolsConnection"}


def serve(parser: str, step_seconds: float) -> None:
    """Prints its address, then its processor time for each line that it reads."""
    due = 0.0

    def launch(_: LocalExecutor, plan: StepPlan) -> InFlight:
        def result() -> StepResult:
            nonlocal due
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + step_seconds
            return StepResult([[10 + plan.step_id % 60] for entry in plan.entries if entry.samples])

        return InFlight(result)

    LocalExecutor.launch = launch  # type: ignore[method-assign]
    server_run.Connection = getattr(connections, PARSERS[parser])
    engine = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_kvcache_blocks": 4096}
    with tempfile.TemporaryDirectory() as folder:
        model = build("llama-gqa-tied", Path(folder))
        save_tokenizer(model.path)
        with running(model.path, engine) as server:
            print(server.url, flush=True)
            for _ in sys.stdin:
                print(time.process_time(), flush=True)


class Child:
    def __init__(self, parser: str, step_ms: float) -> None:
        words = [sys.executable, "-m", "tests.server.stream_cost", "--serve", parser, "--step-ms", str(step_ms)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._url = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _seconds(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    async def round(self, num_clients: int, num_tokens: int) -> tuple[float, float]:
        """(seconds a token, events a token)"""
        before = self._seconds()
        body = {"prompt": [5, 6, 7, 8], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        streams = await asyncio.gather(*(raw_stream(self._url, body) for _ in range(num_clients)))
        tokens = num_clients * num_tokens
        return (self._seconds() - before) / tokens, sum(len(events or ()) for events in streams) / tokens

    def close(self) -> None:
        self._process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--serve", choices=list(PARSERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.step_ms / 1e3)
        return
    children = {name: Child(name, args.step_ms) for name in PARSERS}
    for num_clients in args.clients:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in PARSERS}
        for _ in range(args.rounds + 1):
            for name, child in children.items():
                found[name].append(asyncio.run(child.round(num_clients, args.tokens)))
        for name, rounds in found.items():
            micros = sorted(1e6 * seconds for seconds, _ in rounds[1:])
            events = statistics.median(events for _, events in rounds[1:])
            spread = f"{micros[0]:.1f} to {micros[-1]:.1f}"
            print(
                f"{num_clients:4} clients, {name:<9} {statistics.median(micros):6.1f} us a token ({spread}), "
                f"{events:.2f} events a token",
                flush=True,
            )
    for child in children.values():
        child.close()


if __name__ == "__main__":
    main()
