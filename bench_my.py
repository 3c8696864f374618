"""Attention backends by batch size and length; the same as `nanovllm bench crossover`, which explains its options.

    python bench_my.py --backends triton,sdpa --batch-sizes 1,8,64 --input-lens 128,512,2048
"""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "crossover"]
    main()
