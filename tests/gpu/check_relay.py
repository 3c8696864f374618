"""Offloaded experts in the engine on a real GPU: the tokens of resident ones, and how near a step comes to the bound.

    python tests/gpu/check_relay.py [--out DIR] [--layers 8] [--cached 2 4 6]

Right: tiny-mixtral resident, offloaded with captured pieces, offloaded kernel by kernel; 1, 2, 3 and 4 sequences, fp32
and bf16, several sizes of cache: equal tokens. Fast: Mixtral 8x7B's shapes with fewer layers and made-up weights
(routers are drawn so that choices spread as a trained model's do), one sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.hardware.bandwidth import host_to_device_bandwidth  # noqa: E402
from nanovllm.moe.layer import MoeLayer  # noqa: E402

FIXTURE = ROOT / "tests/fixtures/tiny-mixtral"
PROMPTS = ["The state of our union", "My fellow Americans, this", "We", "Tonight I want to"]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=32, ignore_eos=True)


def tokens(dtype: str, **options) -> list[list[int]]:
    llm = LLM(str(FIXTURE), dtype=dtype, gpu_memory_utilization=0.2, max_num_seqs=8, **options)
    found = []
    for params in (GREEDY, SEEDED):
        for count in (1, 2, 3, 4):
            outputs = llm.generate(PROMPTS[:count], params, use_tqdm=False)
            found += [output.outputs[0].token_ids for output in outputs]
    llm.close()
    return found


def check_right() -> list[dict]:
    rows = []
    for dtype in ("float32", "bfloat16"):
        expected = tokens(dtype)
        bytes_each = 3 * 128 * 256 * (4 if dtype == "float32" else 2)
        for buffers, more in ((2, {}), (6, {}), (12, {"expert_policy": "lru"}), (40, {}), (12, {"enforce_eager": True})):
            options = {"expert_placement": "offload", "expert_cache_gb": buffers * bytes_each * 1.001 / 2**30, **more}
            equal = sum(a == b for a, b in zip(tokens(dtype, **options), expected))
            rows.append({"dtype": dtype, "slots": buffers, **more, "equal": equal, "of": len(expected)})
            print(json.dumps(rows[-1]), flush=True)
    assert all(row["equal"] == row["of"] for row in rows)
    return rows


def spread_routing(model, seed: int = 0) -> None:
    """Made-up weights make all routers alike and the norms tiny. Here logits have a spread of about 1.5 a token."""
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    for layer in model.layers:
        if isinstance(layer.mlp, MoeLayer):
            layer.mlp_norm.weight.data.fill_(1.0)
            gate = layer.mlp.gate.weight
            gate.data.normal_(0.0, 1.5 / gate.shape[1] ** 0.5, generator=generator)


def measure(folder: str, cached: int, layers: int, link: float, **options) -> dict:
    expert_bytes = 3 * 4096 * 14336 * 2
    buffers = cached * layers + 4
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        expert_placement="offload",
        expert_cache_gb=buffers * expert_bytes * 1.0001 / 2**30,
        **options,
    )
    engine = llm.engine
    spread_routing(engine.executor.runner.model)
    engine.executor.offload.watch_gates(engine.executor.runner.model.router_weights())
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=72, ignore_eos=True)
    engine.add_request("0", {"prompt_token_ids": list(range(3, 67))}, params)
    produced, began = 0, 0.0
    while engine.has_unfinished_requests():
        for delta in engine.step():
            produced += len(delta.outputs[0].token_ids)
        if produced == 8:
            torch.cuda.synchronize()
            began, before = time.perf_counter(), engine.executor.expert_stats()
    seconds = time.perf_counter() - began
    stats = engine.executor.expert_stats() - before
    llm.close()
    num = produced - 8
    bound = stats.misses * expert_bytes / link / num
    return {
        "cached": cached,
        **options,
        "layers": layers,
        "ms_per_token": seconds / num * 1e3,
        "us_per_layer": seconds / num / layers * 1e6,
        "bound_ms": bound * 1e3,
        "share": bound / (seconds / num),
        "hit_rate": stats.hit_rate,
        "stall_share": stats.stall_seconds / seconds,
        "prefetch_precision": stats.prefetch_precision,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cached", type=int, nargs="*", default=[2, 4, 6])
    parser.add_argument("--variants", default="prefetch,lfu,eager")
    args = parser.parse_args()
    right = check_right()
    from nanovllm.hardware.device import Device

    link = host_to_device_bandwidth(Device.choose("auto"), 256 * 10**6)
    variants = {"prefetch": {}, "lfu": {"expert_prefetch": False}, "eager": {"enforce_eager": True}}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((ROOT / "benchmarks/models/mixtral-8x7b/config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps({**config, "num_hidden_layers": args.layers}))
        for cached in args.cached:
            for name in args.variants.split(","):
                rows.append(measure(folder, cached, args.layers, link, **variants[name]))
                shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}
                print(json.dumps(shown), flush=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "link": link}
    (args.out / "check_relay.json").write_text(json.dumps({**facts, "right": right, "fast": rows}, indent=1))


if __name__ == "__main__":
    main()
