#!/usr/bin/env python3
"""Low-rank experts fitted to what they see: the same as `nanovllm compress distill`."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["compress", "distill"]
    main()
