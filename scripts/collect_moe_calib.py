#!/usr/bin/env python3
"""Record what the experts of a model see: the same as `nanovllm compress calibrate`."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["compress", "calibrate"]
    main()
