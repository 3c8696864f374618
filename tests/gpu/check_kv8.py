"""A KV cache in 8-bit floats (e4m3) on a real GPU. Not collected by pytest (no GPU in CI).

    python tests/gpu/check_kv8.py [--parts kernels,engine] [--out DIR]

Kernels: every byte read by shifts and by the card's instruction, numbers written, and qk_norm_rope, decode and prefill
attention against their plain twins with the same bytes. Engine: tiny models with kv_cache_dtype="fp8" against
themselves in captured and eager steps, small chunks, few blocks (preemption) and prefix hits: how many greedy tokens
are the same before the first that differs, and how far their logprobs are apart. Against a cache of the model's dtype:
the same, and of a trained model the mean difference of the logprobs of first tokens.
Prints a table last, writes JSON; exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import itertools
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
import triton  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.ops import kv_cache, qk_norm_rope, rotary  # noqa: E402
from nanovllm.ops.attention import paged_attention_reference  # noqa: E402
from nanovllm.ops.triton import decode_attention as decode  # noqa: E402
from nanovllm.ops.triton import prefill_attention as prefill  # noqa: E402
from nanovllm.ops.triton import qk_norm_rope as triton_rope  # noqa: E402
from nanovllm.ops.triton.common import capability  # noqa: E402
from nanovllm.ops.triton.e4m3 import BY_CARD, BY_SHIFTS  # noqa: E402
from tests.gpu.check_engine import tiny_model  # noqa: E402
from tests.ops.e4m3_kernels import read_kernel, write_kernel  # noqa: E402
from tests.ops.kernel_rig import paged_cache  # noqa: E402

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 5e-5}  # an H200: at most 3.2e-5
SCALES = (0.07, 0.0003)
RESULTS: list[dict] = []


def check(name: str, passed: bool, **facts) -> None:
    RESULTS.append({"name": name, "passed": bool(passed), **facts})
    print("ok    " if passed else "FAILED", name, json.dumps(facts, default=str), flush=True)


def guarded(function):
    def run(*args):
        try:
            function(*args)
        except Exception as error:
            traceback.print_exc()
            check(f"{function.__name__}{args}", False, error=f"{type(error).__name__}: {error}"[:300])

    return run


# ---- kernels ----------------------------------------------------------------------------------------------


@guarded
def check_conversions() -> None:
    every = torch.arange(256, device=DEVICE).to(torch.uint8)
    forms = {"shifts": BY_SHIFTS}
    if capability(every.device) >= (8, 9):
        forms["card"] = BY_CARD
    for dtype, (name, form) in itertools.product(DTYPES, forms.items()):
        out = torch.empty(256, dtype=dtype, device=DEVICE)
        read_kernel[(1,)](every, out, form)
        expected = every.view(torch.float8_e4m3fn).to(dtype)
        same = (out == expected) | (out.isnan() & expected.isnan())
        check(f"read by {name}, {dtype}", same.all(), wrong=int((~same).sum()))
    bits = torch.randint(-(2**31), 2**31, (10_000_000,), device=DEVICE).to(torch.int32).view(torch.float32)
    x = torch.cat((bits, torch.randn(10_000_000, device=DEVICE) * torch.randn(10_000_000, device=DEVICE).mul(4).exp()))
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    write_kernel[(triton.cdiv(len(x), 1024),)](x, out, len(x), 1024)
    wrong = (out != kv_cache.round_kv(x, torch.uint8)) & ~x.isnan()
    check("20 million numbers written", not wrong.any(), wrong=int(wrong.sum()))


def stored_cache(lens, block_size, head_dim):
    """(bytes, the same as numbers, context_lens, tables); slots without a key are NaN."""
    k, v, *rest = paged_cache(lens, block_size, 2, head_dim, torch.float32, False, DEVICE)
    stored = []
    for x, scale in ((k * 3, SCALES[0]), (v * 0.02, SCALES[1])):
        rounded = kv_cache.round_kv(x / scale, torch.uint8)
        stored.append(torch.where(x.isnan(), torch.full_like(rounded, 0x7F), rounded))
    return stored, [kv_cache.expand_kv(x, torch.float32) * scale for x, scale in zip(stored, SCALES)], rest


@guarded
def check_attention(dtype: torch.dtype, head_dim: int, block_size: int, window: int | None) -> None:
    lens = [0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 257, 1000, 2049, 0]
    scales = torch.tensor(SCALES, device=DEVICE)
    stored, numbers, rest = stored_cache(lens, block_size, head_dim)
    what = f"{dtype} head {head_dim} block {block_size} window {window}"
    q = torch.randn(len(lens), 6, head_dim, device=DEVICE).to(dtype)
    expected = paged_attention_reference(q.float(), *numbers, torch.arange(len(lens) + 1), *rest, 0.1, window)
    for splits in (1, 4, 17):
        launch = decode.fit_launch(decode.DecodeLaunch(splits), head_dim, q.element_size(), capability(q.device))
        got = decode.decode_attention(q, *stored, *rest, 0.1, launch, window, scales=scales)
        report(f"decode {what}, {splits} splits", got, expected, dtype)
    new = [min(n, 100) if i % 2 else n for i, n in enumerate(lens)]
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=DEVICE)
    q = torch.randn(sum(new), 6, head_dim, device=DEVICE).to(dtype)
    expected = paged_attention_reference(q.float(), *numbers, starts, *rest, 0.1, window)
    report(
        f"prefill {what}",
        prefill.prefill_attention(q, *stored, starts, *rest, 0.1, window, scales=scales),
        expected,
        dtype,
    )


def report(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((got.float() - expected).abs().max()) / 0.02  # of values of about that size
    check(name, error < TOLERANCE[dtype], error=error)


@guarded
def check_rope(dtype: torch.dtype, num_tokens: int) -> None:
    num_q, num_kv, dim = 16, 8, 128
    qkv = torch.randn(num_tokens, (num_q + 2 * num_kv) * dim, device=DEVICE).to(dtype)
    norms = tuple(torch.randn(dim, device=DEVICE).to(dtype) for _ in range(2))
    table, positions = torch.randn(500, dim, device=DEVICE), torch.randint(0, 500, (num_tokens,), device=DEVICE)
    slots, scales = torch.randperm(20 * 64, device=DEVICE)[:num_tokens], torch.tensor([0.37, 0.011], device=DEVICE)
    both, twins = (
        [torch.zeros(20, 64, num_kv, dim, dtype=torch.uint8, device=DEVICE) for _ in range(2)] for _ in range(2)
    )
    triton_rope.qk_norm_rope(qkv, norms, 1e-6, table, positions, *both, slots, num_q, scales=scales)
    weights, angles = tuple(norm.float() for norm in norms), rotary.gather_angles(table, positions)
    qk_norm_rope.qk_norm_rope(qkv.float(), weights, 1e-6, angles, None, *twins, slots, num_q, scales)
    tipped = [float((a != b).float().mean()) for a, b in zip(both, twins)]
    # Keys may differ in fp32's last bit before they are rounded; values are only divided.
    check(f"rope writes, {dtype}, {num_tokens} tokens", tipped[0] < 1e-3 and tipped[1] == 0, other_bytes=tipped)


# ---- the engine -------------------------------------------------------------------------------------------

BASE = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 16, "gpu_memory_utilization": 0.3}
VARIANTS = {
    "eager": {"enforce_eager": True},
    "decode_steps=1": {"decode_steps": 1},
    "small chunks": {"max_num_batched_tokens": 64},
    "few blocks": {"num_kvcache_blocks": 12},
    "block 16": {"kvcache_block_size": 16},
}
LEAST = {"eager": 0.95, "decode_steps=1": 0.95, "small chunks": 0.95, "few blocks": 0.95, "block 16": 0.7}  # of tokens
PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)
TRAINED = ROOT / "tests/fixtures/tiny-mixtral"


def generate(folder: Path, prompts: list[list[int]], again: bool = False, **options) -> tuple[list, dict]:
    with LLM(str(folder), **{**BASE, **options}) as llm:
        # The first step sets the scales: the same prompt in every engine, whatever the size of its chunks.
        llm.generate([prompts[0][:40]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        if again:
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        facts = dict(llm.engine.describe()["runs_on"])
        facts["preemptions"] = llm.engine.scheduler.num_preemptions
        facts["cached"] = sum(output.num_cached_tokens for output in outputs)
        return outputs, facts


def agreement(some: list, others: list) -> tuple[float, float]:
    """(share of tokens before the first that differs, the largest difference of their logprobs)."""
    same, apart = 0, 0.0
    for one, other in zip(some, others):
        a, b = one.outputs[0], other.outputs[0]
        for x, y, p, r in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs):
            if x != y:
                break
            same += 1
            apart = max(apart, abs(p[x].logprob - r[x].logprob))
    return same / sum(len(other.outputs[0].token_ids) for other in others), apart


@guarded
def check_engine(family: str, dtype: str) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (300, 1, 15, 63, 64, 65, 127, 128, 129, 7, 40)]
    prompts += [[*prompts[0][:200], 3, 4, 5]]
    with tempfile.TemporaryDirectory() as temp:
        folder = tiny_model(Path(temp), family)
        whole, plain = generate(folder, prompts, dtype=dtype)
        first, facts = generate(folder, prompts, dtype=dtype, kv_cache_dtype="fp8")
        share, apart = agreement(first, whole)
        ratio = facts["kv_blocks"] / plain["kv_blocks"]
        expected = 4 if dtype == "float32" else 2
        check(f"{family} {dtype}: times the blocks", abs(ratio / expected - 1) < 0.01, blocks=ratio, of=expected)
        # With random weights two tokens are often almost equally likely: this share is for people to read.
        check(f"{family} {dtype}: against a cache of {dtype}", apart < 2, tokens=share, logprob=apart)
        for label, options in VARIANTS.items():
            some, now = generate(folder, prompts, dtype=dtype, kv_cache_dtype="fp8", **options)
            share, apart = agreement(some, first)
            # In 16 bits other rows in a step round otherwise, and random weights then often take another token.
            least = 0.0 if dtype != "float32" and label in ("small chunks", "few blocks") else LEAST[label]
            enough = share >= least and (label != "few blocks" or now["preemptions"] > 0)
            check(f"{family} {dtype} fp8: {label}", enough, tokens=share, logprob=apart, preempted=now["preemptions"])
        some, now = generate(folder, prompts, again=True, dtype=dtype, kv_cache_dtype="fp8")
        share, apart = agreement(some, first)
        enough = share > 0.95 and now["cached"] > 500
        check(f"{family} {dtype} fp8: prefix hits", enough, tokens=share, logprob=apart, cached=now["cached"])


@guarded
def check_trained(dtype: str) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 2048) for _ in range(n)] for n in (300, *range(20, 120, 5))]
    whole, _ = generate(TRAINED, prompts, dtype=dtype)
    first, _ = generate(TRAINED, prompts, dtype=dtype, kv_cache_dtype="fp8")
    pairs = [(a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]) for a, b in zip(whole, first)]
    both = [abs(a[token].logprob - b[token].logprob) for a, b in pairs for token in a if token in b]
    mean = sum(both) / len(both)
    check(f"trained {dtype}: against a cache of {dtype}", mean < 0.3 and len(both) > 10, logprob=mean, of=len(both))


def check_kernels() -> None:
    check_conversions()
    for dtype, shape in itertools.product(DTYPES, ((64, 16, None), (128, 64, None), (80, 32, 100), (256, 256, None))):
        check_attention(dtype, *shape)
    for dtype, num_tokens in itertools.product(DTYPES, (1, 64, 65, 700)):
        check_rope(dtype, num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--parts", default="kernels,engine")
    args = parser.parse_args()
    torch.manual_seed(0)
    if "kernels" in args.parts:
        check_kernels()
    if "engine" in args.parts:
        for family, dtype in itertools.product(("Llama", "Qwen3"), ("float32", "bfloat16")):
            check_engine(family, dtype)
        for dtype in ("float32", "bfloat16"):
            check_trained(dtype)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    versions["date"] = time.strftime("%Y-%m-%d")
    (args.out / "check_kv8.json").write_text(json.dumps({**versions, "results": RESULTS}, indent=1, default=str))
    failed = [result["name"] for result in RESULTS if not result["passed"]]
    print(f"\n{len(RESULTS) - len(failed)} of {len(RESULTS)} checks passed")
    for result in RESULTS:
        facts = {name: value for name, value in result.items() if name not in ("name", "passed")}
        print(f"{'ok    ' if result['passed'] else 'FAILED'} {result['name']:<60} {facts}"[:180])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
