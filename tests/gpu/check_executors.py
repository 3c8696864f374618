"""One rank under each executor: the same figures, within 3 %. Not collected by pytest (no GPU in CI).

    python tests/gpu/check_executors.py [--model benchmarks/models/qwen3-0.6b] [--workloads 64x512] [--rounds 3]
                                        [--executors local,mp,torchrun,ray] [--out DIR]

Every executor runs in a process of its own, one after the other, and again for as many rounds: a machine drifts by more
than the difference that is looked for, so the best round of each counts, and the spread is printed with it. Ray is left
out where it is not installed. The tokens must be the same, too. Ends with a table, and check_executors.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

EXECUTORS = ("local", "mp", "torchrun", "ray")
WITHIN = 0.03


def child(args: argparse.Namespace) -> None:
    """What runs under an executor; prints one line of JSON."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.bench.named import measure_named

    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": args.max_model_len}
    began = time.perf_counter()
    with LLM(args.model, distributed_executor_backend=args.child, device=args.device, **options) as llm:
        started = time.perf_counter() - began
        greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        outputs = llm.generate([[5, 6, 7 + number] * 20 for number in range(8)], greedy, use_tqdm=False)
        tokens = json.dumps([output.outputs[0].token_ids for output in outputs])
        rates = {
            name: measure_named(llm.engine, name, 0.6, repeat=2)["tokens_per_second"]
            for name in args.workloads.split(",")
        }
        found = {
            "executor": type(llm.engine.executor).__name__,
            "start_seconds": round(started, 1),
            "rates": rates,
            "tokens": hashlib.blake2b(tokens.encode(), digest_size=8).hexdigest(),
            "device": llm.engine.describe()["runs_on"]["device"],
        }
    print("FOUND " + json.dumps(found), flush=True)


def run(name: str, args: argparse.Namespace) -> dict:
    launcher = [sys.executable]
    if name == "torchrun":
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*launcher, __file__, "--child", name, "--model", args.model, "--workloads", args.workloads]
    command += ["--device", args.device, "--max-model-len", str(args.max_model_len)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = [line.partition("FOUND ")[2] for line in done.stdout.splitlines() if "FOUND " in line]
    if len(lines) != 1:
        print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
        return {"error": f"exit code {done.returncode}"}
    return json.loads(lines[0])


def compare(runs: dict[str, list[dict]], workload: str) -> list[dict]:
    best = {name: [one["rates"][workload] for one in found if "rates" in one] for name, found in runs.items()}
    base = max(best["local"], default=0.0)
    rows = []
    for name, rates in best.items():
        ratio = max(rates) / base if rates and base else None
        rows.append(
            {
                "workload": workload,
                "executor": name,
                "tokens_per_second": round(max(rates), 1) if rates else None,
                "rounds": [round(rate, 1) for rate in rates],
                "ratio_to_local": ratio and round(ratio, 4),
                "within_3_percent": ratio is not None and abs(ratio - 1) <= WITHIN,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", default=str(ROOT / "benchmarks/models/qwen3-0.6b"))
    parser.add_argument("--workloads", default="1x512,64x512")
    parser.add_argument("--executors", default=",".join(EXECUTORS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    names = [name for name in args.executors.split(",") if name != "ray" or find_spec("ray")]
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            runs[name].append(run(name, args))
            print(number, name, json.dumps(runs[name][-1]), flush=True)
    rows = [row for workload in args.workloads.split(",") for row in compare(runs, workload)]
    tokens = {one.get("tokens") for found in runs.values() for one in found}
    same = len(tokens) == 1 and None not in tokens
    report = {"date": time.strftime("%Y-%m-%d"), "same_tokens": same, "rows": rows, "runs": runs}
    report["left_out"] = [name for name in args.executors.split(",") if name not in names]
    (args.out / "check_executors.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    for row in rows:
        print(
            f"{row['workload']:<12} {row['executor']:<10} {row['tokens_per_second']} tok/s, "
            f"{row['ratio_to_local']} of local, rounds {row['rounds']}"
        )
    print(json.dumps({key: report[key] for key in ("date", "same_tokens", "left_out", "rows")}))


if __name__ == "__main__":
    main()
