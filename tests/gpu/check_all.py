"""Everything that only a GPU can tell, in one call: the checks of this folder, then the figures to compare.

    python tests/gpu/check_all.py [--minutes 9] [--only WORDS] [--begin NAME] [--list] [--out DIR]

Each job is a process of its own, and all share Triton's cache. One that fails does not keep the others from running.
After --minutes the running job is ended and the rest is left out, so what is most likely to be broken comes first.
Writes check_all.json (what each job has written, and its last lines) and check_all.log (all that was printed), and
prints a table last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12


def script(name: str, *options: str) -> list[str]:
    """One of this folder, which writes its JSON into a folder."""
    return [str(ROOT / "tests/gpu" / f"{name}.py"), "--out", "{out}", *options]


def figures(model: str, names: str, *options: str) -> list[str]:
    folder = str(ROOT / "benchmarks/models" / model)
    common = ["--load-format", "dummy", "--max-model-len", "4096"]
    return ["-m", "nanovllm", "bench", "workloads", names, "--model", folder, *common, *options]


def steps(model: str, rows: str, *options: str) -> list[str]:
    folder = str(ROOT / "benchmarks/models" / model)
    return script("step_times", "--model", folder, "--rows", rows, "--context", "512", *options)


def speculation(*options: str) -> list[str]:
    return ["-m", "nanovllm", "bench", "speculation", "--max-model-len", "1024", *options]


def start(*options: str) -> list[str]:
    model = str(ROOT / "benchmarks/models/qwen3-0.6b")
    common = ["--model", model, "--load-format", "dummy", "--max-model-len", "4096"]
    return ["-m", "nanovllm", "bench", "latency", *common, *options]


EMPTY_CACHE = """import os, runpy, sys
os.environ["TRITON_CACHE_DIR"] = sys.argv.pop(1)
runpy.run_module("nanovllm", run_name="__main__")"""
QUICK = "main,1x512,8x512,64x512,256x512,prefill 64x1024"
FP8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
JOBS: dict[str, list[str]] = {
    "kernels": script("check_kernels", "--check-only"),
    "speculation": script("check_speculation"),
    "experts": script("check_experts", "--parts", "engine"),
    "moe bits": script("check_moe", "--quick", "--only", "bits"),
    "engine": script("check_engine", "--only", "right"),
    "sampling": [str(ROOT / "tests/gpu/check_sampling.py")],
    "kv8": script("check_kv8"),
    "figures 0.6b": figures("qwen3-0.6b", QUICK),
    "figures 8b": figures("qwen3-8b", "main,1x256,64x512", "--repeat", "1"),
    "figures speculation": speculation("--output-len", "512"),
    "figures 8b fp8": figures("qwen3-8b", "main,1x256,64x512", *FP8, "--repeat", "1"),
    "figures 8b awq": figures("qwen3-8b-awq", "main,1x256,64x512", "--repeat", "1"),
    "steps 8b awq": steps("qwen3-8b-awq", "4,8,16,32,64,128,256", "--whole"),
    "steps 8b fp8": steps("qwen3-8b", "4,8,16,32,64", "--", *FP8),
    "figures 8b fp8 in blocks": figures("qwen3-8b-fp8", "main,1x256,64x512", *FP8[2:], "--repeat", "1"),
    "steps 8b fp8 in blocks": steps("qwen3-8b-fp8", "4,8,16,32,64", "--whole", "--", *FP8[2:]),
    "steps 8b fp8 in blocks, inputs in 8 bits": steps(
        "qwen3-8b-fp8", "4,8,16,32,64", "--set", "fp8.FEW_ROWS=2", "--", *FP8[2:]
    ),
    "times of quantised products": script("check_kernels", "--only", "fp8,int4-128"),
    "times of experts": script("check_experts", "--parts", "kernels"),
    "moe": script("check_moe", "--quick"),
    "gaps": script("check_gaps"),
    "out of memory": script("check_oom"),
    "low rank": script("check_low_rank", "--only", "engine"),
    "offload": [str(ROOT / "tests/gpu/check_offload.py")],
    # What must not have become worse
    "speculation, short answers": speculation("--output-len", "64"),
    "speculation, 8 guesses": speculation("--output-len", "512", "--num-speculative-tokens", "8"),
    "speculation, few blocks": speculation("--output-len", "512", "--num-kvcache-blocks", "40"),
    "figures 0.6b, others": figures("qwen3-0.6b", "1x2048,64x2048,prefill 1x1024"),
    "figures deepseek": figures("deepseek-v2-lite", "main,1x256,16x256,64x512,prefill 16x1024", "--repeat", "1"),
    "figures mixtral": figures("mixtral-8x7b", "main,1x256,64x512,prefill 16x1024", "--repeat", "1"),
    "start": start("--startup", "3"),
    "start, empty kernel cache": ["-c", EMPTY_CACHE, "{out}/cache", *start("--startup", "1")[2:]],
}


def run(argv: list[str], seconds: float, log: Any) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *(word.replace("{out}", out) for word in argv)]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        output = Path(out) / "output"
        with output.open("w") as written:
            job = subprocess.Popen(
                command, stdout=written, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
            )
            try:
                status = "ok" if job.wait(seconds) == 0 else f"FAILED ({job.returncode})"
            except subprocess.TimeoutExpired:
                status = "out of time"
                os.killpg(job.pid, signal.SIGKILL)  # its workers too: they hold memory of the card
                job.wait()
        text = output.read_text(errors="replace")
        log.write(f"\n==== {' '.join(argv)}\n{text}")
        log.flush()
        lines = [line for line in text.splitlines() if line.strip()]
        found = {path.stem: json.loads(path.read_text()) for path in Path(out).glob("*.json")}
        if lines and lines[-1].startswith("{"):  # a benchmark ends with one
            found["report"] = json.loads(lines[-1])
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "last": lines[-LAST_LINES:],
        "found": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="", help="comma-separated parts of the names of jobs")
    parser.add_argument(
        "--begin", default=next(iter(JOBS)), choices=JOBS, metavar="NAME", help="leave out those before"
    )
    parser.add_argument("--list", action="store_true", help="print the jobs and run none")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for check_all.json and check_all.log")
    args = parser.parse_args()
    words = [word for word in args.only.split(",") if word]
    later = list(JOBS)[list(JOBS).index(args.begin) :]
    jobs = {name: JOBS[name] for name in later if not words or any(word in name for word in words)}
    if not jobs:
        parser.error(f"--only {args.only}: no such job; there are {', '.join(JOBS)}")
    if args.list:
        print("\n".join(f"{name:20s} {' '.join(argv)}" for name, argv in jobs.items()))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + 60 * args.minutes, {}
    with (args.out / "check_all.log").open("w") as log:
        for name, argv in jobs.items():
            left = end - time.monotonic()
            results[name] = run(argv, left, log) if left > 5 else {"status": "not begun", "seconds": 0.0, "last": []}
            print(f"{results[name]['status']:12s} {results[name]['seconds']:6.0f} s  {name}", flush=True)
            (args.out / "check_all.json").write_text(json.dumps(results, indent=1))
    for name, result in results.items():
        print(f"\n{result['status']:12s} {result['seconds']:6.0f} s  {name}")
        for line in result["last"] if result["status"].startswith("FAILED") else result["last"][-4:-1]:
            print(f"    {line[:160]}")
    return int(any(result["status"].startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
