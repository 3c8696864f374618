"""Checks of the Triton kernels on a GPU: each against its plain twin in fp32, over shapes around every boundary.

`check_jobs()` gives (name, run) pairs; run returns the largest error and raises when it is too large.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nanovllm.layers.integers import IntegerForm, IntegerWeight
from nanovllm.layers.parted import tried_inputs
from nanovllm.layers.scaled import ScaledWeight, Scales
from nanovllm.ops import activation, mla, norm, sampler_state
from nanovllm.ops import fp8 as plain_fp8
from nanovllm.ops import integers as plain_integers
from nanovllm.ops.attention import paged_attention_reference
from nanovllm.ops.opset import triton_ops
from nanovllm.ops.triton import activation as t_activation
from nanovllm.ops.triton import decode_attention as decode
from nanovllm.ops.triton import (
    decode_state,
    few_rows,
    fp8,
    gemv,
    integers,
    integers_matmul,
    matmul,
    mla_decode,
    mla_prefill,
    mla_rope,
    qk_norm_rope,
)
from nanovllm.ops.triton import norm as t_norm
from nanovllm.ops.triton import prefill_attention as prefill
from nanovllm.ops.triton import sampling as t_sampling
from nanovllm.ops.triton.common import capability, empty_rows
from nanovllm.sampling.sampler import sample
from tests.ops.kernel_rig import caches, paged_cache, rope_twin
from tests.ops.sampler_rig import make_logits, make_rows, make_state

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 4e-3, FP32: 2e-5}
Launch = decode.DecodeLaunch


def rand(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


def max_error(got, expected, dtype) -> float:
    got, expected = got.float(), expected.float()
    assert torch.isfinite(got).all(), "not finite"
    error = ((got - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= TOLERANCE[dtype], f"error {error:.2e} over {TOLERANCE[dtype]:.0e}"
    return error


def check_prefill(dtype, head_dim, group, block_size, window=None, by_head=False):
    def run() -> float:
        lens = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 700, 0]
        new = [(1, n, max(1, n - 64), (n + 1) // 2)[i % 4] if n else 2 for i, n in enumerate(lens)]
        k, v, context_lens, tables = paged_cache(lens, block_size, 2, head_dim, dtype, by_head, DEVICE)
        starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=DEVICE)
        q = rand(sum(new), 2 * group, head_dim, dtype=dtype)
        args = (starts, context_lens, tables, head_dim**-0.5, window)
        got = prefill.prefill_attention(q, k, v, *args)
        return max_error(got, paged_attention_reference(q.float(), k.float(), v.float(), *args), dtype)

    return run


def check_decode(dtype, head_dim, group, block_size, launch, window=None, by_head=False):
    def run() -> float:
        lens = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 2049, 0]
        k, v, context_lens, tables = paged_cache(lens, block_size, 2, head_dim, dtype, by_head, DEVICE)
        q = rand(len(lens), 2 * group, head_dim, dtype=dtype)
        fitted = decode.fit_launch(launch, head_dim, q.element_size(), capability(q.device))
        starts = torch.arange(len(lens) + 1)
        expected = paged_attention_reference(
            q.float(), k.float(), v.float(), starts, context_lens, tables, head_dim**-0.5, window
        )
        got = decode.decode_attention(q, k, v, context_lens, tables, head_dim**-0.5, fitted, window)
        return max_error(got, expected, dtype)

    return run


def check_mla_decode(dtype, heads, block_size, num_splits):
    def run() -> float:
        lens = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 257, 1000, 2049, 0]
        cache, _, context_lens, tables = paged_cache(lens, block_size, 1, 576, dtype, device=DEVICE)
        cache, scale = cache[:, :, 0], 192**-0.5
        q = rand(heads, len(lens), 512, dtype=dtype, scale=0.5).transpose(0, 1)
        q_pe = rand(len(lens), heads, 64, dtype=dtype)
        launch = mla_decode.fit_launch(
            mla_decode.choose_launch(len(lens), 4096, 132), q.element_size(), capability(q.device)
        )
        launch = replace(launch, num_splits=num_splits)
        got = mla_decode.latent_decode(q, q_pe, cache, context_lens, tables, scale, 4096, launch)
        expected = mla.latent_decode(q.float(), q_pe.float(), cache.float(), context_lens, tables, scale)
        return max_error(got, expected, dtype)

    return run


def check_mla_prompt(dtype):
    def run() -> float:
        new, prefix = [1, 63, 64, 65, 200, 129, 0, 700], [0, 5, 64, 130, 0, 1000, 3, 1]
        starts, prefix_starts = (
            torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE) for lens in (new, prefix)
        )
        q_nope, q_pe = rand(sum(new), 16, 192, dtype=dtype).split((128, 64), dim=2)
        worst = 0.0
        for lens, key_starts, causal in ((new, starts, True), (prefix, prefix_starts, False)):
            kv, k_pe = rand(sum(lens), 16, 256, dtype=dtype), rand(sum(lens), 576, dtype=dtype)[:, 512:]
            rest = (starts, key_starts, 192**-0.5, causal)
            got, logsum = mla_prefill.latent_piece(q_nope, q_pe, kv, k_pe, *rest)
            expected, sums = mla.latent_piece(*(t.float() for t in (q_nope, q_pe, kv, k_pe)), *rest)
            seen = sums.isfinite()
            assert torch.equal(seen, logsum.isfinite())
            worst = max(worst, max_error(got, expected, dtype), max_error(logsum[seen], sums[seen], dtype))
        return worst

    return run


def check_mla_rope() -> float:
    worst = 0.0
    for dtype, heads, tokens, interleaved in ((BF16, 16, 5, True), (BF16, 128, 300, True), (FP32, 17, 33, False)):
        q_pe, kv = rand(tokens, heads, 192, dtype=dtype)[..., 128:], rand(tokens, 3072 + 576, dtype=dtype)[:, 3072:]
        weight, angles = rand(512, dtype=dtype), rand(4096, 32, dtype=FP32)
        table = torch.cat((angles.cos(), angles.sin()), 1)
        positions, slots = torch.randint(0, 4096, (tokens,), device=DEVICE), torch.randperm(320, device=DEVICE)[:tokens]
        stored = [torch.zeros(5, 64, 576, dtype=dtype, device=DEVICE) for _ in range(2)]
        args = (q_pe, kv, weight, 1e-6, table, positions)
        got = (*mla_rope.latent_rope(*args, stored[0], slots, interleaved), stored[0])
        expected = (*mla.latent_rope(*args, stored[1], slots, interleaved), stored[1])
        worst = max(worst, *(max_error(a, b, dtype) for a, b in zip(got, expected)))
    return worst


def check_norm() -> float:
    errors = []
    for dtype, size in itertools.product((BF16, FP16, FP32), (576, 1024, 4096, 5120)):
        x, residual, weight = rand(33, size, dtype=dtype), rand(33, size, dtype=dtype), rand(size, dtype=dtype)
        got = t_norm.add_rms_norm(x, residual, weight, 1e-6)
        expected = norm.add_rms_norm(x, residual, weight, 1e-6)
        errors += [max_error(a, b, dtype) for a, b in zip(got, expected)]
        errors.append(max_error(t_norm.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6), dtype))
        gate_up = rand(17, 2 * size, dtype=dtype)
        errors.append(max_error(t_activation.silu_mul(gate_up), activation.silu_mul(gate_up), dtype))
    return max(errors)


def check_rope() -> float:
    errors = []
    cases = [(BF16, 128, 128, True, 16, 8), (BF16, 64, 64, False, 9, 3), (FP16, 80, 32, False, 6, 2)]
    cases += [(FP32, 192, 64, True, 4, 4), (BF16, 256, 256, True, 8, 1)]
    for (dtype, head_dim, rot_dim, has_norm, nq, nkv), tokens in itertools.product(cases, (1, 64, 65, 300)):
        qkv = rand(tokens, (nq + 2 * nkv) * head_dim, dtype=dtype)
        weights = (rand(head_dim, dtype=dtype), rand(head_dim, dtype=dtype))
        cos_sin = rand(4096, rot_dim, dtype=FP32).clamp_(-1, 1)
        positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
        slots = torch.randperm(320, device=DEVICE)[:tokens]
        slots[0] = -1
        both = caches(20, 16, nkv, head_dim, dtype, tokens == 65, DEVICE)  # 65: stored head by head
        norms = weights if has_norm else None
        q_twin, expected = rope_twin(qkv, norms, cos_sin, positions, torch.stack(both), slots, nq)
        q = qk_norm_rope.qk_norm_rope(qkv, norms, 1e-6, cos_sin, positions, *both, slots, nq)
        errors += [max_error(q, q_twin, dtype), max_error(torch.stack(both), expected, dtype)]
    return max(errors)


def check_large_cache() -> float:
    """Slots whose element offset exceeds 2^31: int32 addressing would wrap."""
    cache = torch.zeros(2, 70_000, 256, 1, 128, dtype=BF16, device=DEVICE)  # 2 x 2.29e9 elements
    qkv, slots = rand(2, 4 * 128), torch.tensor([69_999 * 256 + 255, 3], device=DEVICE)  # two q heads, k and v
    unturned = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), dim=1).to(DEVICE)  # cosines and sines of angle 0
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    qk_norm_rope.qk_norm_rope(qkv, None, 1e-6, unturned, zeros, cache[0], cache[1], slots, 2)
    assert torch.equal(cache[:, -1, -1, 0], qkv[0].view(4, 128)[2:])
    tables = torch.tensor([[69_999]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([256], dtype=torch.int32, device=DEVICE)
    q = rand(1, 2, 128)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    expected = paged_attention_reference(q, cache[0], cache[1], starts, lens, tables, 1.0).float()
    got = decode.decode_attention(q, cache[0], cache[1], lens, tables, 1.0, Launch(1))
    error = max_error(got, expected, BF16)
    got = prefill.prefill_attention(q, cache[0], cache[1], starts, lens, tables, 1.0)
    return max(error, max_error(got, expected, BF16))


def check_sampling() -> float:
    """Requests of every kind against the CPU. Near-ties may fall otherwise: exponentials round differently."""
    different, total = [], 0
    for vocab, kind in itertools.product((2049, 49152, 151936), ("normal", "flat", "ties", "broken")):
        rows = make_rows(vocab, seed=vocab)
        places = torch.randperm(len(rows)).tolist()
        held = make_state(rows, vocab, places, str(DEVICE))
        logits = make_logits(kind, len(rows), vocab, BF16)
        lanes = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        positions = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int32, device=DEVICE)
        got = t_sampling.draw(logits.to(DEVICE), lanes, positions, held.state).tokens.tolist()
        expected = sample(logits, rows).token_ids
        different += [(vocab, kind, i) for i, (a, b) in enumerate(zip(got, expected)) if a != b]
        total += len(rows)
    assert len(different) <= 0.01 * total, different
    return len(different) / total


def check_gemv() -> float:
    errors = []
    for rows, (n, k) in itertools.product((1, 2, 3, 4, 8), ((1021, 576), (1024, 2048), (512, 3072))):
        x, weight, gain = rand(rows, k), rand(n, k, scale=k**-0.5), rand(k)
        residual, bias = rand(rows, n), rand(n)
        exact = x.double() @ weight.double().T
        errors.append(max_error(gemv.gemv(x, weight), exact, BF16))
        errors.append(max_error(gemv.gemv(x, weight, bias, residual=residual), exact + bias + residual, BF16))
        normed = norm.rms_norm(x.float(), gain.float(), 1e-6)
        errors.append(max_error(gemv.gemv(x, weight, norm=(gain, 1e-6)), normed @ weight.float().T, BF16))
        both = torch.cat((weight, rand(n, k, scale=k**-0.5)))
        expected = activation.silu_mul(normed @ both.float().T)
        errors.append(max_error(gemv.gemv(x, both, norm=(gain, 1e-6), gated=True), expected, BF16))
    return max(errors)


def check_few_rows() -> float:
    errors = []
    for rows, (n, k) in itertools.product((1, 3, 8), ((1000, 1016), (1024, 2048), (6144, 1024), (1024, 3072))):
        x, weight, gain = rand(rows, k), rand(n, k, scale=k**-0.5), rand(k)
        residual, bias = rand(rows, n), rand(n)
        normed = norm.rms_norm(x.float(), gain.float(), 1e-6) @ weight.float().T
        got = few_rows.few_rows_linear(x, weight, bias, norm=(gain, 1e-6), residual=residual)
        errors.append(max_error(got, normed + bias.float() + residual.float(), BF16))
        got = few_rows.few_rows_linear(x, weight, norm=(gain, 1e-6), gated=True)
        errors.append(max_error(got, activation.silu_mul(normed), BF16))
    return max(errors)


def check_matmul() -> float:
    """As the rule cuts it, with and without room behind x; twenty times the same bits."""
    errors = []
    shapes = ((4096, 1024), (1024, 2048), (1000, 1024), (6144, 1024), (4096, 4096), (4096, 12288))
    for dtype, (n, k), rows in itertools.product((BF16, FP16), shapes, (3, 16, 17, 40, 64, 100, 128)):
        weight, bias = rand(n, k, dtype=dtype, scale=k**-0.5), rand(n, dtype=dtype)
        x = rand(rows, k, dtype=dtype)
        exact = x.float() @ weight.float().T + bias.float()
        for room, gated in itertools.product((True, False), (True, False)):
            if (launch := matmul.launch_for(x, weight, gated)) is None:
                continue
            given = empty_rows(rows, k, x).copy_(x) if room else x
            found = [matmul.matmul(given, weight, launch, bias, gated) for _ in range(20)]
            assert all(torch.equal(other, found[0]) for other in found), "the output depends on the run"
            got = found[0] if launch.splits == 1 else found[0].sum(0)
            errors.append(max_error(got, activation.silu_mul(exact) if gated else exact, dtype))
    return max(errors)


def integer_weight(outputs, size, bits=4, group=128, has_offset=True, act_order=False):
    """Words of any bits; weights of about size^-0.5."""
    weight = IntegerWeight({"": outputs}, size, IntegerForm(bits, group), BF16, torch.device(DEVICE))
    weight.words.random_(-(2**31), 2**31)
    scale = torch.rand(outputs, len(weight.factors), device=DEVICE) * 4 * size**-0.5 / 2**bits
    offset = torch.randn(outputs, len(weight.factors), device=DEVICE) * size**-0.5 / 4
    weight.factors.copy_(plain_integers.pack_factors(scale, offset if has_offset else None, len(weight.factors)))
    if act_order:
        weight.order = torch.randperm(size, device=DEVICE)
    return weight


INTEGERS = ((1021, 4096, 4, 128), (512, 12288, 4, 32, False), (1024, 2080, 8, 32, False), (514, 1024, 8, 16))
INTEGER_ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 257)


def check_integers() -> float:
    """Both kinds of kernel and the expansion, with every fusion, at every border of rows; and twice the same bits."""
    errors = []
    for form, act_order in itertools.product(INTEGERS, (False, True)):
        weight = integer_weight(*form, act_order=act_order)
        n, k = weight.shape
        exact, bias, gain = plain_integers.expand(weight, torch.float32), rand(n), rand(k)
        for rows in INTEGER_ROWS:
            x = rand(rows, k)
            found = integers.integer_linear(x, weight, bias)
            errors.append(max_error(found, x.float() @ exact.T + bias.float(), BF16))
            again = [integers.integer_linear(x, weight, bias) for _ in range(20)]
            assert all(torch.equal(other, found) for other in again), f"{form}, {rows} rows: two runs differ"
            errors.append(_error_of_parts(x, weight, bias, exact))
        for rows in (1, 2):
            x, residual = rand(rows, k), rand(rows, n)
            normed = norm.rms_norm(x.float(), gain.float(), 1e-6) @ exact.T
            got = integers.integer_gemv(x, weight, norm=(gain, 1e-6), residual=residual)
            errors.append(max_error(got, normed + residual.float(), BF16))
            if n % 2 == 0:
                got = integers.integer_gemv(x, weight, norm=(gain, 1e-6), gated=True)
                errors.append(max_error(got, activation.silu_mul(normed), BF16))
        weight.order = None
        plain = plain_integers.expand(weight, BF16)
        errors.append(max_error(integers_matmul.expand_words(weight, BF16), plain, BF16))
        x = rand(33, k)
        for splits in (1, 2, 3, 7):
            found = integers_matmul.integer_matmul(x, weight, splits=splits)
            errors.append(max_error(found, x.float() @ plain.float().T, BF16))
    return max(errors)


def float_weight(outputs, size, block=0):
    """In 8-bit floats, with scales of rows or of blocks; weights of about size^-0.5."""
    weight = ScaledWeight({"": outputs}, size, Scales(block), BF16, torch.device(DEVICE))
    weight.q.copy_((torch.randn(outputs, size, device=DEVICE) * 100).clamp(-448, 448).to(plain_fp8.E4M3))
    weight.scale.uniform_(0.5, 1.5).mul_(0.01 * size**-0.5)
    return weight


# The fourth is no multiple of a long step of `weight_only_kernel`, the last two are not multiplied in 8 bits
FLOATS = ((1024, 4096), (1536, 4096, 128), (512, 12288), (1024, 7392), (512, 384, 128), (1000, 1016))
FLOAT_ROWS = (1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 41, 64, 65, 100, 128, 129, 256, 301)


def check_floats() -> float:
    """Every way of multiplying, at every border of rows, with inputs of which rounding to 8 bits loses nothing; and
    twice the same bits."""
    errors, ops = [], triton_ops()
    for form in FLOATS:
        weight = float_weight(*form)
        n, k = weight.shape
        exact, bias, gain = weight.expanded().float(), rand(n), rand(k)
        for rows in FLOAT_ROWS:
            x = (tried_inputs(rows, k) / 16).to(DEVICE, BF16)
            found = ops.linear(x, weight, bias)
            errors.append(max_error(found, x.float() @ exact.T + bias.float(), BF16))
            again = [ops.linear(x, weight, bias) for _ in range(20)]
            assert all(torch.equal(other, found) for other in again), f"{form}, {rows} rows: two runs differ"
            errors.append(_error_of_parts(x, weight, bias, exact))
            if 3 <= rows <= fp8.WEIGHT_ONLY_ROWS and k % fp8.SHORT_STEP == 0:
                errors.append(_error_of_weight_only(x, weight, bias, exact))
        for rows in (1, 2, 3, 8):
            x, residual = rand(rows, k), rand(rows, n)
            normed = norm.rms_norm(x.float(), gain.float(), 1e-6) @ exact.T
            got = gemv.gemv(x, weight, norm=(gain, 1e-6), residual=residual)
            errors.append(max_error(got, normed + residual.float(), BF16))
            got = gemv.gemv(x, weight, norm=(gain, 1e-6), gated=True)
            errors.append(max_error(got, activation.silu_mul(normed), BF16))
    return max(errors)


def _error_of_weight_only(x: torch.Tensor, weight: Any, bias: torch.Tensor, exact: torch.Tensor) -> float:
    """The kernel of cards without products in 8 bits, converting as they do and as this card does."""
    errors = []
    for dtype, units in itertools.product((BF16, FP16), (fp8.FP8_UNITS, (99, 0))):
        expected = x.to(dtype).float() @ exact.T + bias.to(dtype).float()
        with mock.patch.object(fp8, "FP8_UNITS", units):
            found = fp8.weight_only_linear(x.to(dtype), weight, bias.to(dtype))
        errors.append(max_error(found, expected, dtype))
    return max(errors)


def _error_of_parts(x: torch.Tensor, weight: Any, bias: torch.Tensor, exact: torch.Tensor) -> float:
    """Products that the norm and SiLU behind them add up."""
    ops, expected = triton_ops(), x.float() @ exact.T + bias.float()
    gain = rand(len(bias)).clamp(-1, 1)  # a larger one would multiply the roundings of sums near 0
    normed = ops.add_rms_norm(ops.linear_parts(x, weight, bias), torch.zeros(len(x), len(bias)).to(x), gain, 1e-6)[0]
    error = max_error(normed, norm.rms_norm(expected, gain.float(), 1e-6), BF16)
    if len(bias) % 2:
        return error
    return max(error, max_error(ops.gated_linear(x, weight, bias), activation.silu_mul(expected), BF16))


def check_advance() -> float:
    rows, block_size, width = 300, 16, 8
    lens = torch.randint(0, 100, (rows,), device=DEVICE, dtype=torch.int32)
    positions = (lens - 1).clamp_min(0).long()
    tables = torch.randperm(rows * width, device=DEVICE).view(rows, width).int()
    tokens, slots, out = (torch.zeros(n, dtype=torch.long, device=DEVICE) for n in (rows, rows, (rows, 4)))
    step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    live, start = lens > 0, positions.clone()
    ints = torch.zeros(rows, sampler_state.NUM_INTS, dtype=torch.int32, device=DEVICE)
    state_rows = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    some = torch.arange(rows, device=DEVICE) % 3 == 0
    ints[some, sampler_state.MAX_LEN] = (start[some] + 4).int()  # these texts end after three steps
    for i in range(4):
        sampled = torch.arange(rows, device=DEVICE) + 1000 * i
        state = (tokens, positions, lens, slots, tables, out, step, state_rows, ints)
        decode_state.advance(sampled, *state, block_size)
        last = torch.where(some, min(i, 2), i)
        expected, goes_on = torch.where(live, start + last + 1, 0), live & ~(some & (last == 2))
        assert torch.equal(positions, expected)
        block = tables.gather(1, (expected // block_size)[:, None])[:, 0].long()
        assert torch.equal(slots, torch.where(goes_on, block * block_size + expected % block_size, -1))
        assert torch.equal(lens, torch.where(goes_on, expected + 1, 0))
        assert torch.equal(out[:, i], torch.where(live & (last == i), sampled, -1))
    assert step.item() == 4
    return 0.0


def check_jobs() -> list[tuple[str, Callable[[], float]]]:
    jobs = [("norm+silu", check_norm), ("rope", check_rope), ("sampling", check_sampling)]
    jobs += [
        ("gemv", check_gemv),
        ("few rows", check_few_rows),
        ("matmul", check_matmul),
        ("integers", check_integers),
        ("8-bit floats", check_floats),
        ("advance", check_advance),
        ("large cache", check_large_cache),
    ]
    shapes = [(BF16, 64, 3, 16), (BF16, 80, 2, 64), (BF16, 96, 1, 16), (BF16, 128, 2, 256), (BF16, 128, 4, 64)]
    shapes += [(BF16, 192, 1, 64), (BF16, 256, 8, 256), (FP16, 128, 2, 128), (FP32, 64, 3, 16), (BF16, 128, 2, 16)]
    for i, (dtype, head_dim, group, block_size) in enumerate(shapes):
        by_head = i % 4 == 1  # few: no cache of ours is stored so
        label = f"{str(dtype)[6:]} d{head_dim} g{group} bs{block_size}{' by head' if by_head else ''}"
        jobs.append((f"prefill {label}", check_prefill(dtype, head_dim, group, block_size, by_head=by_head)))
        launch = Launch((1, 17, 8)[i % 3])
        run = check_decode(dtype, head_dim, group, block_size, launch, by_head=by_head)
        jobs.append((f"decode {label} s{launch.num_splits}", run))
    ahead = decode.choose_launch(1, 8, 4096, 132)  # asks for its first keys before it waits
    jobs += [
        (f"decode ahead d{d} bs{size}", check_decode(BF16, d, 2, size, ahead))
        for d, size in ((64, 16), (80, 64), (256, 256))
    ]
    jobs.append(("prefill window", check_prefill(BF16, 128, 2, 64, window=100)))
    jobs.append(("prefill window gather", check_prefill(BF16, 128, 2, 16, window=100)))
    jobs.append(("decode window", check_decode(BF16, 128, 2, 64, Launch(4), window=100)))
    jobs += [("mla rope", check_mla_rope), *((f"mla prompt {str(d)[6:]}", check_mla_prompt(d)) for d in (BF16, FP32))]
    for dtype, heads, size, splits in ((BF16, 16, 64, 1), (BF16, 16, 16, 8), (FP16, 128, 256, 4), (FP32, 20, 64, 2)):
        label = f"mla decode {str(dtype)[6:]} h{heads} bs{size} s{splits}"
        jobs.append((label, check_mla_decode(dtype, heads, size, splits)))
    return [(f"check {name}", run) for name, run in jobs]
