"""Attention backends by batch size and length; the same as `nanovllm bench crossover`, which explains its options.

    python bench_my.py --attn-backend flash triton --batch-sizes 16 32 --input-lens 512 1024

Lists may be written with spaces or with commas; --attn-backend and --model-path are other names of --backends and
--model.
"""

import argparse
import sys

from nanovllm.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("--backends", "--attn-backend"), ("--batch-sizes",), ("--input-lens",), ("--model", "--model-path")):
        parser.add_argument(*names, nargs="+")
    lists, others = parser.parse_known_args()
    given = {name.replace("_", "-"): ",".join(values) for name, values in vars(lists).items() if values}
    sys.argv[1:] = ["bench", "crossover", *others, *(word for name in given for word in (f"--{name}", given[name]))]
    main()
