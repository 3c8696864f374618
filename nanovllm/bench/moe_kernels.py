"""The expert kernels alone: how fast they read weights at decode and multiply at prefill, and which tiles are best.

Decode reads the weights of the distinct experts its tokens chose, once: its limit is a plain read of memory. Prefill
multiplies 3 * H * I weights for every pair: its limit is a large matrix product. A call is `expert_pairs` as a layer
makes it, sorting included, in a captured graph. Every call of a graph has a routing of its own, so that over the graph
more weights are read than the L2 cache holds.

Routings: "uniform" (every token draws its experts alike), "concentrated" (all tokens of a call choose the same k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.bench.kernels import CACHE_BYTES, Calls, Heads, Lab, measure_ceilings, replay_seconds
from nanovllm.bench.report import Columns, print_rows
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.model_config import ModelConfig
from nanovllm.moe.scaled import expert_views
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers

if TYPE_CHECKING:
    from nanovllm.ops.triton.moe_tiles import MoeShape, Tile, TileChoice

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
Rows = list[dict[str, Any]]
ROUTINGS = ("uniform", "concentrated")
MEETING_TOKENS = 256  # batches of decodes may all choose the same experts; the tokens of a long prompt never do
WORTH = 0.98  # of the rule's time: less is within the noise of the clock
TUNED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)


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


# (n, k), (n, k, stages) and (n, k, warps, stages) of the tiles that are tried
VECTOR_TILES = ((1, 512), (1, 1024), (1, 2048), (2, 512), (2, 1024))
SMALL_TILES = ((16, 256, 4), (32, 128, 4), (32, 128, 5), (32, 256, 3), (64, 64, 4), (64, 128, 3), (64, 128, 4))
LARGE_TILES = ((64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 4))
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
    ids: torch.Tensor  # of the chosen experts
    weights: torch.Tensor
    out: torch.Tensor

    @property
    def num_distinct(self) -> int:
        return int(self.ids.unique().numel())


class MoeLab:
    """One layer's experts with random weights, and the calls to time on them. `scale_block`: in 8-bit floats;
    `integers`: in integers."""

    def __init__(
        self,
        device: Device,
        shape: KernelShape,
        dtype: torch.dtype,
        scale_block: int | None = None,
        integers: ExpertIntegers | None = None,
    ) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        num, hidden, size = shape.num_experts, shape.hidden, shape.size
        self.form = ExpertForm.dense(hidden, size, scale_block, integers)
        self.gate_up: Any
        self.down: Any
        if not self.form.is_bytes:
            self.gate_up, self.down = self._weights(num, 2 * size, hidden), self._weights(num, hidden, size)
            return
        pool = torch.randint(0, 0x7F, (num, self.form.length), dtype=torch.uint8, device=device.torch_device)
        self.gate_up, self.down = expert_views(self.form, pool)  # 0x7f is not a number
        for stack in (self.gate_up, self.down):
            small = stack.shape[2] ** -0.5 / 100
            if integers is None:
                stack.scale.fill_(small)
            else:  # float16 scales; offsets of 0
                stack.factors.fill_(int(torch.tensor(small, dtype=torch.float16).view(torch.int16)))

    def _weights(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self.dtype, device=self.device.torch_device).normal_(std=sizes[-1] ** -0.5)

    def calls(self, num_tokens: int, routing: str) -> list[Call]:
        touched = min(self.shape.num_experts, num_tokens * self.shape.top_k) * self.expert_bytes
        if routing == "concentrated":
            touched = self.shape.top_k * self.expert_bytes
        return [self.call(num_tokens, routing) for _ in range(max(4, min(16, int(CACHE_BYTES / touched) + 1)))]

    def call(self, num_tokens: int, routing: str) -> Call:
        shape, where = self.shape, self.device.torch_device
        rows = 1 if routing == "concentrated" else num_tokens
        ids = torch.rand(rows, shape.num_experts, device=where).argsort(dim=1)[:, : shape.top_k].int()
        ids = ids.expand(num_tokens, -1).contiguous()
        x = torch.randn(num_tokens, shape.hidden, dtype=self.dtype, device=where)
        weights = torch.full((num_tokens, shape.top_k), 1 / shape.top_k, device=where)
        return Call(x, ids, weights, x.new_empty(num_tokens, shape.top_k, shape.hidden))

    @property
    def expert_bytes(self) -> int:
        return self.form.num_bytes(self.dtype.itemsize)

    def whole(self, call: Call, choice: Any = None) -> Callable[[], object]:
        """The operator of a layer; `choice`: not the one the tables choose."""
        from nanovllm.ops.triton.moe_experts import expert_pairs

        args = (call.x, self.gate_up, self.down, call.ids, call.weights, call.out, choice)
        return lambda: expert_pairs(*args)

    def part(self, call: Call, choice: Any, name: str) -> Callable[[], object]:
        """One kernel of a choice: "gate_up" or "down"; rows are sorted beforehand."""
        from nanovllm.ops.triton import moe_gemm, moe_gemv
        from nanovllm.ops.triton.moe_align import align

        ids, top_k, tile = call.ids, self.shape.top_k, getattr(choice, name)
        active = call.x.new_zeros(ids.numel(), self.shape.size)
        if choice.kind == "gemv":
            block = (tile.block_n, tile.block_k)
            if name == "gate_up":
                return lambda: moe_gemv.gate_up_gemv(call.x, self.gate_up, ids, block)
            return lambda: moe_gemv.down_gemv(active, self.down, ids, call.weights, call.out, block)
        rows = align(ids, self.shape.num_experts, choice.block_m)
        if name == "gate_up":
            return lambda: moe_gemm.gate_up_gemm(call.x, self.gate_up, rows, top_k, choice.block_m, tile)
        return lambda: moe_gemm.down_gemm(active, self.down, rows, call.weights, call.out, choice.block_m, tile)

    def rule(self, num_tokens: int, dtype: torch.dtype) -> TileChoice:
        """What is chosen for this dtype where the table of tiles has no entry."""
        from nanovllm.ops.triton.common import capability
        from nanovllm.ops.triton.moe_tiles import default_tiles

        return default_tiles(num_tokens, replace(self.moe_shape(), dtype=dtype), capability(self.device.torch_device))

    def moe_shape(self) -> MoeShape:
        from nanovllm.ops.triton.moe_tiles import MoeShape

        is_scaled = self.form.scale_block is not None
        return MoeShape(self.shape.hidden, self.shape.size, self.shape.top_k, self.dtype, eight_bits=is_scaled)


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure_limits(device: Device, dtype: torch.dtype) -> dict[str, float]:
    ceilings = measure_ceilings(Lab(device, dtype, Heads(1, 1, 64)))
    bandwidth = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
    return {"bytes_per_second": bandwidth, "flops": ceilings["matmul_flops"]}


def measure_decode(lab: MoeLab, limits: dict[str, float], tokens: tuple[int, ...] = DECODE_TOKENS) -> Rows:
    rows = []
    for num_tokens in tokens:
        for routing in ROUTINGS:
            calls = lab.calls(num_tokens, routing)
            distinct = sum(call.num_distinct for call in calls) / len(calls)
            seconds = replay_seconds([lab.whole(call) for call in calls], lab.device)
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


def measure_prefill(lab: MoeLab, limits: dict[str, float], tokens: tuple[int, ...] = PREFILL_TOKENS) -> Rows:
    """Our tiles and PyTorch's grouped product, whichever the table chooses; None where one cannot run here."""
    from nanovllm.ops.triton.moe_tiles import TileChoice, choose_tiles

    rows, where = [], lab.device.torch_device
    for num_tokens in tokens:
        call = lab.call(num_tokens, "uniform")
        flops = 2 * num_tokens * lab.shape.top_k * lab.shape.parameters
        # For fp16 the rule leaves out the grouped product, and its tiles are those of bf16.
        tiles = lab.rule(num_tokens, torch.float16)
        row = {
            "model": lab.shape.name,
            "tokens": num_tokens,
            "chosen": choose_tiles(num_tokens, lab.moe_shape(), where).kind,
        }
        for name, choice in (("tiles", tiles), ("grouped", TileChoice("grouped", 128))):
            seconds = try_seconds(lab, [lab.whole(call, choice)])
            rate = None if seconds is None else flops / seconds
            row |= {
                f"{name}_seconds": seconds,
                f"{name}_flops": rate,
                f"{name}_share": None if rate is None else rate / limits["flops"],
            }
        rows.append(row)
        lab.device.release_cached()
    return rows


def try_seconds(lab: MoeLab, calls: Calls) -> float | None:
    """None: this cut does not fit the card, or PyTorch's product does not take it."""
    from triton.runtime.errors import OutOfResources

    try:
        return replay_seconds(calls, lab.device)
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
    columns: Columns = [("model", "model"), ("tokens", "tokens"), ("routing", "routing"), ("us", "seconds", 1e6)]
    columns += [("experts touched", "distinct_experts"), ("GB/s of their weights", "bytes_per_second", 1e-9)]
    columns += [("of this card's", "share_of_limit", "{:.0%}")]
    print_rows("decode: one layer's experts", found["decode"], columns)
    columns = [("model", "model"), ("tokens", "tokens")]
    for name in ("tiles", "grouped"):
        columns += [(f"{name} us", f"{name}_seconds", 1e6), ("TFLOP/s", f"{name}_flops", 1e-12)]
        columns += [("of limit", f"{name}_share", "{:.0%}")]
    print_rows("prefill: one layer's experts", found["prefill"], [*columns, ("chosen", "chosen")])


# ---- tuning --------------------------------------------------------------------------------------------------------


def candidates(num_tokens: int, shape: KernelShape) -> list[tuple[str, int, list[Tile]]]:
    """(kind, block_m, tiles of each of the two products) worth trying for so many tokens."""
    from nanovllm.ops.triton.moe_tiles import Tile

    found: list[tuple[str, int, list[Tile]]] = []
    if num_tokens <= 4:
        found.append(("gemv", 1, [Tile(n, k, 1, 1) for n, k in VECTOR_TILES]))
    mean = num_tokens * shape.top_k / shape.num_experts
    if num_tokens > 1:
        small, large = [Tile(n, k, 4, stages) for n, k, stages in SMALL_TILES], [Tile(*tile) for tile in LARGE_TILES]
        for block_m in (16, 32, 64, 128):
            if block_m <= 16 or mean / 4 <= block_m <= 8 * mean:
                found.append(("tiles", block_m, large if block_m >= 64 else small))
    if num_tokens >= 512:
        found.append(("grouped", 128, []))
    return found


def tune(shapes: tuple[KernelShape, ...], device: Device, tokens: tuple[int, ...] = TUNED_TOKENS) -> Rows:
    """Entries for the table of tiles, for `moe_tiles.write_table`: the best choice for each number of tokens.

    A choice is judged by how its times compare with the rule's, averaged over two routings: every token draws its own
    experts, all choose the same. Judged by the first alone, 64 tokens of Mixtral got a block of 32 rows: 5 % faster
    there, 50 % slower where all meet (H200). The two products are timed apart, each with its own tile; they share
    BLOCK_M, as rows are sorted once.
    """
    from tqdm import tqdm

    from nanovllm.ops.triton.moe_tiles import TileChoice, entry_of

    dtype, entries = device.resolve_dtype("auto", "bfloat16"), []
    for shape in shapes:
        lab = MoeLab(device, shape, dtype)
        for num_tokens in tqdm(tokens, desc=shape.name, unit="size", disable=None):
            rule = lab.rule(num_tokens, dtype)
            judge = Judge(lab, num_tokens, rule)
            best = (WORTH, rule)
            for kind, block_m, tiles in candidates(num_tokens, shape):
                choice = TileChoice(kind, block_m)
                for name in ("gate_up", "down") if tiles else ():
                    timed = [(judge.part(with_tile(choice, name, tile), name), tile) for tile in tiles]
                    choice = with_tile(choice, name, min(timed, key=lambda pair: pair[0])[1])
                best = min(best, (judge.whole(choice), choice), key=lambda pair: pair[0])
            entries.append(entry_of(device.name, lab.moe_shape(), num_tokens, best[1]))
            device.release_cached()
    return entries


def with_tile(choice: TileChoice, name: str, tile: Tile) -> TileChoice:
    return replace(choice, gate_up=tile) if name == "gate_up" else replace(choice, down=tile)


class Judge:
    """Times of choices for so many tokens, as multiples of the rule's."""

    def __init__(self, lab: MoeLab, num_tokens: int, rule: TileChoice) -> None:
        self._lab = lab
        routings = ROUTINGS if num_tokens <= MEETING_TOKENS else ROUTINGS[:1]
        self._calls = [lab.calls(num_tokens, routing) for routing in routings]
        times = [self._seconds([lab.whole(call, rule) for call in calls]) for calls in self._calls]
        # A rule that does not fit this card: any choice that does is better.
        self._rule = [seconds if seconds < float("inf") else 1.0 for seconds in times]

    def whole(self, choice: Any) -> float:
        return self._mean([[self._lab.whole(call, choice) for call in calls] for calls in self._calls])

    def part(self, choice: Any, name: str) -> float:
        return self._mean([[self._lab.part(call, choice, name) for call in calls] for calls in self._calls])

    def _mean(self, calls: list[Calls]) -> float:
        return sum(self._seconds(some) / rule for some, rule in zip(calls, self._rule)) / len(self._rule)

    def _seconds(self, calls: Calls) -> float:
        seconds = try_seconds(self._lab, calls)
        return float("inf") if seconds is None else seconds


def tune_table(shapes: tuple[KernelShape, ...], device: Device, path: Path | None = None) -> list[dict[str, Any]]:
    """Tunes, writes the table of tiles, and returns what it now holds for these shapes: a row a number of tokens,
    with the choice that stood there before (None: no entry, the rule decided)."""
    from nanovllm.ops.triton import moe_tiles

    path = path or moe_tiles.TABLE
    before = {(key, tokens): choice for key, tokens, choice in moe_tiles.read_table(path)}
    entries = tune(shapes, device)
    moe_tiles.write_table(path, entries)
    names = {(shape.hidden, shape.size, shape.top_k): shape.name for shape in shapes}
    tuned = {(e["device"], e["hidden"], e["size"], e["top_k"], e["element_size"], e["max_tokens"]) for e in entries}
    return [
        {
            "model": names[key[1:4]],
            "tokens": tokens,
            "plan": _spell(choice),
            "before": _spell(before.get((key, tokens))),
        }
        for key, tokens, choice in moe_tiles.read_table(path)
        if (*key, tokens) in tuned
    ]


def _spell(choice: Any) -> str | None:
    if choice is None:
        return None
    if choice.kind == "grouped":
        return "grouped"
    tiles = (f"{t.block_n}x{t.block_k} w{t.num_warps} s{t.num_stages}" for t in (choice.gate_up, choice.down))
    return f"{choice.kind} m{choice.block_m}: {', '.join(tiles)}"


def print_tuned(rows: list[dict[str, Any]]) -> None:
    changed = [row for row in rows if row["plan"] != row["before"]]
    columns = [("model", "model"), ("tokens", "tokens"), ("before", "before"), ("now", "plan")]
    print_rows(f"table of tiles: {len(changed)} of {len(rows)} entries changed", changed, columns, missing="the rule")
