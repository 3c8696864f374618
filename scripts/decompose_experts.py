#!/usr/bin/env python3
"""Low-rank experts from the weights alone (PCA): the same as `nanovllm compress pca`."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["compress", "pca"]
    main()
