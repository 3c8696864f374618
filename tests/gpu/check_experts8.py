"""Experts in 8-bit floats on a GPU: `python tests/gpu/check_experts8.py [--parts engine,kernels,link] [--out DIR]`.

    engine    the trained tiny Mixtral, quantised while it is loaded, and tiny models whose files have blocks: resident
              and offloaded engines, with and without graphs, write the same tokens with the same logprobs; a file's are
              near those of its expanded numbers
    kernels   us of one layer's experts: 16 bits, 8 bits with scales of rows and of blocks; share of the card's limit
    link      bytes that offloaded experts of Mixtral's shapes move a token, and tok/s, 16 against 8 bits (8 layers)

Kernels against their twins: `check_moe.py --only "8 bits"`. JSON goes to --out.
"""

from __future__ import annotations

import argparse
import json
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
from tests.moe.experts8 import BLOCK_FILE, MODELS
from tests.weights.quantised_samples import write_folders

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny-mixtral"
DEEPSEEK_V3 = KernelShape("DeepSeek-V3", 7168, 2048, 256, 8)
FORMS = {"16 bits": None, "8 bits by row": 0, "8 bits by block": 128}
DECODE_TOKENS, PREFILL_TOKENS = (1, 2, 4, 8, 16, 64), (512, 2048, 8192)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + size))} for size in (1, 3, 17, 70)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def answers(path: Path, **options: Any) -> tuple[list[Any], int]:
    """(tokens and logprobs, bytes of an expert if offloaded)"""
    settings = {"max_num_seqs": 8, "num_kvcache_blocks": 64, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.5}
    with LLM(str(path), **{**settings, **options}) as llm:
        found = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        return found, llm.engine.describe()["runs_on"].get("experts", {}).get("expert_bytes", 0)


def check_engines(path: Path, name: str, **options: Any) -> list[Any]:
    resident, _ = answers(path, **options)
    _, size = answers(path, expert_placement="offload", **options)
    for cached in (4, 9, 20):
        for more in ({}, {"enforce_eager": True}, {"expert_host_gb": 0}):
            room = {"expert_placement": "offload", "expert_cache_gb": (cached + 0.5) * size / GIB}
            found, _ = answers(path, **options, **room, **more)
            assert found == resident, f"{name}, {cached} buffers, {more}: other tokens or logprobs than resident"
    print(f"{name}: offloaded experts of {size} bytes give the bits of resident ones", flush=True)
    return resident


def check_engine() -> None:
    for dtype in ("bfloat16", "float16"):
        check_engines(TINY, f"tiny-mixtral {dtype}", quantization="fp8", dtype=dtype)
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


def time_kernels() -> list[dict[str, Any]]:
    device, rows = Device.choose("cuda"), []
    limits = measure_limits(device, torch.bfloat16)
    for shape in (MIXTRAL, QWEN3_30B, DEEPSEEK_V3):
        for form, block in FORMS.items():
            lab = MoeLab(device, shape, torch.bfloat16, block)
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


def time_link() -> list[dict[str, Any]]:
    """Half of the experts cached; made-up weights and routers."""
    config = json.loads((ROOT / "benchmarks/models/mixtral-8x7b/config.json").read_text())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
        for form in ("none", "fp8"):
            size = 3 * 4096 * 14336 * (1 if form == "fp8" else 2) + 131072 * (form == "fp8")
            options = {"load_format": "dummy", "quantization": form, "expert_placement": "offload"}
            options |= {"expert_cache_gb": (8 * 4 + 4) * size / GIB, "skip_tokenizer_init": True, "max_num_seqs": 1}
            with LLM(folder, **options, max_model_len=512, enable_prefix_caching=False) as llm:
                llm.engine.executor.probe().spread_routing(0)
                params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
                llm.generate([{"prompt_token_ids": [5, 9, 2]}], params, use_tqdm=False)
                before = llm.engine.executor.expert_stats()
                [output] = llm.generate([{"prompt_token_ids": [7, 1, 3]}], params, use_tqdm=False)
                stats = llm.engine.executor.expert_stats() - before
                seconds = output.metrics.finished_time - output.metrics.first_token_time
            rate = 63 / seconds
            rows.append({"form": form, "tok_s": rate, "hit_rate": stats.hit_rate, "bytes": stats.bytes_per_token})
            print(
                f"{form:5s} {rate:6.2f} tok/s, {stats.hit_rate:.1%} hits, {stats.bytes_per_token / 1e9:.2f} GB a token"
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="engine,kernels,link")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    parts, found = args.parts.split(","), {"device": torch.cuda.get_device_name()}
    if "engine" in parts:
        check_engine()
    for part, measure in (("kernels", time_kernels), ("link", time_link)):
        if part in parts:
            found[part] = measure()
    (args.out / "check_experts8.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
