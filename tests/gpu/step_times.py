"""Microseconds of captured decode steps of a whole model, and of their parts: a part costs what a step without it takes
less. A kernel that is fast by itself may be slow in a step, where others run beside it (docs/lab/LOG.md).

    python tests/gpu/step_times.py --model benchmarks/models/qwen3-0.6b --rows 1,8,64,256 --context 768 --parts
    python tests/gpu/step_times.py --model benchmarks/models/qwen3-8b --rows 128 --context 99..999 -- --quantization fp8
    python tests/gpu/step_times.py --model benchmarks/models/qwen3-8b-fp8 --set fp8.FEW_ROWS=2

--whole: the same steps without products that the next kernel adds up (`Ops.faster`). --set: another value of a number
in ops/triton. Both are for comparing what a rule chooses with what it does not.

Made-up weights. A range of contexts draws a length for each row, longest first, as the runner sorts them. What follows
`--` are options of the engine (`nanovllm generate --help`). Prints a table, writes JSON to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanovllm import LLM
from nanovllm.bench.workload import Lengths
from nanovllm.ops.opset import Ops
from nanovllm.ops.triton import decode_attention
from nanovllm.runner.model_runner import ModelRunner

REPLAYS, ROUNDS = 12, 5


class StepLab:
    def __init__(self, runner: ModelRunner) -> None:
        assert runner._loop is not None
        self.runner, self.loop, self.model = runner, runner._loop, runner.model

    def fill(self, lens: list[int]) -> None:
        """Lanes of sequences with so many tokens, in blocks of the cache that are drawn."""
        lanes, size = self.loop._lanes.first(len(lens)), self.runner.layout.block_size
        counts = [(length + REPLAYS + 2) // size + 1 for length in lens]
        assert sum(counts) <= self.runner.layout.num_blocks, "the cache is too small"
        ids = torch.randperm(sum(counts), device=lanes.rows.device, dtype=torch.int32).split(counts)
        lanes.block_tables.zero_()
        for table, own in zip(lanes.block_tables, ids):
            table[: len(own)] = own
        at = torch.tensor(lens, device=lanes.rows.device) - 1
        lanes.rows.copy_(torch.arange(len(lens)))
        lanes.tokens.fill_(5)
        lanes.positions.copy_(at)
        lanes.context_lens.copy_(at + 1)
        lanes.slots.copy_(lanes.block_tables.gather(1, (at // size)[:, None])[:, 0].long() * size + at % size)
        lanes.step.zero_()

    @torch.inference_mode()
    def microseconds(self, lens: list[int]) -> float:
        self.fill(lens)
        self.loop._compute(len(lens))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loop._compute(len(lens))
        times = []
        for _ in range(ROUNDS):
            self.fill(lens)
            graph.replay()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / REPLAYS)
        return sorted(times)[ROUNDS // 2]

    # ---- parts -------------------------------------------------------------------------------------------------

    def parts(self, lens: list[int]) -> dict[str, float]:
        """Of a layer, but for the head and the draw. Each leaves something uninitialised: only times are right."""
        whole, layers = self.microseconds(lens), len(self.model.layers)
        found = {"step": whole}
        for name in ("qkv", "out", "gate_up", "down"):
            with self._without_product(name):
                found[name] = (whole - self.microseconds(lens)) / layers
        spec = self.model.layers[0].attention.spec

        def empty_q(qkv: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            shape = (qkv.shape[-2], spec.num_heads, spec.head_dim)
            return torch.empty(shape, dtype=spec.dtype, device=qkv.device)

        skipped: dict[str, dict[str, Any]] = {
            "rope": {"qk_norm_rope": empty_q},
            "norms": {"add_rms_norm": lambda x, r, *_: (r, r), "rms_norm": lambda x, *_: x},
        }
        for name, changes in skipped.items():
            with self._with_ops(**changes):
                found[name] = (whole - self.microseconds(lens)) / layers
        with _replaced(decode_attention, "decode_attention", lambda q, *_, **__: q):
            found["attention"] = (whole - self.microseconds(lens)) / layers
        with self._without_product("head"):
            found["head"] = whole - self.microseconds(lens)
        return found

    @contextlib.contextmanager
    def _without_product(self, name: str) -> Iterator[None]:
        layers = self.model.layers
        modules = {
            "qkv": [layer.attention.qkv for layer in layers],
            "out": [layer.attention.out for layer in layers],
            "gate_up": [layer.mlp.gate_up for layer in layers],
            "down": [layer.mlp.down for layer in layers],
            "head": [self.model.head],
        }[name]
        skipped = {id(module.weight) for module in modules}
        ops = self.model.ops

        def instead(product: Callable[..., torch.Tensor], halves: bool = False) -> Callable[..., torch.Tensor]:
            def call(x: torch.Tensor, weight: Any, *rest: Any, gated: bool = False, **more: Any) -> torch.Tensor:
                if id(weight) not in skipped:
                    return product(x, weight, *rest, **({"gated": True} if gated else {}), **more)
                size = weight.shape[0] // (2 if gated or halves else 1)
                return torch.empty((len(x), size), dtype=x.dtype, device=x.device)

            return call

        def faster(x: torch.Tensor, weight: Any, bias: Any, gated: bool) -> torch.Tensor | None:
            if id(weight) in skipped:
                return torch.empty((len(x), weight.shape[0] // (1 + gated)), dtype=x.dtype, device=x.device)
            return ops.faster(x, weight, bias, gated)

        with self._with_ops(linear=instead(ops.linear), gemv=instead(ops.gemv), faster=faster):
            yield

    @contextlib.contextmanager
    def _with_ops(self, **changes: Any) -> Iterator[None]:
        kept = [
            (module, module.ops) for module in self.model.modules() if isinstance(getattr(module, "ops", None), Ops)
        ]
        products = [(module, module.product) for module in self.model.modules() if hasattr(module, "product")]
        for module, ops in kept:
            module.ops = replace(ops, **changes)
        changed = replace(self.model.ops, **changes)
        for module, product in products:
            module.product = changed.linear if product is self.model.ops.linear else changed.linear_parts
        try:
            yield
        finally:
            for module, ops in kept:
                module.ops = ops
            for module, product in products:
                module.product = product


@contextlib.contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--context", default="768", help="tokens of a row: a number, or a range such as 300..1250")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="FILE.NAME=NUMBER")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="--option value", help="of the engine, behind --")
    args = parser.parse_args()
    names = [name.removeprefix("--").replace("-", "_") for name in args.options[::2]]
    options = dict(zip(names, args.options[1::2]))
    for change in args.set:
        place, _, number = change.partition("=")
        file, _, name = place.partition(".")
        module = importlib.import_module(f"nanovllm.ops.triton.{file}")
        assert isinstance(getattr(module, name), int), change
        setattr(module, name, int(number))
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "model": args.model, "context": args.context}
    found["set"] = args.set
    lengths = Lengths.parse(args.context)
    with LLM(args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, **options) as llm:
        lab = StepLab(llm.engine.executor.runner)  # type: ignore[attr-defined]
        for rows in map(int, args.rows.split(",")):
            lens = sorted((lengths.draw(random.Random(rows + i)) for i in range(rows)), reverse=True)
            times = lab.parts(lens) if args.parts else {"step": lab.microseconds(lens)}
            if args.whole:
                with lab._with_ops(faster=None):
                    times["whole products"] = lab.microseconds(lens)
            found[f"{rows} rows"] = {name: round(value, 2) for name, value in times.items()}
            print(f"{rows:4d} rows  " + "  ".join(f"{name} {value:.2f}" for name, value in times.items()), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step_times.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
