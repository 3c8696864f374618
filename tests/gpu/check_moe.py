"""Checks the mixture-of-experts kernels on a GPU: `python tests/gpu/check_moe.py [--quick] [--only WORDS] [--out DIR]`.

Dense experts, in 8-bit floats too, and low-rank ones against the fp32 twin around every boundary and in every dtype;
graphs replayed with another routing; several passes against one, bit for bit; a pool beyond 2^31 elements; the load of
experts by layer. A failing job is recorded and the rest goes on. Compilation dominates, so --workers processes run the
jobs once before, only for Triton's cache. JSON goes to --out. Speed: `nanovllm bench moe`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanovllm import LLM, SamplingParams
from nanovllm.hardware.graphs import capture_graph
from nanovllm.moe.scaled import expert_views
from nanovllm.ops import integers, moe
from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.triton import moe_align, moe_experts, moe_route
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"
TOKENS = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 130, 512, 513, 2100)


class Shape(NamedTuple):
    columns: int  # that gate and up read
    size: int
    down: tuple[int, int]  # outputs, columns
    between: int | None = None  # rows of the product between, if there is one
    num_experts: int = 8
    top_k: int = 2
    low_rank: bool = True  # gate and up read a half of x each
    scale_block: int | None = None  # 8-bit floats: 0 = with a scale for each row, 128 = for each block
    integers: ExpertIntegers | None = None


SHAPES = {
    "256x384 of 8": Shape(256, 384, (256, 384), low_rank=False),
    "200x88 of 60": Shape(200, 88, (200, 88), num_experts=60, top_k=8, low_rank=False),
    "64x40 of 3": Shape(64, 40, (64, 40), num_experts=3, top_k=1, low_rank=False),
    "8 bits by row, 256x384 of 8": Shape(256, 384, (256, 384), low_rank=False, scale_block=0),
    "8 bits by block, 256x384 of 8": Shape(256, 384, (256, 384), low_rank=False, scale_block=128),
    "8 bits by block, 200x88 of 60": Shape(200, 88, (200, 88), None, 60, 8, False, 128),
    "4 bits by 128, 256x384 of 8": Shape(
        256, 384, (256, 384), low_rank=False, integers=ExpertIntegers((4, 128), (4, 128))
    ),
    "4 bits by 32, 224x96 of 60": Shape(
        224, 96, (224, 96), None, 60, 8, False, integers=ExpertIntegers((4, 32), (8, 16))
    ),
    "low-rank 128, w2 input": Shape(128, 384, (256, 64), 64),
    "low-rank 128, w2 output": Shape(128, 384, (64, 384)),
    "low-rank 40, w2 input": Shape(40, 88, (200, 24), 24),
    "low-rank 24, w2 output": Shape(24, 88, (8, 88)),
}


class Case:
    """Experts in a pool with gaps between its buffers."""

    def __init__(self, shape: Shape, dtype: torch.dtype = BF16, num_buffers: int | None = None) -> None:
        self.shape, self.dtype = shape, dtype
        self.gate_up: Any
        self.down: Any
        self.between: torch.Tensor | None = None
        if shape.scale_block is not None or shape.integers is not None:
            num = num_buffers or shape.num_experts
            form = ExpertForm.dense(shape.columns, shape.size, shape.scale_block, shape.integers)
            self.gate_up, self.down = scaled_experts(num, form)
            return
        num, first, second = (
            num_buffers or shape.num_experts,
            2 * shape.size * shape.columns,
            shape.down[0] * shape.down[1],
        )
        pool = (torch.randn(num, first + second + 64, device="cuda") * shape.columns**-0.5).to(dtype)
        self.gate_up = pool[:, :first].view(num, 2 * shape.size, shape.columns)
        self.down = pool[:, first : first + second].view(num, *shape.down)
        if shape.between is not None:
            self.between = (torch.randn(shape.between, shape.size, device="cuda") * shape.size**-0.5).to(dtype)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(num_tokens, self.shape.columns * (1 + self.shape.low_rank), device="cuda").to(self.dtype)
        logits = torch.randn(num_tokens, self.shape.num_experts, device="cuda")
        return x, *moe_route.route(logits, self.shape.top_k, True)

    def pairs(self, x: torch.Tensor, buffers: torch.Tensor, weights: torch.Tensor, out: Any = None) -> torch.Tensor:
        return moe_experts.expert_pairs(x, self.gate_up, self.down, buffers, weights, out, between=self.between)


def scaled_experts(num: int, form: ExpertForm) -> tuple[Any, Any]:
    """Bytes of all kinds but NaN, and scales that differ by a factor of eight."""
    pool = torch.randint(0, 256, (num, form.length), dtype=torch.uint8, device="cuda")
    if form.integers is None:
        pool[pool & 0x7F == 0x7F] = 0
    gate_up, down = expert_views(form, pool)
    for stack in (gate_up, down):
        if form.integers is not None:
            groups, rows = stack.factors.shape[1:]
            size = stack.columns**-0.5 / 2**stack.bits
            for buffer in range(num):
                scale = 4 * size * torch.rand(rows, groups, device="cuda")
                offset = size * torch.randn(rows, groups, device="cuda")
                stack.factors[buffer].copy_(integers.pack_factors(scale, offset, groups))
            continue
        size = torch.exp2(3 * torch.rand(stack.scale.shape, device="cuda")) * stack.shape[2] ** -0.5
        stack.scale.copy_(size / 400)
    return gate_up, down


def copy_experts(target: Any, source: Any, places: torch.Tensor) -> None:
    if isinstance(target, torch.Tensor):
        target[places] = source
    elif isinstance(target, integers.IntegerStack):
        target.words[places], target.factors[places] = source.words, source.factors
    else:
        target.q.view(torch.uint8)[places], target.scale[places] = source.q.view(torch.uint8), source.scale


def error_of(got: torch.Tensor, expected: torch.Tensor, low_rank: bool = False) -> float:
    assert torch.isfinite(got).all(), "not finite"
    error = ((got.float() - expected).abs() / (1 + expected.abs())).max().item()
    limit = {BF16: 2e-2, FP16: 4e-3, FP32: 2e-5}[got.dtype] * (1.5 if low_rank else 1)  # one more rounding
    assert error <= limit, f"error {error:.2e} over {limit:.0e}"
    return error


def check_experts(shape: Shape, dtype: torch.dtype) -> float:
    """Random routing, then all tokens at one expert, with every fifth pair left out."""
    case, worst = Case(shape, dtype), 0.0
    tensors = (case.gate_up, case.down, case.between)
    gate_up, down, between = (t.float() if isinstance(t, torch.Tensor) else t for t in tensors)
    for num_tokens in TOKENS:
        x, ids, weights = case.inputs(num_tokens)
        for buffers in (ids, torch.full_like(ids, shape.num_experts - 1)):
            left_out = torch.arange(buffers.numel(), device="cuda").view_as(buffers) % 5 == 4
            buffers = torch.where(left_out, -1, buffers).int()
            out = torch.full((*ids.shape, shape.down[0]), 7.0, device="cuda", dtype=dtype)
            case.pairs(x, buffers, weights, out)
            expected = torch.full(out.shape, 7.0, device="cuda")
            moe.expert_pairs(x.float(), gate_up, down, buffers, weights, expected, between=between)  # type: ignore[arg-type]
            worst = max(worst, error_of(out, expected, shape.low_rank))
            assert (out[buffers < 0] == 7.0).all(), f"{num_tokens} tokens: a row without a buffer was written"
    return worst


def check_passes(shape: Shape, num_tokens: int) -> None:
    """Some experts at a time, from another pool, is the same as all at once."""
    case, far = Case(shape), Case(shape, num_buffers=20)
    far.between = case.between
    x, ids, weights = case.inputs(num_tokens)
    whole = case.pairs(x, ids, weights)
    elsewhere = torch.tensor([17, 2, 19, 0, 4, 15, 6, 11], device="cuda")
    copy_experts(far.gate_up, case.gate_up, elsewhere)
    copy_experts(far.down, case.down, elsewhere)
    out = torch.full_like(whole, float("nan"))
    for some in ([3], [0, 7, 5], [1, 2, 4, 6]):
        buffers = torch.where(torch.isin(ids, torch.tensor(some, device="cuda")), elsewhere[ids.long()], -1).int()
        far.pairs(x, buffers, weights, out)
    assert torch.equal(out, whole), f"{(out != whole).float().mean():.1%} of the numbers differ"
    assert torch.equal(case.pairs(x, ids, weights), whole), "two runs differ"


def check_graph(shape: Shape, num_tokens: int) -> None:
    case = Case(shape)
    x, _, _ = case.inputs(num_tokens)
    logits = torch.randn(num_tokens, shape.num_experts, device="cuda")
    out = torch.empty(num_tokens, shape.down[0], device="cuda", dtype=BF16)

    def layer() -> torch.Tensor:
        return out.copy_(moe_route.sum_pairs(case.pairs(x, *moe_route.route(logits, shape.top_k, True))))

    replay, _ = capture_graph(layer, None)  # type: ignore[arg-type]
    for _ in range(3):
        x.normal_()
        logits.normal_()
        replay()
        got = out.clone()
        assert torch.equal(got, layer()), "a replay differs from a run"


def check_far_buffer(scale_block: int | None = None) -> float:
    """Element offsets beyond 2^31: 48 buffers of the size of Mixtral's experts."""
    hidden, size, num_buffers = 4096, 14336, 48
    gate_up: Any
    down: Any
    if scale_block is not None:
        gate_up, down = scaled_experts(num_buffers, ExpertForm.dense(hidden, size, scale_block))
        last: Any = [ScaledStack(s.q[-1:], s.scale[-1:], s.num_parts) for s in (gate_up, down)]
    else:
        pool = torch.empty(num_buffers, 3 * hidden * size, dtype=BF16, device="cuda")
        pool[-1].normal_(std=hidden**-0.5)
        gate_up, down = expert_views(ExpertForm.dense(hidden, size), pool)
        last = [gate_up[-1:].float(), down[-1:].float()]
    worst = 0.0
    for num_tokens in (1, 5, 65, 2100):
        x = torch.randn(num_tokens, hidden, device="cuda").to(BF16)
        ids, weights = moe_route.route(torch.randn(num_tokens, 8, device="cuda"), 2, True)
        buffers = torch.where(ids == ids[0, 0], num_buffers - 1, -1).int()
        out = torch.zeros(num_tokens, 2, hidden, dtype=BF16, device="cuda")
        moe_experts.expert_pairs(x, gate_up, down, buffers, weights, out=out)
        expected = torch.zeros(out.shape, device="cuda")
        near = torch.where(buffers < 0, -1, 0).int()
        moe.expert_pairs(x.float(), *last, near, weights, out=expected)
        worst = max(worst, error_of(out, expected))
    return worst


def check_align() -> None:
    for num_pairs, num_buffers in ((512, 128), (513, 8), (4096, 300), (131072, 128), (32768, 8)):
        buffers = torch.randint(-1, num_buffers, (num_pairs, 1), dtype=torch.int32, device="cuda")
        rows = moe_align.align(buffers, num_buffers, 64)
        kept = int((buffers >= 0).sum())
        expected = buffers.flatten().sort(stable=True).indices[num_pairs - kept :]
        assert torch.equal(rows.order[:kept].long(), expected)
        counts = torch.bincount(buffers.flatten() + 1, minlength=num_buffers + 1)[1:]
        assert torch.equal(rows.ends.long(), counts.cumsum(0))
        assert rows.num_blocks.item() == ((counts + 63) // 64).sum().item()


def check_route() -> float:
    worst = 0.0
    for num_experts, top_k in ((8, 2), (60, 4), (64, 6), (128, 8), (256, 8)):
        logits = torch.randn(1000, num_experts, device="cuda", dtype=BF16)  # bf16: many are equal
        ids, weights = moe_route.route(logits, top_k, True)
        expected_ids, expected = moe.route(logits, top_k, True)
        assert torch.equal(ids, expected_ids)
        worst = max(worst, (weights - expected).abs().max().item())
        pairs = torch.randn(33, top_k, 1000, device="cuda", dtype=BF16)
        assert torch.equal(moe_route.sum_pairs(pairs), moe.sum_pairs(pairs))
    assert worst < 1e-6
    return worst


def check_load() -> None:
    """Tokens by layer and expert, counted after captured steps: as many as on a CPU, and nearly the same ones (a near
    tie may go the other way)."""
    prompts = [{"prompt_token_ids": list(range(5, 5 + size))} for size in (1, 3, 17, 70, 130)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = {}
    for device in ("cuda", "cpu"):
        options = {"dtype": "float32", "max_num_seqs": 8, "num_kvcache_blocks": 64, "decode_steps": 8}
        with LLM(str(TINY), device=device, enable_prefix_caching=False, **options) as llm:
            llm.engine.executor.expert_load()
            llm.generate(prompts, params, use_tqdm=False)
            found[device] = torch.tensor(llm.engine.executor.expert_load())
    on_gpu, on_cpu = found["cuda"], found["cpu"]
    assert torch.equal(on_gpu.sum(1), on_cpu.sum(1)), (on_gpu.sum(1), on_cpu.sum(1))
    assert (on_gpu - on_cpu).abs().sum() < 0.1 * on_cpu.sum()


def all_jobs(quick: bool) -> dict[str, Callable[[], float | None]]:
    jobs: dict[str, Callable[[], float | None]] = {"route and sum": check_route, "align": check_align}
    jobs["far buffer"] = check_far_buffer
    jobs["far buffer, 8 bits by block"] = partial(check_far_buffer, 128)
    jobs["load of experts"] = check_load
    for name, shape in SHAPES.items():
        dtypes = (BF16, FP16) if shape.integers is not None else (BF16, FP16, FP32)
        for dtype in (BF16,) if quick else dtypes:
            jobs[f"experts {name} {str(dtype)[6:]}"] = partial(check_experts, shape, dtype)
        if shape.num_experts == 8:
            for n in (1, 2, 3, 7, 40, 129, 300, 600, 2100):
                jobs[f"passes {name}, {n} tokens"] = partial(check_passes, shape, n)
            for n in (1, 4, 64, 100, 2100):
                jobs[f"graph {name}, {n} tokens"] = partial(check_graph, shape, n)
    return jobs


def run_job(run: Callable[[], float | None]) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        result: dict[str, Any] = {"max_error": run() or 0.0}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:800]}
    torch.cuda.empty_cache()
    return result | {"seconds": round(time.perf_counter() - begin, 1)}


def compile_ahead(argv: list[str], workers: int) -> None:
    """Every job once in parallel processes; failures show again in the main run."""
    command = [sys.executable, __file__, *argv]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    shards = [subprocess.Popen([*command, "--shard", f"{i}/{workers}"], **quiet) for i in range(workers)]
    for shard in shards:
        shard.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="bf16 only")
    parser.add_argument("--only", default="", help="comma-separated substrings of job names")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0 = none")
    parser.add_argument("--shard", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    words = [word for word in args.only.split(",") if word]
    jobs = [(name, run) for name, run in all_jobs(args.quick).items() if not words or any(w in name for w in words)]
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        for _, run in jobs[index::count]:
            run_job(run)
        return 0
    if args.workers:
        compile_ahead(sys.argv[1:], args.workers)
    results = {}
    for name, run in jobs:
        result = results[name] = run_job(run)
        print(f"{name:40s} {result.get('error') or 'ok, max error {:.1e}'.format(result['max_error'])}", flush=True)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    (args.out / "check_moe.json").write_text(json.dumps({**facts, "results": results}, indent=1))
    failed = sum("error" in result for result in results.values())
    print(f"{len(jobs)} jobs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
