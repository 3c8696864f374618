"""Every kind of processor draws the same tokens from the same logits. What is drawn: tests/sampling/test_draw.py."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm.ops.native.build import load_library
from nanovllm.ops.native.ops import NativeOps
from tests.ops.c_variants import VARIANTS, compiled

# temperature, top_p, min_p, top_k
KINDS = [
    (0.0, 1.0, 0.0, 0),
    (1.0, 1.0, 0.0, 0),
    (0.7, 0.95, 0.0, 20),
    (1.3, 0.9, 0.0, 0),
    (1e-5, 0.9, 0.0, 0),
    (5.0, 0.99, 0.0, 0),
    (1.0, 1.0, 0.02, 0),
    (1.0, 0.8, 0.001, 300),
]


@pytest.mark.skipif(isinstance(load_library(), str), reason="no C compiler")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_processor_draws_the_same(variant: str, tmp_path: Path) -> None:
    command, rng = compiled("sampling_harness.c", variant, tmp_path), np.random.default_rng(0)
    kinds = KINDS * 40
    logits = (rng.standard_normal((len(kinds), 4133)) * 3).astype(np.float32)
    seeds = rng.integers(-(2**63), 2**63, len(kinds)).tolist()
    wanted = [(*kind, seed, position) for position, (kind, seed) in enumerate(zip(kinds, seeds))]
    logits[8, 5] = np.nan
    head = np.array(logits.shape, np.int64)
    data = head.tobytes() + logits.tobytes() + b"".join(struct.pack("dddqqq", *row) for row in wanted)
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    tokens = NativeOps().draw(torch.from_numpy(logits), wanted)
    assert np.frombuffer(done.stdout, np.int64).tolist() == tokens
    assert [i for i, token in enumerate(tokens) if token == -1] == [8]
