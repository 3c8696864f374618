"""The expert kernels alone: how fast they read weights at decode and multiply at prefill, and which tiles are best.

Decode reads the weights of the distinct experts its tokens chose, once: its limit is a plain read of memory. Prefill
multiplies 3 * H * I weights for every pair: its limit is a large matrix product. A call is `expert_pairs` as a layer
makes it, sorting included, in a captured graph. Every call of a graph has a routing of its own, so that over the graph
more weights are read than the L2 cache holds.

Routings: "uniform" (every token draws its experts alike), "concentrated" (all tokens of a call want the same k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.kernels import Heads, Lab, measure_ceilings
from nanovllm.bench.report import print_table
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.graphs import capture_graph
from nanovllm.hardware.timing import time_on_device
from nanovllm.model_config import ModelConfig

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
ROUTINGS = ("uniform", "concentrated")
MEETING_TOKENS = 256  # batches of decodes may all want the same experts; the tokens of a long prompt never do
WORTH = 0.98  # of the rule's time: less is within the noise of the clock
TUNED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
CACHE_BYTES = 160e6


@dataclass(frozen=True)
class KernelShape:
    name: str
    hidden: int
    size: int
    num_experts: int
    top_k: int

    @property
    def parameters(self) -> int:
        return 3 * self.hidden * self.size


MIXTRAL = KernelShape("Mixtral-8x7B", 4096, 14336, 8, 2)
MIXTRAL_LARGE = KernelShape("Mixtral-8x22B", 6144, 16384, 8, 2)
QWEN3_30B = KernelShape("Qwen3-30B-A3B", 2048, 768, 128, 8)
SHAPES = (MIXTRAL, QWEN3_30B)
NAMED_SHAPES = {shape.name.lower(): shape for shape in (MIXTRAL, MIXTRAL_LARGE, QWEN3_30B)}


def parse_shapes(text: str) -> tuple[KernelShape, ...]:
    names = list(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    if unknown := [name for name in names if name not in NAMED_SHAPES]:
        raise ConfigError(
            f"--shapes {text!r}: {unknown[0]!r} is none of {', '.join(NAMED_SHAPES)}; for another model give --model "
            f"instead"
        )
    return tuple(NAMED_SHAPES[name] for name in names)


def shape_of(model: ModelConfig, name: str) -> KernelShape:
    """`name`: the model as the user called it; a folder is known by its last part."""
    assert model.moe is not None
    moe = model.moe
    return KernelShape(Path(name).name, model.hidden_size, moe.intermediate_size, moe.num_experts, moe.top_k)


def need_gpu(device: Device) -> None:
    if not device.is_gpu:
        raise ConfigError("bench moe: the kernels need a GPU, and here is none; --parts offload runs on a CPU too")


@dataclass(frozen=True)
class Call:
    x: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor

    @property
    def num_distinct(self) -> int:
        return len(self.slots.unique())


class MoeLab:
    """One layer's experts with random weights, and the calls to time on them."""

    def __init__(self, device: Device, shape: KernelShape, dtype: torch.dtype) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        where = {"dtype": dtype, "device": device.torch_device}
        num, hidden, size = shape.num_experts, shape.hidden, shape.size
        self.gate_up = torch.empty(num, 2 * size, hidden, **where).normal_(std=hidden**-0.5)
        self.down = torch.empty(num, hidden, size, **where).normal_(std=size**-0.5)

    def calls(self, num_tokens: int, routing: str) -> list[Call]:
        touched = min(self.shape.num_experts, num_tokens * self.shape.top_k) * self.expert_bytes
        if routing == "concentrated":
            touched = self.shape.top_k * self.expert_bytes
        return [self.call(num_tokens, routing) for _ in range(max(4, min(16, int(CACHE_BYTES / touched) + 1)))]

    def call(self, num_tokens: int, routing: str) -> Call:
        shape, where = self.shape, self.device.torch_device
        rows = 1 if routing == "concentrated" else num_tokens
        slots = torch.rand(rows, shape.num_experts, device=where).argsort(dim=1)[:, : shape.top_k].int()
        slots = slots.expand(num_tokens, -1).contiguous()
        x = torch.randn(num_tokens, shape.hidden, dtype=self.dtype, device=where)
        weights = torch.full((num_tokens, shape.top_k), 1 / shape.top_k, device=where)
        return Call(x, slots, weights, x.new_empty(num_tokens, shape.top_k, shape.hidden))

    @property
    def expert_bytes(self) -> int:
        return self.shape.parameters * self.dtype.itemsize

    def whole(self, call: Call, plan: Any = None) -> Callable[[], object]:
        """The operator of a layer; `plan`: not the one the tables choose."""
        from nanovllm.ops.triton.moe_experts import expert_pairs

        args = (call.x, self.gate_up, self.down, call.slots, call.weights, call.out, plan)
        return lambda: expert_pairs(*args)

    def part(self, call: Call, plan: Any, name: str) -> Callable[[], object]:
        """One kernel of a plan: "gate_up" or "down"; rows are sorted beforehand."""
        from nanovllm.ops.triton import moe_gemm, moe_gemv
        from nanovllm.ops.triton.moe_align import align

        slots, top_k, tile = call.slots, self.shape.top_k, getattr(plan, name)
        active = call.x.new_zeros(slots.numel(), self.shape.size)
        if plan.kind == "gemv":
            block = (tile.block_n, tile.block_k)
            if name == "gate_up":
                return lambda: moe_gemv.gate_up_gemv(call.x, self.gate_up, slots, block)
            return lambda: moe_gemv.down_gemv(active, self.down, slots, call.weights, call.out, block)
        rows = align(slots, self.shape.num_experts, plan.block_m)
        if name == "gate_up":
            return lambda: moe_gemm.gate_up_gemm(call.x, self.gate_up, rows, top_k, plan.block_m, tile)
        return lambda: moe_gemm.down_gemm(active, self.down, rows, call.weights, call.out, plan.block_m, tile)

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        def run() -> None:
            for call in calls:
                call()

        replay, _ = capture_graph(run, None)
        return time_on_device(replay, self.device) / len(calls)

    def plan_shape(self) -> Any:
        from nanovllm.ops.triton.moe_tiles import MoeShape

        return MoeShape(self.shape.hidden, self.shape.size, self.shape.top_k, self.dtype)


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure_limits(device: Device, dtype: torch.dtype) -> dict[str, float]:
    ceilings = measure_ceilings(Lab(device, dtype, Heads(1, 1, 64)))
    bandwidth = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
    return {"bytes_per_second": bandwidth, "flops": ceilings["matmul_flops"]}


def measure_decode(lab: MoeLab, limits: dict[str, float], tokens: tuple[int, ...] = DECODE_TOKENS) -> list[dict]:
    rows = []
    for num_tokens in tokens:
        for routing in ROUTINGS:
            calls = lab.calls(num_tokens, routing)
            distinct = sum(call.num_distinct for call in calls) / len(calls)
            seconds = lab.seconds([lab.whole(call) for call in calls])
            rate = distinct * lab.expert_bytes / seconds
            rows.append(
                {
                    "model": lab.shape.name,
                    "tokens": num_tokens,
                    "routing": routing,
                    "seconds": seconds,
                    "distinct_experts": distinct,
                    "bytes_per_second": rate,
                    "share_of_limit": rate / limits["bytes_per_second"],
                }
            )
    return rows


def measure_prefill(lab: MoeLab, limits: dict[str, float], tokens: tuple[int, ...] = PREFILL_TOKENS) -> list[dict]:
    """Our tiles and PyTorch's grouped product, whichever the table chooses; None where one cannot run here."""
    from nanovllm.ops.triton.moe_tiles import TileChoice, choose_tiles, default_tiles

    rows, where = [], lab.device.torch_device
    for num_tokens in tokens:
        call = lab.call(num_tokens, "uniform")
        flops = 2 * num_tokens * lab.shape.top_k * lab.shape.parameters
        # Asked as fp16 the rule does not think of the grouped product, and its tiles are those of bf16.
        tiles = default_tiles(num_tokens, replace(lab.plan_shape(), dtype=torch.float16), lab.device.capability)
        row = {
            "model": lab.shape.name,
            "tokens": num_tokens,
            "chosen": choose_tiles(num_tokens, lab.plan_shape(), where).kind,
        }
        for name, plan in (("tiles", tiles), ("grouped", TileChoice("grouped", 128))):
            seconds = try_seconds(lab, [lab.whole(call, plan)])
            rate = None if seconds is None else flops / seconds
            row |= {
                f"{name}_seconds": seconds,
                f"{name}_flops": rate,
                f"{name}_share": None if rate is None else rate / limits["flops"],
            }
        rows.append(row)
        lab.device.release_cached()
    return rows


def try_seconds(lab: MoeLab, calls: list[Callable[[], object]]) -> float | None:
    """None: this cut does not fit the card, or PyTorch's product does not know it."""
    from triton.runtime.errors import OutOfResources

    try:
        return lab.seconds(calls)
    except (RuntimeError, NotImplementedError, OutOfResources):
        return None


def measure(device: Device, shapes: tuple[KernelShape, ...] = SHAPES) -> dict[str, Any]:
    dtype = device.resolve_dtype("auto", "bfloat16")
    limits = measure_limits(device, dtype)
    found: dict[str, Any] = {"limits": limits, "decode": [], "prefill": []}
    for shape in shapes:
        lab = MoeLab(device, shape, dtype)
        found["decode"] += measure_decode(lab, limits)
        found["prefill"] += measure_prefill(lab, limits)
        del lab
        device.release_cached()
    return found


def print_measured(found: dict[str, Any]) -> None:
    limits = found["limits"]
    print(
        f"this card reads {limits['bytes_per_second'] / 1e12:.2f} TB/s and multiplies {limits['flops'] / 1e12:.0f} "
        f"TFLOP/s"
    )
    columns = ["model", "tokens", "routing", "us", "experts touched", "GB/s of their weights", "of this card's"]
    print_table("decode: one layer's experts", columns, [
        [row["model"], row["tokens"], row["routing"], row["seconds"] * 1e6, row["distinct_experts"],
         row["bytes_per_second"] / 1e9, f"{row['share_of_limit']:.0%}"] for row in found["decode"]
    ])  # fmt: skip
    columns = ["model", "tokens", "tiles us", "TFLOP/s", "of limit", "grouped us", "TFLOP/s", "of limit", "chosen"]
    print_table("prefill: one layer's experts", columns, [
        [row["model"], row["tokens"],
         *(cell for name in ("tiles", "grouped") for cell in (
             _cell(row[f"{name}_seconds"], 1e6), _cell(row[f"{name}_flops"], 1e-12), _percent(row[f"{name}_share"]))),
         row["chosen"]] for row in found["prefill"]
    ])  # fmt: skip


def _cell(value: float | None, factor: float) -> float | str:
    return "-" if value is None else value * factor


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# ---- tuning --------------------------------------------------------------------------------------------------------


def candidates(num_tokens: int, shape: KernelShape) -> list[tuple[str, int, list, list]]:
    """(kind, block_m, tiles of GEMM 1, tiles of GEMM 2) worth trying for so many tokens."""
    from nanovllm.ops.triton.moe_tiles import Tile

    found: list[tuple[str, int, list, list]] = []
    if num_tokens <= 4:
        blocks = [Tile(n, k, 1, 1) for n, k in ((1, 512), (1, 1024), (1, 2048), (2, 512), (2, 1024))]
        found.append(("gemv", 1, blocks, blocks))
    mean = num_tokens * shape.top_k / shape.num_experts
    if num_tokens > 1:
        small = [
            Tile(n, k, 4, s)
            for n, k, s in (
                (16, 256, 4),
                (32, 128, 4),
                (32, 128, 5),
                (32, 256, 3),
                (64, 64, 4),
                (64, 128, 3),
                (64, 128, 4),
            )
        ]
        large = [Tile(64, 64, 4, 4), Tile(64, 64, 8, 4), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(256, 64, 8, 4)]
        for block_m in (16, 32, 64, 128):
            if block_m <= 16 or mean / 4 <= block_m <= 8 * mean:
                found.append(("tiles", block_m, *([large, large] if block_m >= 64 else [small, small])))
    if num_tokens >= 512:
        found.append(("grouped", 128, [], []))
    return found


def tune(shapes: tuple[KernelShape, ...], device: Device, tokens: tuple[int, ...] = TUNED_TOKENS) -> list[dict]:
    """Entries for the table of tiles, for `moe_tiles.write_table`: the best plan for each number of tokens.

    A plan is judged by how its times compare with the rule's, averaged over two routings: every token draws its own
    experts, all want the same. Judged by the first alone, 64 tokens of Mixtral got a block of 32 rows: 5 % faster
    there, 50 % slower where all meet (H200). The two products are timed apart, each with its own tile; they share
    BLOCK_M, as rows are sorted once.
    """
    from tqdm import tqdm

    from nanovllm.ops.triton.moe_tiles import TileChoice, default_tiles, entry_of

    dtype, entries = device.resolve_dtype("auto", "bfloat16"), []
    for shape in shapes:
        lab = MoeLab(device, shape, dtype)
        for num_tokens in tqdm(tokens, desc=shape.name, unit="size", disable=None):
            rule = default_tiles(num_tokens, lab.plan_shape(), device.capability)
            judge = Judge(lab, num_tokens, rule)
            best = (WORTH, rule)
            for kind, block_m, first, second in candidates(num_tokens, shape):
                plan = TileChoice(kind, block_m)
                for name, tiles in (("gate_up", first), ("down", second)):
                    timed = [(judge.part(replace(plan, **{name: tile}), name), tile) for tile in tiles]
                    if timed:
                        plan = replace(plan, **{name: min(timed, key=lambda pair: pair[0])[1]})
                best = min(best, (judge.whole(plan), plan), key=lambda pair: pair[0])
            entries.append(entry_of(device.name, lab.plan_shape(), num_tokens, best[1]))
            device.release_cached()
    return entries


class Judge:
    """Times of plans for so many tokens, as multiples of the rule's."""

    def __init__(self, lab: MoeLab, num_tokens: int, rule: Any) -> None:
        self._lab = lab
        routings = ROUTINGS if num_tokens <= MEETING_TOKENS else ROUTINGS[:1]
        self._calls = [lab.calls(num_tokens, routing) for routing in routings]
        times = [self._seconds([lab.whole(call, rule) for call in calls]) for calls in self._calls]
        # A rule that does not fit this card: any plan that does is better.
        self._rule = [seconds if seconds < float("inf") else 1.0 for seconds in times]

    def whole(self, plan: Any) -> float:
        return self._mean([[self._lab.whole(call, plan) for call in calls] for calls in self._calls])

    def part(self, plan: Any, name: str) -> float:
        return self._mean([[self._lab.part(call, plan, name) for call in calls] for calls in self._calls])

    def _mean(self, calls: list[list[Callable[[], object]]]) -> float:
        return sum(self._seconds(some) / rule for some, rule in zip(calls, self._rule)) / len(self._rule)

    def _seconds(self, calls: list[Callable[[], object]]) -> float:
        seconds = try_seconds(self._lab, calls)
        return float("inf") if seconds is None else seconds


def tune_table(shapes: tuple[KernelShape, ...], device: Device, path: Path | None = None) -> list[dict[str, Any]]:
    """Tunes, writes the table of tiles, and says what it now holds for these shapes: one row a number of tokens, with
    the plan that stood there before (None: no entry, the rule decided)."""
    from nanovllm.ops.triton import moe_tiles

    path = path or moe_tiles.TABLE
    before = {(key, tokens): plan for key, tokens, plan in moe_tiles.read_table(path)}
    entries = tune(shapes, device)
    moe_tiles.write_table(path, entries)
    moe_tiles._entries.cache_clear()  # what is measured next in this process uses the new entries
    names = {(shape.hidden, shape.size, shape.top_k): shape.name for shape in shapes}
    tuned = {(e["device"], e["hidden"], e["size"], e["top_k"], e["element_size"], e["max_tokens"]) for e in entries}
    return [
        {"model": names[key[1:4]], "tokens": tokens, "plan": _spell(plan), "before": _spell(before.get((key, tokens)))}
        for key, tokens, plan in moe_tiles.read_table(path)
        if (*key, tokens) in tuned
    ]


def _spell(plan: Any) -> str | None:
    if plan is None:
        return None
    if plan.kind == "grouped":
        return "grouped"
    tiles = (f"{t.block_n}x{t.block_k} w{t.num_warps} s{t.num_stages}" for t in (plan.gate_up, plan.down))
    return f"{plan.kind} m{plan.block_m}: {', '.join(tiles)}"


def print_tuned(rows: list[dict[str, Any]]) -> None:
    changed = [row for row in rows if row["plan"] != row["before"]]
    print_table(
        f"table of tiles: {len(changed)} of {len(rows)} entries changed",
        ["model", "tokens", "before", "now"],
        [[row["model"], row["tokens"], row["before"] or "the rule", row["plan"]] for row in changed],
    )
