"""Experts in fewer bits on a GPU: `python tests/gpu/check_experts.py [--parts engine,kernels] [--out DIR]`.

    engine    the trained tiny Mixtral, quantised while it is loaded, and tiny models whose files have fewer bits:
              offloaded engines write the tokens of resident ones with the same logprobs, graphs write nearly these; a
              file's are near those of its expanded numbers
    kernels   us of one layer's experts: 16 bits, 8-bit floats with scales of rows and of blocks, integers of 4 bits;
              share of the card's limit

Kernels against their twins: `check_moe.py --only bits`. JSON goes to --out. What offloaded experts move, and
tok/s: `nanovllm bench moe --parts offload --model benchmarks/models/mixtral-8x7b --load-format dummy --num-layers 16`,
with and without `--quantization fp8` or `int4`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanovllm import LLM, SamplingParams
from nanovllm.bench.kernels import replay_seconds
from nanovllm.bench.moe_kernels import MIXTRAL, QWEN3_30B, KernelShape, MoeLab, measure_limits
from nanovllm.hardware.device import Device
from nanovllm.memory.budget import GIB
from nanovllm.weights.expert_form import ExpertIntegers
from tests.moe.experts8 import BLOCK_FILE, FILES4, MODELS, MODELS4
from tests.weights.quantised_samples import write_folders

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny-mixtral"
DEEPSEEK_V3 = KernelShape("DeepSeek-V3", 7168, 2048, 256, 8)
FORMS: dict[str, dict[str, Any]] = {
    "16 bits": {},
    "8 bits by row": {"scale_block": 0},
    "8 bits by block": {"scale_block": 128},
    "int4-128": {"integers": ExpertIntegers((4, 128), (4, 128))},
    "int4-32": {"integers": ExpertIntegers((4, 32), (4, 32))},
}
DECODE_TOKENS, PREFILL_TOKENS = (1, 2, 4, 8, 16, 64), (512, 2048, 8192)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + size))} for size in (1, 3, 17, 70)]
MOST_APART = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def answers(path: Path, **options: Any) -> tuple[list[Any], int]:
    """(tokens and logprobs, bytes of an expert if offloaded)"""
    settings = {"max_num_seqs": 8, "num_kvcache_blocks": 64, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.5}
    with LLM(str(path), **{**settings, **options}) as llm:
        found = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        return found, llm.engine.describe()["runs_on"].get("experts", {}).get("expert_bytes", 0)


def check_engines(path: Path, name: str, **options: Any) -> list[Any]:
    """Kernel by kernel the rows are the same wherever the experts are. A captured step has rows more, for which cuBLAS
    may take another kernel (float16): its last bits may differ."""
    resident, _ = answers(path, enforce_eager=True, **options)
    captured, _ = answers(path, **options)
    _, size = answers(path, expert_placement="offload", **options)
    assert all(math.isfinite(number) for number in logprobs(resident)), f"{name}: not finite"
    for cached in (4, 9, 20):
        for more in ({}, {"enforce_eager": True}, {"expert_host_gb": 0}):
            room = {"expert_placement": "offload", "expert_cache_gb": (cached + 0.5) * size / GIB}
            found, _ = answers(path, **options, **room, **more)
            assert found == resident, (
                f"{name}, {cached} buffers, {more}: other tokens or logprobs than resident, {apart(found, resident)}"
            )
    same, difference = apart(captured, resident)
    print(
        f"{name}: offloaded experts of {size} bytes give the bits of resident ones; captured {same:.0%} of the tokens, "
        f"logprobs {difference:.1e} apart",
        flush=True,
    )
    assert same > 0.9, "more than a near tie"
    assert difference < MOST_APART[options["dtype"]], "more than last bits"
    return resident


def logprobs(found: list[Any]) -> list[float]:
    return [entry.logprob for _, steps in found for step in steps for entry in step.values()]


def apart(found: list[Any], others: list[Any]) -> tuple[float, float]:
    """(share of the tokens before the first that differs, how far their logprobs are apart at most)."""
    same, total, most = 0, 0, 0.0
    for (tokens, steps), (other_tokens, other_steps) in zip(found, others):
        first = next((i for i, (a, b) in enumerate(zip(tokens, other_tokens)) if a != b), len(tokens))
        same, total = same + first, total + len(tokens)
        for token, step, other in zip(tokens[:first], steps, other_steps):
            most = max(most, abs(step[token].logprob - other[token].logprob))
    return same / total, most


def check_engine() -> None:
    for dtype, kind in itertools.product(("float16", "bfloat16"), ("int4", "fp8", "int8")):
        check_engines(TINY, f"tiny-mixtral {dtype} {kind}", quantization=kind, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        for name, (family, sizes) in MODELS.items():
            target = Path(folder) / name
            target.mkdir()
            small, plain = write_folders(target, family, sizes, BLOCK_FILE)
            found = check_engines(small, f"{name} in blocks", dtype="float32")
            expected, _ = answers(plain, dtype="float32")
            same = sum(a == b for (x, _), (y, _) in zip(found, expected) for a, b in zip(x, y))
            total = sum(len(x) for x, _ in found)
            print(f"{name}: {same} of {total} tokens are those of the expanded numbers", flush=True)
            assert same > 0.9 * total, "more than a near tie"
        for name, (family, sizes) in MODELS4.items():
            target = Path(folder) / f"{name}-awq"
            target.mkdir()
            small, _ = write_folders(target, family, sizes, FILES4["awq"])
            check_engines(small, f"{name} in AWQ", dtype="bfloat16")


def time_kernels(forms: list[str], num_shapes: int) -> list[dict[str, Any]]:
    device, rows = Device.choose("cuda"), []
    limits = measure_limits(device, torch.bfloat16)
    for shape in (MIXTRAL, QWEN3_30B, DEEPSEEK_V3)[:num_shapes]:
        for form in forms:
            lab = MoeLab(device, shape, torch.bfloat16, **FORMS[form])
            for tokens in (*DECODE_TOKENS, *PREFILL_TOKENS):
                calls = lab.calls(tokens, "uniform")[: 4 if tokens > 64 else None]
                seconds = replay_seconds([lab.whole(call) for call in calls], device)
                distinct = sum(call.num_distinct for call in calls) / len(calls)
                read = distinct * lab.expert_bytes / seconds / limits["bytes_per_second"]
                flops = 2 * tokens * shape.top_k * shape.parameters / seconds / limits["flops"]
                row = {"model": shape.name, "form": form, "tokens": tokens, "us": seconds * 1e6}
                rows.append({**row, "share_of_bandwidth": read, "share_of_flops": flops})
                print(
                    f"{shape.name:15s} {form:16s} {tokens:5d} tokens {seconds * 1e6:9.1f} us  {read:4.0%} {flops:4.0%}"
                )
            del lab
            device.release_cached()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="engine,kernels")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--shapes", type=int, default=3, help="so many of Mixtral, Qwen3-30B-A3B, DeepSeek-V3")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    parts = args.parts.split(",")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    if "engine" in parts:
        check_engine()
    if "kernels" in parts:
        found["kernels"] = time_kernels(args.forms.split(","), args.shapes)
    (args.out / "check_experts.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
