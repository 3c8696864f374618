"""Offloaded experts on a GPU have the bits and the tokens of resident ones: `python tests/gpu/check_offload.py`.

Layers alone: random calls for every policy, several sizes of the cache, with room for all experts in host memory and
for half of them. The engine: tiny-mixtral resident, offloaded with captured segments, offloaded kernel by kernel; 1, 2,
3 and 4 sequences, fp32 and bf16, several sizes of cache. With --device cpu the layers alone, anywhere. How near decode
comes to what the link allows: `nanovllm bench moe`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.hardware.device import Device  # noqa: E402
from nanovllm.hardware.parallel import Parallel  # noqa: E402
from nanovllm.hardware.pinned import HostBlock  # noqa: E402
from nanovllm.layers.build import Build  # noqa: E402
from nanovllm.model_config import MoeConfig  # noqa: E402
from nanovllm.moe.offload.offload import Offload, OffloadOptions  # noqa: E402
from nanovllm.ops.opset import Ops, choose_ops  # noqa: E402
from tests.moe.offload_rig import ReferenceFiles, fill_places  # noqa: E402

FIXTURE = ROOT / "tests/fixtures/tiny-mixtral"
VARIANTS = (("none", False), ("lru", False), ("lfu", False), ("lfu", True))  # policy, prefetch
PARTS = ("gate", "up", "down")
PROMPTS = ["The state of our union", "My fellow Americans, this", "We", "Tonight I want to"]


@dataclass(frozen=True)
class Case:
    device: Device
    ops: Ops
    moe: MoeConfig
    hidden: int
    dtype: torch.dtype

    def offload(self, options: OffloadOptions, files: ReferenceFiles) -> Offload:
        build = Build(self.dtype, self.device.torch_device, self.ops, Parallel())
        offload = Offload(self.moe, self.hidden, build, self.device, options, files)  # type: ignore[arg-type]
        fill_places(offload.store, files)
        return offload

    def draw_files(self) -> ReferenceFiles:
        files, (hidden, size) = ReferenceFiles(), (self.hidden, self.moe.intermediate_size)
        for layer in range(len(self.moe.layers)):
            for expert in range(self.moe.num_experts):
                for part, shape in zip(PARTS, ((size, hidden), (size, hidden), (hidden, size))):
                    numbers = torch.empty(shape, dtype=self.dtype).uniform_(-1e-2, 1e-2)
                    files.tensors[f"{layer}.{expert}.{part}"] = numbers
        return files


def check_bits(case: Case) -> int:
    """Number of calls compared."""
    where, num, num_layers = case.device.torch_device, 0, len(case.moe.layers)
    files, experts = case.draw_files(), range(case.moe.num_experts)
    half = 3 * case.hidden * case.moe.intermediate_size * case.dtype.itemsize * len(experts) * num_layers // 2
    blocks = []
    for layer in range(num_layers):
        rows = [torch.cat([files.tensors[f"{layer}.{e}.{part}"].flatten() for part in PARTS]) for e in experts]
        blocks.append(torch.stack(rows).to(where))
    for number, (policy, prefetch) in enumerate(VARIANTS):
        for cached, streaming, host_bytes in ((0, 2, None), (3, 4, None), (16, 3, None), (3, 4, half), (9, 3, half)):
            options = OffloadOptions(cached, streaming, policy, prefetch, False, host_bytes, piece_bytes=1 << 14)
            offload = case.offload(options, files)
            gates = [torch.randn(case.moe.num_experts, case.hidden, device=where).to(case.dtype) for _ in blocks]
            offload.watch_gates(gates)
            for num_tokens in (40, 1, 1, 2, 1, 7, 130, 1, 1, 1):
                x = torch.randn(num_tokens, case.hidden, device=where).to(case.dtype)
                for layer, gate in enumerate(gates):
                    ids, weights = case.ops.route(case.ops.linear(x, gate), case.moe.top_k, True)
                    out = offload.compute(layer, x, ids, weights)
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
    """A refusal of the driver is a MemoryError, and no later kernel reports it as its own error."""
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


def tokens(folder: Path, dtype: str, **options: Any) -> list[list[int]]:
    """Greedy and seeded answers to 1, 2, 3 and 4 prompts."""
    llm, found = LLM(str(folder), dtype=dtype, gpu_memory_utilization=0.2, max_num_seqs=8, **options), []
    for temperature, seed in ((0, None), (0.8, 5)):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=32, ignore_eos=True)
        for count in (1, 2, 3, 4):
            found += [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:count], params, use_tqdm=False)]
    llm.close()
    return found


def check_tokens(folder: Path, variants: list[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """`variants`: expert_cache_gb of float32 experts, other options."""
    rows = []
    for dtype, share in (("float32", 1.0), ("bfloat16", 0.5)):
        expected = tokens(folder, dtype)
        for gb, more in variants:
            found = tokens(folder, dtype, expert_placement="offload", expert_cache_gb=gb * share, **more)
            equal = sum(a == b for a, b in zip(found, expected))
            rows.append({"dtype": dtype, "cache_gb": gb * share, **more, "equal": equal, "of": len(expected)})
            print(json.dumps(rows[-1]), flush=True)
    assert all(row["equal"] == row["of"] for row in rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    device = Device.choose(parser.parse_args().device)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    case = Case(device, choose_ops(device.is_gpu, dtype), MoeConfig(8, 2, 128, True, (True,) * 2), 128, dtype)
    print(f"{check_bits(case)} calls have the bits of resident experts ({device.name})", flush=True)
    if device.is_gpu:
        check_locking(device)
        expert_gb = 3 * 128 * 256 * 4 * 1.001 / 2**30
        more = [(2, {}), (6, {}), (12, {"expert_policy": "lru"}), (40, {}), (12, {"enforce_eager": True})]
        check_tokens(FIXTURE, [(buffers * expert_gb, options) for buffers, options in more])


if __name__ == "__main__":
    main()
