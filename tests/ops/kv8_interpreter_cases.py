"""KV caches in 8-bit floats (e4m3): the conversions, and the kernels that write and read such a cache, against
torch.float8_e4m3fn and the plain twins, under Triton's interpreter (`test_triton_interpreter.py`)."""

import os

import pytest
import torch
import triton

from nanovllm.ops import kv_cache, qk_norm_rope, rotary
from nanovllm.ops.attention import paged_attention_reference
from nanovllm.ops.triton import decode_attention as decode
from nanovllm.ops.triton import prefill_attention as prefill
from nanovllm.ops.triton import qk_norm_rope as triton_rope
from nanovllm.ops.triton.e4m3 import BY_SHIFTS
from tests.ops.e4m3_kernels import read_kernel, write_kernel
from tests.ops.kernel_rig import caches, paged_cache

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TILE = prefill.PrefillTile(32, 32, 4, 1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype])


# ---- one number -------------------------------------------------------------------------------------------


def written(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), dtype=torch.uint8)
    write_kernel[(triton.cdiv(len(x), 65536),)](x, out, len(x), 65536)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_byte_is_read_exactly(dtype):
    every = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=dtype)
    read_kernel[(1,)](every, out, BY_SHIFTS)
    expected = every.view(torch.float8_e4m3fn).to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[:127], expected.signbit()[:127])
    assert out.isnan().sum() == 2


def test_every_number_is_written_to_the_nearest():
    """Any bits; everyday sizes; all midpoints between neighbours, and the numbers beside the midpoints."""
    numbers = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, 1e9)]
    special = torch.tensor([0.0, 448.0, 449.0, 464.0, 465.0, 1e30, float("inf"), float("nan"), 1e-45, 2.0**-10])
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32).view(torch.float32)
    x = torch.cat((bits, torch.randn(50_000) * torch.randn(50_000).mul(4).exp(), numbers, middles, *beside, special))
    x = torch.cat((x, -x))
    got, expected = written(x), kv_cache.round_kv(x, torch.uint8)
    assert torch.equal(got, expected)
    assert torch.equal(kv_cache.expand_kv(written(numbers), torch.float32), numbers)


# ---- the kernels ------------------------------------------------------------------------------------------


def bytes_of(x: torch.Tensor, scale: float) -> torch.Tensor:
    """NaN stays NaN: what no kernel may read."""
    stored = kv_cache.round_kv(x.float() / scale, torch.uint8)
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8), stored)


def cache_of_bytes(lens, block_size, num_kv, head_dim, scales, by_head=False):
    """(byte caches, the same as numbers, context_lens, tables)."""
    k, v, *rest = paged_cache(lens, block_size, num_kv, head_dim, torch.float32, by_head)
    k, v = k * 3, v * 0.02
    stored = [bytes_of(x, float(scale)) for x, scale in zip((k, v), scales)]
    numbers = [kv_cache.expand_kv(x, torch.float32) * scale for x, scale in zip(stored, scales)]
    return stored, numbers, rest


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("head_dim", "rot_dim", "has_norm"), [(64, 64, True), (80, 32, False)])
def test_rope_writes_what_the_twin_writes(dtype, head_dim, rot_dim, has_norm):
    num_q, num_kv, num_tokens = 5, 2, 7
    qkv = torch.randn(num_tokens, (num_q + 2 * num_kv) * head_dim).to(dtype)
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if has_norm else None
    cos_sin, positions = torch.randn(50, rot_dim), torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(40)[:num_tokens]
    scales = torch.tensor([0.37, 0.011])
    both = [torch.zeros(10, 4, num_kv, head_dim, dtype=torch.uint8) for _ in range(2)]
    twins = [torch.zeros_like(cache) for cache in both]
    q = triton_rope.qk_norm_rope(qkv, norms, 1e-6, cos_sin, positions, *both, slots, num_q, scales=scales)
    weights = None if norms is None else tuple(weight.float() for weight in norms)
    angles = rotary.gather_angles(cos_sin, positions)
    expected = qk_norm_rope.qk_norm_rope(qkv.float(), weights, 1e-6, angles, None, *twins, slots, num_q, scales)
    close(q, expected.to(dtype))
    assert torch.equal(both[1], twins[1])  # values are not computed with: the same bits
    got, wanted = (kv_cache.expand_kv(cache, torch.float32) for cache in (both[0], twins[0]))
    torch.testing.assert_close(got, wanted, rtol=2**-3, atol=2**-9)  # the last bit of fp32 may tip one to its neighbour
    assert (both[0] == twins[0]).float().mean() > 0.999
    assert (both[1] & 0x7F).max() > 0x70  # the range is used


def test_rope_saturates_and_keeps_padding_out():
    """No norm, no turn: keys are what they were."""
    values = torch.tensor([0.0, -0.0, 1e30, -1e30, 448.0, 460.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -(2.0**-11)])
    qkv = torch.zeros(3, 3, 16)
    qkv[:, 1:, :10] = values
    unturned = torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), dim=1)
    k, v = (torch.full((2, 4, 1, 16), 5, dtype=torch.uint8) for _ in range(2))
    places = (unturned, torch.zeros(3, dtype=torch.int64), k, v, torch.tensor([2, -1, 7]), 1)
    triton_rope.qk_norm_rope(qkv.flatten(1), None, 0.0, *places, scales=torch.ones(2))
    expected = kv_cache.round_kv(values, torch.uint8)
    for cache in (k.flatten(0, 1), v.flatten(0, 1)):
        for slot in (2, 7):
            assert torch.equal(cache[slot, 0, :10] & 0x7F, expected & 0x7F)  # -0.0 may lose its sign: 0 - 0 is 0
            assert torch.equal(cache[slot, 0, 2:10], expected[2:])
        assert (cache[[0, 1, 3, 4, 5, 6]] == 5).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_splits", "block_size", "window"), [(1, 16, None), (2, 64, None), (5, 32, 70)])
def test_decode_reads_it(dtype, num_splits, block_size, window):
    lens = [0, 1, 16, 17, 63, 64, 65, 129, 200, 0]
    scales = torch.tensor([0.07, 0.0003])
    stored, numbers, rest = cache_of_bytes(lens, block_size, 2, 16, scales, by_head=num_splits == 2)
    q = torch.randn(len(lens), 6, 16).to(dtype)
    launch = decode.DecodeLaunch(num_splits, 32)
    got = decode.decode_attention(q, *stored, *rest, 0.3, launch, window, scales=scales)
    expected = paged_attention_reference(q, *numbers, torch.arange(len(lens) + 1), *rest, 0.3, window)
    close(got / 0.02, expected / 0.02)
    assert torch.equal(got[0], torch.zeros_like(got[0]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("block_size", "window", "head_dim", "use_desc"),
    [(16, None, 16, False), (64, 33, 16, False), (32, None, 80, False), (32, None, 32, True)],
)
def test_prefill_reads_it(dtype, block_size, window, head_dim, use_desc):
    lens, new = [1, 15, 16, 31, 32, 33, 65, 0], [1, 15, 7, 1, 32, 20, 65, 0]
    scales = torch.tensor([0.07, 0.0003])
    stored, numbers, rest = cache_of_bytes(lens, block_size, 1, head_dim, scales)
    q = torch.randn(sum(new), 3, head_dim).to(dtype)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    tile = prefill.PrefillTile(32, 32, 4, 1, use_desc=use_desc)
    got = prefill.prefill_attention(q, *stored, starts, *rest, 0.3, window, tile=tile, scales=scales)
    close(got / 0.02, paged_attention_reference(q, *numbers, starts, *rest, 0.3, window) / 0.02)


def test_the_largest_numbers_do_not_overflow():
    """Keys and values of 448 in fp16, whose largest is 65504."""
    stored = [torch.full((1, 16, 1, 16), 0x7E, dtype=torch.uint8) for _ in range(2)]
    scales, lens, tables = torch.tensor([0.001, 2.0]), torch.tensor([16]).int(), torch.zeros(1, 1).int()
    q = torch.full((1, 2, 16), 300.0, dtype=torch.float16)
    got = decode.decode_attention(q, *stored, lens, tables, 0.25, decode.DecodeLaunch(1, 16), scales=scales)
    assert torch.equal(got, torch.full_like(q, 896.0))
    starts = torch.tensor([0, 1]).int()
    got = prefill.prefill_attention(q, *stored, starts, lens, tables, 0.25, tile=TILE, scales=scales)
    assert torch.equal(got, torch.full_like(q, 896.0))


def test_plain_store_rounds_as_the_kernel() -> None:
    k, v = caches(1, 5, 2, 8, torch.float32, False, "cpu")
    stored = [torch.zeros(2, 8, 2, 8, dtype=torch.uint8) for _ in range(2)]
    scales = torch.tensor([0.01, 0.5])
    kv_cache.store_kv(k[0], v[0], *stored, torch.arange(3, 8), scales)
    for cache, x, scale in zip(stored, (k[0], v[0]), scales):
        assert torch.equal(cache.flatten(0, 1)[3:8].flatten(), written((x / scale).flatten()))
        assert (cache.flatten(0, 1)[:3] == 0).all()


def test_measured_scales_leave_headroom():
    k, v = torch.tensor([[1.0, -200.0], [3.0, 0.0]]), torch.tensor([0.001])
    scales = kv_cache.measure_scales(k, v)
    assert scales.dtype == torch.float32
    assert scales.tolist() == pytest.approx([200 * 4 / 448, kv_cache.MIN_SCALE])
