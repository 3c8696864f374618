"""Dequantisation is compared with the gguf package, bit for bit, on random bytes."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nanovllm.weights.gguf_quants import OTHER_TYPES, TENSOR_TYPES, decode


def random_blocks(kind, num_blocks: int) -> np.ndarray:
    """Random bytes, with finite numbers where a block has its float16 scales."""
    rng = np.random.default_rng(num_blocks)
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    for at in [208] if kind.name == "Q6_K" else [0] if kind.name.endswith("_0") else [0, 2]:
        blocks[:, at : at + 2] = rng.normal(0, 0.1, (num_blocks, 1)).astype(np.float16).view(np.uint8)
    return blocks


def test_the_table_agrees_with_the_gguf_package():
    for type_id, kind in TENSOR_TYPES.items():
        known = GGMLQuantizationType(type_id)
        assert known.name == kind.name
        assert GGML_QUANT_SIZES[known] == (kind.block_len, kind.block_bytes)
    for type_id, name in OTHER_TYPES.items():
        assert GGMLQuantizationType(type_id).name == name
    assert not TENSOR_TYPES.keys() & OTHER_TYPES.keys()


@pytest.mark.parametrize("num_blocks", [1, 2, 257])
@pytest.mark.parametrize("type_id", [i for i, kind in TENSOR_TYPES.items() if kind.unpack])
def test_bit_exact(type_id, num_blocks):
    kind = TENSOR_TYPES[type_id]
    blocks = random_blocks(kind, num_blocks)
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType(type_id))
    got = decode(torch.from_numpy(blocks).flatten(), kind)
    assert got.dtype == torch.float32
    assert got.numel() == num_blocks * kind.block_len
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(got.numpy(), expected.reshape(-1))


@pytest.mark.parametrize("type_id", [i for i, kind in TENSOR_TYPES.items() if kind.dtype])
def test_plain_types_come_as_stored(type_id):
    kind = TENSOR_TYPES[type_id]
    values = torch.tensor([0.0, -1.5, 3.25, 1e-3]).to(kind.dtype)
    raw = values.view(torch.uint8)
    got = decode(raw, kind)
    assert got.dtype == kind.dtype
    assert torch.equal(got, values)
    assert got.data_ptr() != raw.data_ptr()
