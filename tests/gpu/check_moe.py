"""Checks and times the mixture-of-experts kernels on a GPU: `python tests/gpu/check_moe.py [--quick] [--out DIR]`.

Correctness against the fp32 twin around every boundary and in every dtype; graphs replayed with another routing;
several passes against one, bit for bit; a pool beyond 2^31 elements. Then the decode and prefill tables of
`bench/moe_kernels.py` and a sweep of tiles for a few batch sizes. A failing job is recorded and the rest goes on.
Compilation dominates, so --workers processes run the jobs once before, only for Triton's cache. The short table comes
last; JSON goes to --out.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from nanovllm.bench import moe_kernels as lab  # noqa: E402
from nanovllm.hardware.device import Device  # noqa: E402
from nanovllm.hardware.graphs import capture_graph  # noqa: E402
from nanovllm.ops import moe  # noqa: E402
from nanovllm.ops.triton import moe_align, moe_experts, moe_route  # noqa: E402
from nanovllm.ops.triton.moe_tiles import Tile, TileChoice  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 4e-3, FP32: 2e-5}
TOKENS = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 130, 512, 513, 2100)
SHAPES = {"256x384 of 8": (256, 384, 8, 2), "200x88 of 60": (200, 88, 60, 8), "64x40 of 3": (64, 40, 3, 1)}
Jobs = list[tuple[str, Callable[[], dict]]]


def experts(num_buffers, hidden, size, dtype):
    pool = torch.randn(num_buffers, 3 * hidden * size + 64, device="cuda", dtype=FP32)
    pool = (pool * hidden**-0.5).to(dtype)
    both = 2 * hidden * size
    gate_up = pool[:, :both].view(num_buffers, 2 * size, hidden)
    return gate_up, pool[:, both : both + hidden * size].view(num_buffers, hidden, size)


def inputs(num_tokens, hidden, num_experts, top_k, dtype):
    x = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    return x, *moe_route.route(torch.randn(num_tokens, num_experts, device="cuda"), top_k, True)


def error_of(got, expected, dtype) -> float:
    assert torch.isfinite(got).all(), "not finite"
    error = ((got.float() - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= TOLERANCE[dtype], f"error {error:.2e} over {TOLERANCE[dtype]:.0e}"
    return error


def check_experts(dtype, hidden, size, num_experts, top_k) -> dict:
    """Random routing, then all tokens at one expert, with every fifth pair left out."""
    gate_up, down = experts(num_experts, hidden, size, dtype)
    worst = 0.0
    for num_tokens in TOKENS:
        x, ids, weights = inputs(num_tokens, hidden, num_experts, top_k, dtype)
        for buffers in (ids, torch.full_like(ids, num_experts - 1)):
            buffers = torch.where(torch.arange(buffers.numel(), device="cuda").view_as(buffers) % 5 == 4, -1, buffers).int()
            out = torch.full((num_tokens, top_k, hidden), 7.0, device="cuda", dtype=dtype)
            moe_experts.expert_pairs(x, gate_up, down, buffers, weights, out=out)
            expected = torch.full(out.shape, 7.0, device="cuda")
            moe.expert_pairs(x.float(), gate_up.float(), down.float(), buffers, weights, out=expected)
            worst = max(worst, error_of(out, expected, dtype))
            assert (out[buffers < 0] == 7.0).all(), f"{num_tokens} tokens: a row without a buffer was written"
    return {"max_error": worst}


def check_passes(num_tokens) -> dict:
    """Some experts at a time, from another pool, is the same as all at once."""
    hidden, size, num_experts = 512, 768, 8
    gate_up, down = experts(num_experts, hidden, size, BF16)
    x, ids, weights = inputs(num_tokens, hidden, num_experts, 2, BF16)
    whole = moe_experts.expert_pairs(x, gate_up, down, ids, weights)
    elsewhere = torch.tensor([17, 2, 19, 0, 4, 15, 6, 11], dtype=torch.int32, device="cuda")
    far_up, far_down = experts(20, hidden, size, BF16)
    far_up[elsewhere.long()], far_down[elsewhere.long()] = gate_up, down
    out = torch.full_like(whole, float("nan"))
    for some in ([3], [0, 7, 5], [1, 2, 4, 6]):
        buffers = torch.where(torch.isin(ids, torch.tensor(some, device="cuda")), elsewhere[ids.long()], -1).int()
        moe_experts.expert_pairs(x, far_up, far_down, buffers, weights, out=out)
    assert torch.equal(out, whole), f"{(out != whole).float().mean():.1%} of the numbers differ"
    again = moe_experts.expert_pairs(x, gate_up, down, ids, weights)
    assert torch.equal(again, whole), "two runs differ"
    return {"max_error": 0.0}


def check_graph(num_tokens) -> dict:
    hidden, size, num_experts = 256, 384, 8
    gate_up, down = experts(num_experts, hidden, size, BF16)
    x = torch.randn(num_tokens, hidden, device="cuda", dtype=BF16)
    logits, out = torch.randn(num_tokens, num_experts, device="cuda"), torch.empty_like(x)

    def layer() -> torch.Tensor:
        ids, weights = moe_route.route(logits, 2, True)
        return out.copy_(moe_route.sum_pairs(moe_experts.expert_pairs(x, gate_up, down, ids, weights)))

    replay, _ = capture_graph(layer, None)
    for _ in range(3):
        x.normal_()
        logits.normal_()
        replay()
        got = out.clone()
        assert torch.equal(got, layer()), "a replay differs from a run"
    return {"max_error": 0.0}


def check_far_buffer() -> dict:
    """Element offsets beyond 2^31: 48 buffers of the size of Mixtral's experts."""
    hidden, size, num_buffers = 4096, 14336, 48
    pool = torch.empty(num_buffers, 3 * hidden * size, dtype=BF16, device="cuda")
    pool[-1].normal_(std=hidden**-0.5)
    both = 2 * hidden * size
    gate_up, down = pool[:, :both].view(num_buffers, 2 * size, hidden), pool[:, both:].view(num_buffers, hidden, size)
    worst = 0.0
    for num_tokens in (1, 5, 65, 2100):
        x, ids, weights = inputs(num_tokens, hidden, 8, 2, BF16)
        buffers = torch.where(ids == ids[0, 0], num_buffers - 1, -1).int()
        out = torch.zeros(num_tokens, 2, hidden, dtype=BF16, device="cuda")
        moe_experts.expert_pairs(x, gate_up, down, buffers, weights, out=out)
        expected = torch.zeros(out.shape, device="cuda")
        near = torch.where(buffers < 0, -1, 0).int()
        moe.expert_pairs(x.float(), gate_up[-1:].float(), down[-1:].float(), near, weights, out=expected)
        worst = max(worst, error_of(out, expected, BF16))
    return {"max_error": worst}


def check_align() -> dict:
    for num_pairs, num_buffers in ((512, 128), (513, 8), (4096, 300), (131072, 128), (32768, 8)):
        buffers = torch.randint(-1, num_buffers, (num_pairs, 1), dtype=torch.int32, device="cuda")
        rows = moe_align.align(buffers, num_buffers, 64)
        kept = int((buffers >= 0).sum())
        expected = buffers.flatten().sort(stable=True).indices[num_pairs - kept :]
        assert torch.equal(rows.order[:kept].long(), expected)
        counts = torch.bincount(buffers.flatten() + 1, minlength=num_buffers + 1)[1:]
        assert torch.equal(rows.ends.long(), counts.cumsum(0))
        assert rows.num_blocks.item() == ((counts + 63) // 64).sum().item()
    return {"max_error": 0.0}


def check_route() -> dict:
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
    return {"max_error": worst}


# ---- timings -------------------------------------------------------------------------------------------------------


def time_align(num_pairs, num_buffers) -> dict:
    buffers = torch.randint(0, num_buffers, (num_pairs, 1), dtype=torch.int32, device="cuda")
    replay, _ = capture_graph(lambda: [moe_align.align(buffers, num_buffers, 64) for _ in range(10)], None)
    return {"us": lab.time_on_device(replay, Device.choose("auto")) * 1e5}


SWEEP = {  # tokens -> (block_m, tiles of gate_up, tiles of down); block_m 1: GEMV
    1: [
        (1, ((1, 512), (1, 1024), (2, 512), (2, 1024)), ((1, 512), (1, 1024), (1, 2048), (2, 512))),
        (16, ((32, 128, 4, 4), (16, 256, 4, 4)), ((32, 256, 4, 4), (16, 256, 4, 4))),
    ],
    8: [
        (
            16,
            ((32, 128, 4, 4), (32, 128, 4, 6), (64, 128, 4, 3), (32, 256, 4, 3), (16, 256, 4, 4)),
            ((32, 256, 4, 4), (64, 128, 4, 4), (32, 128, 4, 6), (64, 256, 4, 3), (16, 256, 4, 4)),
        )
    ],
    64: [
        (16, ((32, 128, 4, 4), (64, 128, 4, 3)), ((32, 256, 4, 4), (64, 128, 4, 4))),
        (32, ((32, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4)), ((64, 128, 4, 4), (32, 256, 4, 3), (128, 64, 4, 4))),
        (64, ((32, 128, 4, 4), (64, 64, 4, 4)), ((64, 128, 4, 3), (128, 64, 4, 4))),
    ],
    256: [
        (32, ((64, 64, 4, 4),), ((128, 64, 4, 4),)),
        (64, ((64, 64, 4, 4), (64, 128, 4, 3)), ((128, 64, 4, 4), (64, 128, 4, 4))),
        (128, ((64, 64, 8, 4), (128, 64, 8, 3)), ((128, 64, 8, 4), (256, 64, 8, 3))),
    ],
    4096: [(128, ((128, 64, 8, 3), (128, 64, 8, 4)), ((256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 4)))],
}


def sweep(shape, num_tokens) -> dict:
    """Each product with each tile: microseconds, and TB/s of the distinct experts' weights (gate_up 2/3, down 1/3)."""
    moe_lab = lab.MoeLab(Device.choose("auto"), shape, BF16)
    calls, found = moe_lab.calls(num_tokens, "uniform"), {}
    distinct = sum(call.num_distinct for call in calls) / len(calls)
    for block_m, *both in SWEEP[num_tokens]:
        for name, share, tiles in (("gate_up", 2 / 3, both[0]), ("down", 1 / 3, both[1])):
            for numbers in tiles:
                tile = Tile(*numbers)
                kind = "gemv" if block_m == 1 else "tiles"
                plan = TileChoice(kind, block_m, **{name: tile})
                seconds = lab.try_seconds(moe_lab, [moe_lab.part(call, plan, name) for call in calls])
                rate = None if seconds is None else distinct * moe_lab.expert_bytes * share / seconds / 1e12
                key = f"{name} m{block_m} {'x'.join(map(str, numbers))}"
                found[key] = {"us": seconds and round(seconds * 1e6, 1), "tbs": rate and round(rate, 2)}
    return {"sweep": found}


def tables(shape, quick) -> dict:
    device = Device.choose("auto")
    limits = lab.measure_limits(device, BF16)
    moe_lab = lab.MoeLab(device, shape, BF16)
    found = {
        "limits": limits,
        "decode": lab.measure_decode(moe_lab, limits, (1, 8, 64) if quick else lab.DECODE_TOKENS),
        "prefill": lab.measure_prefill(moe_lab, limits, (512, 8192) if quick else lab.PREFILL_TOKENS),
    }
    return {"tables": found}


def all_jobs(quick: bool) -> Jobs:
    jobs: Jobs = [("route and sum", check_route), ("align", check_align), ("far buffer", check_far_buffer)]
    dtypes = (BF16,) if quick else (BF16, FP16, FP32)
    jobs += [
        (f"experts {name} {str(dtype)[6:]}", partial(check_experts, dtype, *shape))
        for dtype in dtypes
        for name, shape in SHAPES.items()
    ]
    jobs += [(f"passes {n} tokens", partial(check_passes, n)) for n in (1, 7, 40, 300, 600, 2100)]
    jobs += [(f"graph {n} tokens", partial(check_graph, n)) for n in (1, 4, 64, 100, 2100)]
    jobs += [
        (f"time align {pairs} pairs {buffers} buffers", partial(time_align, pairs, buffers))
        for pairs, buffers in ((16, 8), (128, 8), (512, 128), (16384, 8), (131072, 128))
    ]
    for shape in lab.SHAPES:
        jobs += [(f"sweep {shape.name} {n}", partial(sweep, shape, n)) for n in SWEEP if not quick or n in (1, 8, 64)]
        jobs.append((f"tables {shape.name}", partial(tables, shape, quick)))
    return jobs


def run_job(run: Callable[[], dict]) -> dict:
    begin = time.perf_counter()
    try:
        result = run()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:800]}
    torch.cuda.empty_cache()
    return result | {"seconds": round(time.perf_counter() - begin, 1)}


def warm_up(argv: list[str], workers: int) -> None:
    """Every job once in parallel processes, only for Triton's cache; failures show again in the main run."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, __file__, *argv]
    shards = [subprocess.Popen([*command, "--shard", f"{i}/{workers}"], **quiet) for i in range(workers)]
    for shard in shards:
        shard.wait()


def report(results: dict[str, dict]) -> None:
    for name, result in results.items():
        if "error" in result:
            print(f"{name:36s} ERROR {result['error'][:400]}")
        elif "max_error" in result:
            print(f"{name:36s} ok, max error {result['max_error']:.1e}")
        elif "us" in result:
            print(f"{name:36s} {result['us']:8.1f} us")
    for name, result in results.items():
        for key, cell in result.get("sweep", {}).items():
            print(f"{name:28s} {key:28s} {cell['us'] or '-':>8} us {cell['tbs'] or '-':>6} TB/s")
    found = [result["tables"] for result in results.values() if "tables" in result]
    if found:
        merged = {"limits": found[0]["limits"]}
        merged |= {part: [row for each in found for row in each[part]] for part in ("decode", "prefill")}
        lab.print_measured(merged)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="bf16, fewer sizes")
    parser.add_argument("--only", default="", help="comma-separated substrings of job names")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0 = none")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds, then jobs are skipped")
    parser.add_argument("--shard", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    words = [word for word in args.only.split(",") if word]
    jobs = [(name, run) for name, run in all_jobs(args.quick) if not words or any(word in name for word in words)]
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        for _, run in jobs[index::count]:
            run_job(run)
        return 0
    if args.workers:
        warm_up(sys.argv[1:], args.workers)
        print(f"compiled ahead in {time.perf_counter() - begin:.0f} s", flush=True)
    results = {}
    for name, run in jobs:
        late = time.perf_counter() - begin > args.budget
        results[name] = {"error": "skipped: out of time"} if late else run_job(run)
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - begin, 1),
        "results": results,
    }
    (args.out / "check_moe.json").write_text(json.dumps(record, indent=1))
    report(results)
    failed = sum("error" in result for result in results.values())
    print(f"{len(jobs)} jobs, {failed} failed, {record['seconds']:.0f} s, written to {args.out / 'check_moe.json'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
