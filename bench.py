"""The family's benchmark: 256 sequences with prompts and outputs of 100 to 1024 random tokens, seed 0.

    python bench.py --model Qwen/Qwen3-0.6B --attn-backend auto sdpa

One line per attention backend and input length with the backend that really ran, then one line of JSON. Without a GPU
the default workload is smaller, so that it ends; the script says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from nanovllm.bench.report import finish, make_report
from nanovllm.bench.throughput import engine_facts, run_workload, warm_up
from nanovllm.bench.workload import Lengths, WorkloadShape
from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import NanoVLLMError
from nanovllm.hardware.device import Device

SMALLEST = 100  # "1024" means 100..1024, as in this family; "512..512" is exactly 512


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "--model-path", help="folder, .gguf file, alias or repository id (default: smollm2)")
    parser.add_argument("--num-seqs", type=int, help="default: 256, without a GPU 16")
    parser.add_argument(
        "--input-len",
        "--input-lens",
        nargs="+",
        dest="input_lens",
        help="largest length, or a range: 32..256; several are measured in turn (default: 1024, without a GPU 128)",
    )
    parser.add_argument("--output-len", help="largest length, or a range, for all of them")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attn-backend", nargs="+", default=["auto"], help="one or several, measured in turn")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights from config.json alone")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--enforce-eager", action="store_true", help="no captured graphs")
    parser.add_argument("--save", action="store_true", help="also write the JSON under benchmarks/results/")
    return parser.parse_args()


def choose_shapes(args: argparse.Namespace) -> list[WorkloadShape]:
    num_seqs, length = (256, "1024") if Device.choose(args.device).is_gpu else (16, "128")
    if num_seqs != 256 and None in (args.num_seqs, args.input_lens, args.output_len):
        print(f"no GPU: what is not given is smaller (--num-seqs {num_seqs}, lengths up to {length})", file=sys.stderr)
    output_len = Lengths.parse(args.output_len or length, SMALLEST)
    input_lens = ",".join(args.input_lens or [length]).split(",")  # with spaces or with commas
    num_seqs = num_seqs if args.num_seqs is None else args.num_seqs
    return [WorkloadShape(num_seqs, Lengths.parse(text, SMALLEST), output_len) for text in input_lens]


def bench_backend(args: argparse.Namespace, shapes: list[WorkloadShape], attn_backend: str) -> Iterator[dict[str, Any]]:
    options = {
        name: getattr(args, name)
        for name in ("model", "load_format", "device", "dtype", "max_model_len", "enforce_eager", "seed")
    }
    config = EngineConfig.from_options(**options, attn_backend=attn_backend, skip_tokenizer_init=True)
    with LLMEngine(config) as engine:
        warm_up(engine, args.seed)
        for shape in shapes:
            workload = shape.draw(args.seed, engine.model_config.vocab_size)
            run = run_workload(engine, workload, args.temperature)
            facts = engine_facts(engine)
            ran = facts["engine"]["attn_backend"]
            print(
                f"Total: {run.num_output_tokens}tok, Time: {run.seconds:.2f}s, Throughput: {run.output_rate:.2f}tok/s, "
                f"Backend: {ran}" + (f", Input: {shape.input_len}" if len(shapes) > 1 else ""),
                flush=True,
            )
            yield {
                "asked": attn_backend,
                "attn_backend": ran,
                "input_len": str(shape.input_len),
                "prompt_tokens": run.num_prompt_tokens,
                "output_tokens": run.num_output_tokens,
                "seconds": run.seconds,
                "output_tokens_per_second": run.output_rate,
                "facts": facts,
            }


def main() -> None:
    args = parse_args()
    try:
        shapes = choose_shapes(args)
        results = [row for name in args.attn_backend for row in bench_backend(args, shapes, name)]
    except NanoVLLMError as error:
        sys.exit(f"error: {error}")
    facts = [row.pop("facts") for row in results][-1]
    shape, input_len = shapes[0], ",".join(str(shape.input_len) for shape in shapes)
    workload = {"num_seqs": shape.num_seqs, "input_len": input_len, "output_len": str(shape.output_len)}
    finish(make_report("main", **facts, seed=args.seed, workload=workload, results=results), args.save)


if __name__ == "__main__":
    main()
