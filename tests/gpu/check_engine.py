"""The engine on a real GPU, in one script: is it right, and how fast. Not collected by pytest (no GPU in CI).

    python tests/gpu/check_engine.py [--only right,fast] [--workloads main,1x512] [--out DIR]

Right: greedy and seeded output equal between graph and eager, for every number of decode steps per visit, with and
without overlap, alone and in a batch; against the fp32 CPU engine it may differ only where two logits nearly tie.
Fast: named workloads on dummy weights of the true shapes. Prints a table last, writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm import LLM, NanoVLLMError, SamplingParams  # noqa: E402
from nanovllm.bench.named import measure_named, parse_workload  # noqa: E402

RESULTS: list[dict] = []


def note(name: str, **facts) -> None:
    RESULTS.append({"name": name, **facts})
    print(name, json.dumps(facts, default=str), flush=True)


def guarded(function):
    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            note(f"{function.__name__}{args[:2]}", error=f"{type(error).__name__}: {error}"[:300])
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    return run


def tiny_model(folder: Path, family: str) -> Path:
    import transformers

    torch.manual_seed(0)
    common = {
        "vocab_size": 512,
        "hidden_size": 384,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "head_dim": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if family.startswith("Deepseek"):  # V3's published sizes of a head; 4 heads, of which a latent serves all
        common |= {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 96}
        common |= {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_group": 4}
        common |= {"topk_group": 2, "initializer_range": 0.1}
    config = getattr(transformers, f"{family}Config")(**common)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder / family)
    return folder / family


@guarded
def check_right(family: str) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (1, 15, 63, 64, 65, 127, 128, 129, 300, 7, 40)]
    prompts += [[*prompts[8][:200], 3, 4, 5]]  # a shared prefix
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    seeded = [SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=i) for i in range(len(prompts))]
    base = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 16, "gpu_memory_utilization": 0.3}

    def outputs(params, some=prompts, **options):
        with LLM(str(folder), **{**base, **options}) as llm:
            result = [out.outputs[0].token_ids for out in llm.generate(some, params, use_tqdm=False)]
            return result, llm.engine.describe()["runs_on"]["attn_backend"]

    with tempfile.TemporaryDirectory() as temp:
        folder = tiny_model(Path(temp), family)
        reference, _ = outputs(greedy, device="cpu", dtype="float32")
        for dtype in ("float32", "bfloat16"):
            first, backend = outputs(greedy, dtype=dtype)
            same = sum(a == b for x, y in zip(first, reference) for a, b in zip(x, y)) / (40 * len(prompts))
            note(f"{family} {dtype} {backend} greedy tokens equal to fp32 CPU", share=round(same, 4))
        for dtype in DTYPES:
            compare_variants(family, dtype, outputs, greedy, seeded)


VARIANTS = {
    "eager": {"enforce_eager": True},
    "decode_steps=1": {"decode_steps": 1},
    "decode_steps=16": {"decode_steps": 16},
    "small chunks": {"max_num_batched_tokens": 64},
    "few blocks": {"num_kvcache_blocks": 12},
    "few blocks, decode_steps=1": {"num_kvcache_blocks": 12, "decode_steps": 1},
    "two at once": {"max_num_seqs": 2},
    "block 16": {"kvcache_block_size": 16},
    "block 256": {"kvcache_block_size": 256},
    "sdpa": {"attn_backend": "sdpa"},
    "flash": {"attn_backend": "flash"},
}
DTYPES = ("float32", "bfloat16")


def compare_variants(family: str, dtype: str, outputs, greedy, seeded) -> None:
    """In fp32 all must be equal. In bf16 graph, eager and decode_steps must be; where shapes of products differ
    (chunks, batches, backends) the last bit does, and a near-tie may fall the other way. Another backend also draws
    with other random numbers."""
    first, _ = outputs(greedy, dtype=dtype)
    drawn, _ = outputs(seeded, dtype=dtype)
    for label, options in VARIANTS.items():
        try:
            again, backend = outputs(greedy, dtype=dtype, **options)
            again_drawn, _ = outputs(seeded, dtype=dtype, **options)
        except NanoVLLMError as error:
            note(f"{family} {dtype} {label}", refused=str(error)[:120])
            continue
        equal = sum(a == b for a, b in zip(first, again))
        equal_drawn = sum(a == b for a, b in zip(drawn, again_drawn))
        note(f"{family} {dtype} {label} ({backend})", greedy_equal=equal, seeded_equal=equal_drawn, of=len(first))


def profile_steps(llm: LLM, prompts, params, name: str) -> None:
    """Where the time goes: kernels by total time, and host time per engine.step."""
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    for i, prompt in enumerate(prompts):
        one = params[i] if isinstance(params, list) else params
        engine.add_request(f"p{name}{i}", [(t + 977) % 10000 for t in prompt], one, final_only=True)
    for _ in range(12):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        began = time.perf_counter()
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    table = prof.key_averages()
    rows = sorted(table, key=lambda row: -row.self_device_time_total)[:14]
    gpu = sum(row.self_device_time_total for row in table) / 1e6
    print(f"profile {name}: wall {wall * 1e3:.1f} ms, gpu busy {gpu * 1e3:.1f} ms")
    for row in rows:
        print(f"   {row.key[:60]:<60} {row.self_device_time_total / 1e3:9.2f} ms {row.count:6d}")
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(6):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)
    for i in range(len(prompts)):
        engine.abort_request(f"p{name}{i}")
    while engine._flights:
        engine.step()


@guarded
def check_fast(model: str, names: list[str], profile: bool = False) -> None:
    """The same as `nanovllm bench workloads`, with a profile."""
    started = time.perf_counter()
    folder = str(ROOT / "benchmarks/models" / model)
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    note(f"{model} start-up", seconds=round(time.perf_counter() - started, 1), **llm.engine.describe()["runs_on"])
    for name in names:
        row = measure_named(llm.engine, name, 0.6, repeat=2 if name.startswith("prefill") else 1)
        note(f"{model} {name}", **{k: v for k, v in row.items() if k != "workload"})
        if profile and not name.startswith("prefill"):
            work, _ = parse_workload(name, 9)
            params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in work.output_lens]
            profile_steps(llm, work.prompts, params, name)
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="right,fast")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--workloads", default="main,1x512,8x512,64x512,64x2048,256x512,prefill 1x1024,prefill 64x1024")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--families", default="Llama,Qwen3")
    args = parser.parse_args()
    if "right" in args.only:
        for family in args.families.split(","):
            check_right(family)
    if "fast" in args.only:
        check_fast(args.model, args.workloads.split(","), profile=args.profile)
    versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    (args.out / "check_engine.json").write_text(json.dumps({**versions, "results": RESULTS}, indent=1, default=str))
    print("\n" + "\n".join(f"{r['name']:<55} { ({k: v for k, v in r.items() if k != 'name'}) }"[:200] for r in RESULTS))


if __name__ == "__main__":
    main()
