"""Checks and times every Triton kernel on a GPU: `python tests/gpu/check_kernels.py [--only prefill,gemv]`.

The jobs are in `kernel_checks.py` and `kernel_timings.py`. A failing job is recorded and the rest goes on. Compilation
dominates, so `--workers` processes first run every job once to fill Triton's cache. A timing is the median over replays
of a captured graph, with the share of the bandwidth or arithmetic that an H200 was measured to give. The table comes
last; the JSON goes to --out, or here.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from kernel_checks import check_jobs  # noqa: E402
from kernel_timings import Timed, timing_jobs  # noqa: E402

READ_TBS, TFLOPS = 4.46, 780.0


@dataclass
class Job:
    name: str
    check: Callable[[], float] | None = None
    build: Callable[[], Timed] | None = None
    result: dict = field(default_factory=dict)


def measure(timed: Timed) -> dict:
    """Median over replays of a graph that makes every call once; microseconds a call."""
    for call in timed.calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in timed.calls:
            call()
    graph.replay()
    times = []
    for _ in range(9):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(timed.calls))
    times.sort()
    result = {"us": round(times[len(times) // 2], 2), "best": round(times[0], 2)}
    if timed.flops:
        result["tflops"] = round(timed.flops / result["us"] / 1e6, 1)
        result["share"] = round(result["tflops"] / TFLOPS, 3)
    elif timed.num_bytes:
        result["tbs"] = round(timed.num_bytes / result["us"] / 1e6, 3)
        result["share"] = round(result["tbs"] / READ_TBS, 3)
    return result


def run_job(job: Job, warm_only: bool) -> None:
    try:
        if job.check:
            job.result = {"max_error": job.check()}
        elif job.build:
            timed = job.build()
            if warm_only:
                timed.calls[0]()
                torch.cuda.synchronize()
            else:
                job.result = measure(timed)
    except Exception as error:
        job.result = {"error": f"{type(error).__name__}: {error}"[:600]}
    torch.cuda.empty_cache()


def warm_up(argv: list[str], workers: int) -> None:
    """Runs every job once in parallel processes, only for Triton's cache; their failures show again in the main run."""
    command = [sys.executable, __file__, *argv]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    shards = [subprocess.Popen([*command, "--shard", f"{i}/{workers}"], **quiet) for i in range(workers)]
    for shard in shards:
        shard.wait()


def report(jobs: list[Job], seconds: float, folder: Path) -> None:
    for job in jobs:
        r = job.result
        if "error" in r:
            print(f"{job.name:44s} ERROR {r['error'][:300]}")
        elif "max_error" in r:
            print(f"{job.name:44s} ok, max error {r['max_error']:.1e}")
        elif r:
            rate = f"{r['tflops']:8.1f} TFLOP/s" if "tflops" in r else f"{r['tbs']:8.2f} TB/s" if "tbs" in r else ""
            print(f"{job.name:52s} {r['us']:10.2f} us {rate} {r.get('share', 0) * 100:5.1f} %  best {r['best']:.2f} us")
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(seconds, 1),
        "results": {job.name: job.result for job in jobs},
    }
    path = folder / "check_kernels.json"
    path.write_text(json.dumps(record, indent=1))
    failed = sum("error" in job.result for job in jobs)
    print(f"{len(jobs)} jobs, {failed} failed, {seconds:.0f} s, written to {path}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="comma-separated substrings of job names")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0 = none")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds, then jobs are skipped")
    parser.add_argument("--shard", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    wanted = [w for w in args.only.split(",") if w]
    jobs = [Job(name, check=run) for name, run in check_jobs()]
    if not args.check_only:
        jobs += [Job(name, build=build) for name, build in timing_jobs()]
    jobs = [job for job in jobs if not wanted or any(word in job.name for word in wanted)]
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        for job in jobs[index::count]:
            run_job(job, warm_only=True)
        return 0
    if args.workers:
        warm_up(sys.argv[1:], args.workers)
        print(f"compiled ahead in {time.perf_counter() - begin:.0f} s", flush=True)
    for job in jobs:
        if time.perf_counter() - begin > args.budget:
            job.result = {"error": "skipped: out of time"}
            continue
        run_job(job, warm_only=False)
    report(jobs, time.perf_counter() - begin, args.out)
    return int(any("error" in job.result for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
