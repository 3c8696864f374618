"""Offloaded experts on a GPU: the bits of resident ones, then how near batch-1 decode comes to the link's bound.

    python tests/gpu/check_offload.py --out DIR [--layers 8]          needs a GPU, 23 GB of host memory at 8 layers
    python tests/gpu/check_offload.py --device cpu --tiny             the same path on small shapes, anywhere

A stack of MoE layers in the shapes of Mixtral 8x7B, dummy experts in locked host memory, one token at a time. Which
experts it chooses is made up (cache.Routing: skewed popularity that drifts); a guess about the next layer
is right for an expert with probability --accuracy, squared for the layer after it. Between two layers the GPU is kept
busy for as long as attention and norms of a layer take (--between, us).

The bound is the time the link needs for the experts that were missing: misses x bytes / bandwidth.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from nanovllm.hardware.bandwidth import host_to_device_bandwidth
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.hardware.pinned import HostBlock
from nanovllm.layers.build import Build
from nanovllm.model_config import MoeConfig
from nanovllm.moe.offload import store as store_module
from nanovllm.moe.offload.cache import Routing
from nanovllm.moe.offload.offload import GUESS_LAYERS, Offload, OffloadOptions
from nanovllm.ops.opset import Ops, choose_ops
from tests.moe.offload_rig import ReferenceFiles, fill_places

VARIANTS = {"none": ("none", False), "lru": ("lru", False), "lfu": ("lfu", False), "lfu + prefetch": ("lfu", True)}


@dataclass(frozen=True)
class Case:
    device: Device
    ops: Ops
    moe: MoeConfig
    hidden: int
    dtype: torch.dtype

    def offload(self, options: OffloadOptions, files: ReferenceFiles | None = None) -> Offload:
        build = Build(self.dtype, self.device.torch_device, self.ops, Parallel())
        return Offload(self.moe, self.hidden, build, self.device, options, files)  # type: ignore[arg-type]


def fill(offload: Offload, device: Device) -> None:
    for parts in offload.places().values():
        for place in parts.values():
            place.copy_(torch.empty(place.shape, dtype=place.dtype, device=device.torch_device).uniform_(-1e-2, 1e-2))


def draw_files(case: Case) -> ReferenceFiles:
    files, (hidden, size) = ReferenceFiles(), (case.hidden, case.moe.intermediate_size)
    for layer in range(len(case.moe.layers)):
        for expert in range(case.moe.num_experts):
            for part, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
                files.tensors[f"{layer}.{expert}.{part}"] = torch.empty(shape, dtype=case.dtype).uniform_(-1e-2, 1e-2)
    return files


def check_bits(case: Case) -> int:
    """Random steps against all-resident, for every policy, several sizes of the cache, with room for all experts in
    host memory and for half of them. Number of calls compared."""
    where, num = case.device.torch_device, 0
    files, experts = draw_files(case), range(case.moe.num_experts)
    half = 3 * case.hidden * case.moe.intermediate_size * case.dtype.itemsize * len(experts) * len(case.moe.layers) // 2
    blocks = [
        torch.stack(
            [
                torch.cat([files.tensors[f"{layer}.{e}.{part}"].flatten() for part in ("gate", "up", "down")])
                for e in experts
            ]
        ).to(where)
        for layer in range(len(case.moe.layers))
    ]
    for number, (policy, prefetch) in enumerate(VARIANTS.values()):
        for cached, streaming, host_bytes in ((0, 2, None), (3, 4, None), (16, 3, None), (3, 4, half), (9, 3, half)):
            options = OffloadOptions(cached, streaming, policy, prefetch, False, host_bytes, piece_bytes=1 << 14)
            offload = case.offload(options, files)
            fill_places(offload.store, files)
            gates = [torch.randn(case.moe.num_experts, case.hidden, device=where).to(case.dtype) for _ in blocks]
            offload.watch_gates(gates)
            for num_tokens in (40, 1, 1, 2, 1, 7, 130, 1, 1, 1):
                x = torch.randn(num_tokens, case.hidden, device=where).to(case.dtype)
                for layer, gate in enumerate(gates):
                    ids, weights = case.ops.route(case.ops.linear(x, gate), case.moe.top_k, True)
                    out = offload.experts(layer, case.moe, case.hidden, None)(x, ids, weights)  # type: ignore[arg-type]
                    views = offload.shape.views(blocks[layer])
                    wanted = case.ops.sum_pairs(case.ops.expert_pairs(x, *views, ids, weights))
                    if not torch.equal(out, wanted):
                        raise SystemExit(f"{policy}, {cached} + {streaming} buffers, {num_tokens} tokens: other bits")
                    num += 1
                    x = out * 50
            if cached == 9 and policy != "none" and offload.stats().bytes_saved == 0:
                raise SystemExit(f"{policy}: nothing went back to host memory")
            offload.close()
            torch.manual_seed(number)
    return num


def check_locking(device: Device) -> None:
    """A refusal of the driver is a MemoryError, and no later kernel is blamed for it."""
    block = HostBlock(1 << 20, torch.uint8, device)
    assert block.tensor.is_pinned()
    try:
        block._register(block._registered, 1 << 20)  # type: ignore[arg-type]
    except MemoryError as error:
        print(f"refused as it should be: {error}")
    else:
        raise SystemExit("locked twice")
    assert torch.ones(4, device=device.torch_device).sum().item() == 4
    block.close()


class Guesses:
    """Stands in for the next layer's router: tells the ids that the routing made up, mostly. `route` of the operators
    is asked for nothing else here."""

    def __init__(self, accuracy: float, num_experts: int, device: torch.device) -> None:
        self.accuracy, self.num_experts = accuracy, num_experts
        self.draw = random.Random(0)
        self.device = device
        self.queue: list[torch.Tensor] = []

    def prepare(self, tokens: list[list[list[int]]]) -> None:
        """Known ahead, so that making them up costs no time later."""
        asked = [range(i + 1, min(i + 1 + GUESS_LAYERS, len(tokens[0]))) for i in range(len(tokens[0]) - 1)]
        flat = [
            self._guess(layers[later], self.accuracy ** (n + 1))
            for layers in tokens
            for ahead in asked
            for n, later in enumerate(ahead)
        ]
        guesses = torch.tensor(flat, dtype=torch.int32).to(self.device)
        self.queue = list(guesses.split([len(ahead) for _ in tokens for ahead in asked]))

    def _guess(self, chosen: list[int], accuracy: float) -> list[int]:
        others = [expert for expert in range(self.num_experts) if expert not in chosen]
        self.draw.shuffle(others)
        return [expert if self.draw.random() < accuracy else others.pop() for expert in chosen]

    def route(self, logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self.queue.pop(0), logits


def measure(case: Case, offload: Offload, tokens: list[list[list[int]]], between: int) -> dict[str, float]:
    """Decode `tokens` after a tenth of them as warm-up."""
    device, where = case.device, case.device.torch_device
    layers = [offload.experts(i, case.moe, case.hidden, None) for i in range(len(case.moe.layers))]  # type: ignore[arg-type]
    ids = torch.tensor(tokens, dtype=torch.int32).to(where)[:, :, None]  # [tokens, layers, 1, top_k]
    rows = [[*row.unbind(0)] for row in ids.unbind(0)]
    x = torch.randn(1, case.hidden, device=where).to(case.dtype)
    weights = torch.full((1, case.moe.top_k), 1 / case.moe.top_k, device=where)
    warm = len(tokens) // 10
    start, earlier = 0.0, offload.stats()
    for number, row in enumerate(rows):
        if number == warm:
            device.synchronize()
            start, earlier = time.perf_counter(), offload.stats()
        for layer, chosen in zip(layers, row):
            if between and device.is_gpu:
                torch.cuda._sleep(between)
            layer(x, chosen, weights)
    device.synchronize()
    seconds = time.perf_counter() - start
    stats = offload.stats() - earlier
    num_layers = (len(rows) - warm) * len(layers)
    return {
        "us_per_layer": seconds / num_layers * 1e6,
        "missed_bytes_per_layer": stats.misses * offload.shape.num_bytes / num_layers,
        "hit_rate": stats.hit_rate,
        "stall_share": stats.stall_seconds / seconds,
        "copied_bytes_per_layer": stats.bytes_copied / num_layers,
        "prefetch_precision": stats.prefetch_precision,
    }


def open_stack(case: Case, options: OffloadOptions, source: Offload | None) -> Offload:
    """One copy of the experts serves all variants: locking 22 GB for each would take most of the time."""
    if source is None:
        offload = case.offload(options)
        fill(offload, case.device)
        return offload
    reserve = store_module.ExpertStore._reserve
    store_module.ExpertStore._reserve = lambda self, device, host_bytes, quotas: None  # type: ignore[method-assign]
    try:
        offload = case.offload(options)
    finally:
        store_module.ExpertStore._reserve = reserve  # type: ignore[method-assign]
    offload.store._blocks, offload.store.held = source.store._blocks, source.store.held
    offload.cache.held, offload.cache.num_blocks = source.store.held, source.store.num_blocks
    offload.idle = type(offload.idle)(offload.stream, source.idle._bandwidth, source.idle._piece_bytes)
    return offload


def sleep_cycles(microseconds: float) -> int:
    """For torch.cuda._sleep, whose clock differs from card to card."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(10_000_000)
    stop.record()
    stop.synchronize()
    return int(10_000_000 * microseconds / (start.elapsed_time(stop) * 1e3))


def run(case: Case, args: argparse.Namespace) -> list[dict[str, object]]:
    routing = Routing(case.moe.num_experts, case.moe.top_k, skew=args.skew)
    tokens = list(islice(routing.tokens(args.layers, seed=1), args.tokens))
    link = host_to_device_bandwidth(case.device, 10**7 if args.tiny else 256 * 10**6)
    between = sleep_cycles(args.between) if case.device.is_gpu else 0
    print(f"link {link / 1e9:.1f} GB/s, {len(tokens)} tokens, {args.layers} layers", flush=True)
    results: list[dict[str, object]] = []
    source: Offload | None = None
    gates = [torch.zeros(case.moe.num_experts, case.hidden, dtype=case.dtype, device=case.device.torch_device)]
    for cached in args.cached:
        for name, (policy, prefetch) in VARIANTS.items():
            options = OffloadOptions(cached * args.layers, 2 * case.moe.top_k, policy, prefetch)
            guesses = Guesses(args.accuracy, case.moe.num_experts, case.device.torch_device)
            guesses.prepare(tokens)
            offload = open_stack(replace(case, ops=replace(case.ops, route=guesses.route)), options, source)
            source = source or offload
            offload.watch_gates(gates * args.layers)
            found = measure(case, offload, tokens, between)
            bound = found["missed_bytes_per_layer"] / link * 1e6
            found |= {"bound_us": bound, "share": bound / found["us_per_layer"]}
            print(
                f"{cached} of {case.moe.num_experts} cached, {name:15s} {found['us_per_layer']:8.0f} us a layer, "
                f"hits {found['hit_rate']:.2f}, bound {bound:6.0f} us = {found['share']:.1%}, "
                f"stall {found['stall_share']:.0%}, prefetch precision {found['prefetch_precision']:.2f}",
                flush=True,
            )
            results.append({"cached": cached, "variant": name, **{k: round(v, 4) for k, v in found.items()}})
            if offload is not source:
                offload.stream.synchronize()
                offload.store._blocks, offload.store.held = [], []
                offload.close()
            del offload
    if source is not None:
        source.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--cached", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--accuracy", type=float, default=0.8, help="of the guess about the next layer")
    parser.add_argument("--between", type=float, default=100.0, help="us of other work between two layers")
    parser.add_argument("--skew", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file")
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    device = Device.choose(args.device)
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    ops = choose_ops(device.is_gpu, dtype)
    small = Case(device, ops, MoeConfig(8, 2, 128, True, (True,) * 2), 128, dtype)
    if device.is_gpu:
        check_locking(device)
    print(f"{check_bits(small)} calls have the bits of resident experts ({device.name})", flush=True)
    size, hidden = (256, 128) if args.tiny else (14336, 4096)
    case = Case(device, ops, MoeConfig(8, 2, size, True, (True,) * args.layers), hidden, dtype)
    results = run(case, args)
    if args.out is not None:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "device": device.name,
            "torch": torch.__version__,
            "layers": args.layers,
            "results": results,
        }
        (args.out / "check_offload.json").write_text(json.dumps(record, indent=1))
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
