"""The plain operators, which every kernel is held against, against Hugging Face's and torch's own formulations."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nanovllm.ops import activation, kv_cache, linear, norm, rotary, sampling
from nanovllm.ops.attention import paged_attention_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rms_norm_rounds_as_hugging_face(dtype, rows):
    reference = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    reference.weight.data = torch.randn(576).to(dtype)
    x, residual = (torch.randn(rows, 576) * 3).to(dtype), torch.randn(rows, 576).to(dtype)
    kept = x.clone()
    normed = norm.rms_norm(x, reference.weight, 1e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(normed, reference(x), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(normed, reference(x))
    normed, new_residual = norm.add_rms_norm(x, residual, reference.weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    torch.testing.assert_close(normed, reference(x + residual), rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept)
    assert normed.dtype == dtype


def test_rms_norm_of_heads():
    """q/k norms run over [tokens, heads, head_dim] views of the packed projection."""
    q = torch.randn(3, 10 * 16).view(3, 10, 16)[:, 2:6]
    weight = torch.randn(16)
    torch.testing.assert_close(norm.rms_norm(q, weight, 1e-6), F.rms_norm(q, (16,), weight, 1e-6), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    gate_up = torch.randn(5, 2 * 33).to(dtype)
    kept = gate_up.clone()
    assert torch.equal(activation.silu_mul(gate_up), F.silu(gate_up[:, :33]) * gate_up[:, 33:])
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 64), (80, 80), (80, 32)])
@pytest.mark.parametrize("tokens", [1, 6])
def test_rotary(dtype, head_dim, rot_dim, tokens):
    qkv = torch.randn(tokens, 12 * head_dim).to(dtype)
    q, k = qkv[:, : 9 * head_dim].view(tokens, 9, head_dim), qkv[:, 9 * head_dim :].view(tokens, 3, head_dim)
    angles = torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(0, rot_dim, 2) / rot_dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 64, (tokens,))
    full = torch.cat((angles, angles), dim=1)[positions]
    expected = apply_rotary_pos_emb(
        q[..., :rot_dim].float()[None],
        k[..., :rot_dim].float()[None],
        full.cos()[None],
        full.sin()[None],
        unsqueeze_dim=2,
    )
    tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps  # fused products round differently
    turning = rotary.gather_angles(cos_sin, positions)
    for source, turned in zip((q, k), expected):
        got = rotary.rotate(source, turning)
        torch.testing.assert_close(got[..., :rot_dim], turned[0].to(dtype), rtol=tolerance, atol=tolerance)
        assert torch.equal(got[..., rot_dim:], source[..., rot_dim:])


def test_store_kv():
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    kv_cache.store_kv(k, v, k_cache, v_cache, torch.tensor([11, 0, 4]))
    assert torch.equal(k_cache[2, 3], k[0])
    assert torch.equal(k_cache[0, 0], k[1])
    assert torch.equal(v_cache[1, 0], v[2])
    with pytest.raises(IndexError):  # a -1 must not reach the last slot
        kv_cache.store_kv(k, v, k_cache, v_cache, torch.tensor([-1, 1, 2]))


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_attention_reference_is_causal_sdpa(window):
    """Three kinds of sequences: a whole prompt, a chunk after a prefix, a decode; and one that is padding."""
    lens, new, block_size = [7, 9, 13, 0], [7, 4, 1, 2], 4
    k_cache, v_cache = torch.randn(20, block_size, 3, 16), torch.randn(20, block_size, 3, 16)
    tables = torch.randperm(20)[:16].view(4, 4).int()
    starts = torch.tensor([0, 7, 11, 12, 14])
    q = torch.randn(14, 9, 16)
    got = paged_attention_reference(q, k_cache, v_cache, starts, torch.tensor(lens), tables, 0.25, window)
    for s in range(3):
        keys = k_cache[tables[s].long()].flatten(0, 1)[: lens[s]].transpose(0, 1)
        values = v_cache[tables[s].long()].flatten(0, 1)[: lens[s]].transpose(0, 1)
        positions = torch.arange(lens[s] - new[s], lens[s])[:, None]
        others = torch.arange(lens[s])[None]
        mask = (others <= positions) & (others > positions - (window or 10**6))
        mine = q[starts[s] : starts[s + 1]].transpose(0, 1)
        expected = F.scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(got[starts[s] : starts[s + 1]], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert got[12:].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 48, 49])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype, rows, has_bias):
    x, weight = torch.randn(rows, 24).to(dtype), torch.randn(10, 24).to(dtype)
    bias = torch.randn(10).to(dtype) if has_bias else None
    got = linear.linear(x, weight, bias)
    torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert got.is_contiguous()


def test_philox_known_answer():
    """The published words of philox4x32-10 for counter and key zero, one for each of four neighbours."""
    zero = torch.zeros(1, dtype=torch.long)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert sampling.philox(zero, torch.arange(4), zero, 0).tolist() == words
    index = torch.arange(4, 23)
    group = torch.stack(sampling.philox_words(zero + 7, torch.arange(6), zero + 3, 1), -1).flatten()
    assert torch.equal(sampling.philox(zero + 7, index, zero + 3, 1), group[4:23])


def draw(logits, temperature, num, first_seed=0):
    rows = logits.expand(num, -1)
    seeds = torch.arange(first_seed, first_seed + num)
    return sampling.gumbel_argmax_reference(rows, torch.full((num,), temperature), seeds, torch.full((num,), 3))


def test_sampling_follows_softmax_across_tiles():
    logits = torch.full((2 * sampling.TILE + 10,), -5.0)
    logits[:3] = torch.tensor([2.0, 3.0, 4.0])
    logits[-2:] = torch.tensor([3.5, 1.0])
    num = 4000
    for temperature in (1.0, 0.7):
        probs = (logits / temperature).softmax(0)
        drawn = torch.cat([draw(logits, temperature, 500, i * 500) for i in range(num // 500)])
        counts = torch.bincount(drawn, minlength=len(logits)) / num
        for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, sampling.TILE), slice(-2, -1)):
            expected = probs[part].sum().item()
            sigma = (expected * (1 - expected) / num) ** 0.5
            assert abs(counts[part].sum().item() - expected) < 5 * sigma + 1e-9


def test_sampling_row_depends_on_itself_only():
    logits = torch.randn(4, 3000)
    temperatures, seeds = torch.tensor([0.0, 1.0, 0.5, 1.0]), torch.tensor([1, 2, 3, 2])
    positions = torch.tensor([5, 6, 7, 8])
    tokens = sampling.gumbel_argmax_reference(logits, temperatures, seeds, positions)
    for i in range(4):
        one = slice(i, i + 1)
        alone = sampling.gumbel_argmax_reference(logits[one], temperatures[one], seeds[one], positions[one])
        assert alone.item() == tokens[i].item()
    assert tokens[0] == logits[0].argmax()
    same = logits[1:2].expand(50, -1)
    moved = sampling.gumbel_argmax_reference(same, torch.ones(50), torch.full((50,), 2), torch.arange(50))
    assert len(moved.unique()) > 10  # another position is another draw


def test_greedy_tie_goes_to_the_lowest_column():
    logits = torch.zeros(1, 5000)
    logits[0, [100, 101, 2500]] = 1.0
    token = sampling.gumbel_argmax_reference(logits, torch.zeros(1), torch.zeros(1).long(), torch.zeros(1).long())
    assert token.item() == 100


def test_masked_columns_are_never_drawn():
    logits = torch.full((5000,), float("-inf"))
    logits[4000:4003] = 1.0
    assert set(draw(logits, 1.0, 200).tolist()) == {4000, 4001, 4002}


def test_plain_operators_do_not_import_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from nanovllm.ops import activation, attention, kv_cache, linear, norm, rotary, sampling"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
