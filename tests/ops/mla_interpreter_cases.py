"""The kernels of latent attention against their plain twins under Triton's interpreter, on the CPU
(`test_triton_interpreter.py`). Blocks are shuffled and unused memory is NaN, as in interpreter_cases.py."""

import os

import pytest
import torch

from nanovllm.ops import mla
from nanovllm.ops.triton import decode_attention, mla_absorb, mla_decode, mla_prefill, mla_rope
from tests.ops.kernel_rig import paged_cache

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype])


def latents(lens, block_size, size, dtype=torch.float32):
    """(cache [blocks, block_size, size], context_lens, tables)"""
    cache, _, *rest = paged_cache(lens, block_size, 1, size, dtype)
    return cache[:, :, 0], *rest


@pytest.mark.parametrize(
    ("num_splits", "block_size", "heads"), [(1, 16, 3), (1, 64, 17), (2, 16, 1), (5, 64, 16), (5, 32, 33)]
)
def test_decode_boundaries(num_splits, block_size, heads):
    lens = [0, 1, 15, 16, 17, 63, 64, 65, 129, 200, 0]
    cache, *rest = latents(lens, block_size, 40 + 6)
    q = torch.randn(heads, len(lens), 40).transpose(0, 1)  # as a product of each head leaves it
    q_pe = torch.randn(len(lens), heads, 6)
    launch = decode_attention.DecodeLaunch(num_splits, block_n=32)
    got = mla_decode.latent_decode(q, q_pe, cache, *rest, 0.3, 200, launch)
    close(got, mla.latent_decode(q, q_pe, cache, *rest, 0.3))
    assert torch.equal(got[0], torch.zeros_like(got[0]))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_decode_of_the_published_sizes(dtype):
    cache, *rest = latents([5, 100], 64, 512 + 64, dtype)
    q, q_pe = torch.randn(2, 16, 512).to(dtype), torch.randn(2, 16, 64).to(dtype)
    got = mla_decode.latent_decode(q, q_pe, cache, *rest, 0.04, 128)
    close(got, mla.latent_decode(q, q_pe, cache, *rest, 0.04))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("lens", "heads", "nope", "v", "rank", "dtype"),
    [
        ([0, 1, 65, 200], 3, 12, 20, 40, torch.float32),  # few rows: the merge multiplies too
        ([70, 0, 5, 64, 129], 3, 12, 20, 40, torch.float32),  # more
        ([100], 16, 128, 128, 512, torch.bfloat16),
    ],
)
def test_products_around_a_decode(num_splits, lens, heads, nope, v, rank, dtype):
    cache, *rest = latents(lens, 16, rank + 6, dtype)
    weight = (torch.randn(heads, nope + v, rank) / rank**0.5).to(dtype)  # [W_UK | W_UV] of each head, as it is stored
    to_k, to_v = weight.split((nope, v), dim=1)
    q_nope, q_pe = torch.randn(len(lens), heads, nope + 6).to(dtype).split((nope, 6), dim=2)
    q = mla_absorb.absorb(q_nope, to_k)
    close(q, torch.einsum("rhd,hdc->rhc", q_nope.float(), to_k.float()).to(dtype))
    launch = decode_attention.DecodeLaunch(num_splits, block_n=32)
    got = mla_decode.latent_decode(q, q_pe, cache, *rest, 0.3, 200, launch, to_v)
    found = mla.latent_decode(q, q_pe, cache, *rest, 0.3)
    close(got, torch.einsum("rhc,hvc->rhv", found.float(), to_v.float()).to(dtype))


def test_decode_launch_rule():
    assert mla_decode.choose_launch(32, 4096, 132).num_splits == 4
    assert mla_decode.choose_launch(1, 10**6, 132).num_splits == 32
    assert mla_decode.choose_launch(1, 63, 132).num_splits == 1
    assert mla_decode.choose_launch(132, 4096, 132).num_splits == 1
    assert mla_decode.choose_launch(256, 4096, 132).block_n == 32  # two programs share a multiprocessor
    launch = mla_decode.choose_launch(64, 4096, 132)
    assert mla_decode.fit_launch(launch, 2, (9, 0)) == launch
    assert mla_decode.fit_launch(launch, 2, (8, 9)).block_n == 16
    assert mla_decode.fit_launch(launch, 4, (9, 0)).num_stages == 1


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rank", "rope", "heads"),
    [
        (torch.float32, 40, 6, 3),
        (torch.float32, 512, 64, 17),
        (torch.float16, 64, 8, 16),
        (torch.bfloat16, 512, 64, 2),
    ],
)
def test_rope(dtype, rank, rope, heads, interleaved):
    num_tokens, block_size = 5, 4
    both = torch.randn(num_tokens, heads * 20 + rank + rope).to(dtype)  # one product's output: q, then kv
    q_pe = torch.randn(num_tokens, heads, 10 + rope).to(dtype)[..., 10:]
    kv, weight = both[:, -(rank + rope) :], torch.randn(rank).to(dtype)
    angles = torch.randn(30, rope // 2)
    table, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([3, 0, 29, 7, 7])
    caches = [torch.zeros(3, block_size, rank + rope, dtype=dtype) for _ in range(2)]
    slots = torch.tensor([11, 0, -1, 5, 6])
    got = mla_rope.latent_rope(q_pe, kv, weight, 1e-6, table, positions, caches[0], slots, interleaved)
    slots[2] = 1  # the twin refuses padding
    expected = mla.latent_rope(q_pe, kv, weight, 1e-6, table, positions, caches[1], slots, interleaved)
    caches[1][0, 1] = 0
    for found, wanted in zip((*got, caches[0]), (*expected, caches[1])):
        close(found, wanted)


@pytest.mark.parametrize(
    ("dtype", "nope", "rope", "v"),
    [
        (torch.float32, 10, 6, 14),
        (torch.float16, 16, 8, 16),
        (torch.bfloat16, 128, 64, 128),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_piece(dtype, nope, rope, v, causal):
    """Whole prompts, single tokens, sequences without queries or (not causal) without keys."""
    new = [1, 15, 16, 0, 33, 2]
    keys = new if causal else [0, 17, 31, 5, 32, 0]
    starts, key_starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (new, keys))
    heads = 2
    q_nope, q_pe = torch.randn(sum(new), heads, nope + rope).to(dtype).split((nope, rope), dim=2)
    kv, k_pe = torch.randn(sum(keys), heads, nope + v).to(dtype), torch.randn(sum(keys), 3 + rope).to(dtype)[:, 3:]
    args = (q_nope, q_pe, kv, k_pe, starts, key_starts, 0.2, causal)
    tile = mla_prefill.PrefillTile(16, 16, 4, 1)
    (out, logsum), (expected, sums) = mla_prefill.latent_piece(*args, tile=tile), mla.latent_piece(*args)
    close(out, expected)
    torch.testing.assert_close(
        logsum, sums, rtol=1e-3 if dtype != torch.float32 else 1e-5, atol=1e-3 if dtype != torch.float32 else 1e-5
    )


def test_piece_behind_a_prefix():
    """Causal with more keys than queries: the last query is the last key."""
    starts, key_starts = torch.tensor([0, 7, 12]).int(), torch.tensor([0, 25, 30]).int()
    q_nope, q_pe = torch.randn(12, 2, 16).split((10, 6), dim=2)
    args = (q_nope, q_pe, torch.randn(30, 2, 24), torch.randn(30, 6), starts, key_starts, 0.2, True)
    close(mla_prefill.latent_piece(*args, tile=mla_prefill.PrefillTile(16, 16, 4, 1))[0], mla.latent_piece(*args)[0])
