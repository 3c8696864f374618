"""Every Triton kernel against its plain twin under Triton's interpreter, on the CPU (`test_triton_interpreter.py`).

Sizes are tiny (the interpreter runs one program at a time in numpy) and sit on both sides of the boundaries that
matter: block size, key tile, query tile, split. Pages are shuffled, unused cache memory is NaN, and padding rows are
present.
"""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm.ops import activation, ngram, norm, sampler_state
from nanovllm.ops.attention import paged_attention_reference
from nanovllm.ops.triton import activation as triton_activation
from nanovllm.ops.triton import decode_attention as decode
from nanovllm.ops.triton import decode_state, drafts, few_rows, gemv, lanes, matmul, qk_norm_rope
from nanovllm.ops.triton import norm as triton_norm
from nanovllm.ops.triton import prefill_attention as prefill
from nanovllm.ops.triton.common import empty_rows
from tests.ops.kernel_rig import caches, paged_cache, rope_twin

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
HEADS = [(head_dim, 3, torch.float32) for head_dim in (64, 80, 128, 192, 256)]  # (head_dim, group, dtype)
HEADS += [(64, 1, torch.float16), (80, 8, torch.bfloat16), (128, 2, torch.bfloat16)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 63, 64, 65])
def test_norm(dtype, size):
    x, residual, weight = (torch.randn(3, size).to(dtype) for _ in range(3))
    weight = weight[0].contiguous()
    close(triton_norm.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))
    for got, expected in zip(
        triton_norm.add_rms_norm(x, residual, weight, 1e-6), norm.add_rms_norm(x, residual, weight, 1e-6)
    ):
        close(got, expected)


def test_norm_in_place_and_strided():
    wide = torch.randn(3, 100)
    x, residual, weight = wide[:, 10:80], torch.randn(3, 70), torch.randn(70)
    expected = norm.add_rms_norm(x, residual, weight, 1e-6)
    normed, same = triton_norm.add_rms_norm(x, residual, weight, 1e-6, residual_out=residual)
    assert same is residual
    close(normed, expected[0])
    close(residual, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025])
def test_silu_mul(dtype, size):
    gate_up = torch.randn(2, 2 * size).to(dtype)
    close(triton_activation.silu_mul(gate_up), activation.silu_mul(gate_up))


@pytest.mark.parametrize(("parts", "size"), [(2, 63), (8, 1025)])
def test_silu_mul_of_parts(parts, size):
    gate_up, like = torch.randn(parts, 3, 2 * size), torch.empty(0, dtype=torch.bfloat16)
    found = triton_activation.silu_mul(gate_up, like=like)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), activation.silu_mul(gate_up.sum(0)), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rot_dim", "has_norm"),
    [
        (torch.float32, *sizes, has_norm)
        for sizes in ((64, 64), (80, 80), (80, 32), (192, 64))
        for has_norm in (True, False)
    ]
    + [
        (torch.float16, 64, 64, False),
        (torch.float16, 80, 32, True),
        (torch.bfloat16, 80, 80, True),
        (torch.bfloat16, 192, 64, False),
    ],
)
def test_qk_norm_rope(dtype, head_dim, rot_dim, has_norm):
    num_q, num_kv, block_size = 5, 2, 4  # an odd number of heads: the last program has one to spare
    two_sizes = head_dim == 64 and dtype == torch.float32 and has_norm
    for num_tokens, by_head in ((3, False), (65, True)) if two_sizes else ((3, rot_dim == 32),):  # 2 and 8 heads each
        qkv = torch.randn(num_tokens, (num_q + 2 * num_kv) * head_dim).to(dtype)
        weights = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype))
        cos_sin = torch.randn(50, rot_dim)
        positions = torch.randint(0, 50, (num_tokens,))
        slots = torch.randperm(80)[:num_tokens]
        slots[1] = -1
        both = caches(20, block_size, num_kv, head_dim, dtype, by_head, "cpu")
        norms = weights if has_norm else None
        q_twin, expected = rope_twin(qkv, norms, cos_sin, positions, torch.stack(both), slots, num_q)
        q = qk_norm_rope.qk_norm_rope(qkv, norms, 1e-6, cos_sin, positions, *both, slots, num_q)
        close(q, q_twin.to(dtype))
        close(torch.stack(both), expected.to(dtype))


def attention_lens(block_size: int, tile: int) -> list[int]:
    edges = {1, 2, block_size, tile, 2 * tile}
    return sorted({n + d for n in edges for d in (-1, 0, 1) if n + d > 0})


@pytest.mark.parametrize(
    ("block_size", "window", "by_head"),
    [(16, None, True), (64, None, False), (48, None, False), (16, 33, False), (64, 33, True), (32, 1, False)],
)
def test_prefill_boundaries(block_size, window, by_head):
    """Whole prompts, chunks after a prefix and decodes in one launch, with an empty sequence and padding among them."""
    block_n = 32
    lens = attention_lens(block_size, block_n)
    new = [1 if i % 3 == 0 else (n if i % 3 == 1 else max(1, n - block_size)) for i, n in enumerate(lens)]
    lens, new = [*lens, 0, 7, 0], [*new, 0, 0, 2]
    num_kv = 2 if by_head else 1
    k, v, context_lens, tables = paged_cache(lens, block_size, num_kv, 16, torch.float32, by_head)
    q = torch.randn(sum(new), 3 * num_kv, 16)
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    args = (q, k, v, starts, context_lens, tables, 0.3, window)
    tile = prefill.PrefillTile(32, block_n, 4, 1)
    close(prefill.prefill_attention(*args, tile=tile), paged_attention_reference(*args))


@pytest.mark.parametrize(("head_dim", "group", "dtype"), HEADS)
def test_prefill_head_dims(dtype, head_dim, group):
    k, v, *rest = paged_cache([5, 20], 16, 2, head_dim, dtype)
    q = torch.randn(7, 2 * group, head_dim).to(dtype)
    args = (q, k, v, torch.tensor([0, 5, 7], dtype=torch.int32), *rest, head_dim**-0.5)
    tile = prefill.PrefillTile(16, 16, 4, 1)
    close(prefill.prefill_attention(*args, tile=tile), paged_attention_reference(*args))


def test_prefill_group_larger_than_tile():
    k, v, *rest = paged_cache([9], 16, 1, 16, torch.float32)
    args = (torch.randn(9, 33, 16), k, v, torch.tensor([0, 9]).int(), *rest, 0.25)
    tile = prefill.PrefillTile(16, 16, 4, 1)
    close(prefill.prefill_attention(*args, tile=tile), paged_attention_reference(*args))


@pytest.mark.parametrize("num_decodes", [1, 15, 16, 17, 40])
def test_prefill_after_decodes(num_decodes):
    """Rows before the first sequence's queries are not written."""
    k, v, *rest = paged_cache([20, 5], 16, 1, 16, torch.float32)
    q = torch.randn(num_decodes + 12, 2, 16)
    starts = torch.tensor([num_decodes, num_decodes + 7, num_decodes + 12], dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    prefill.prefill_attention(q, k, v, starts, *rest, 0.25, out=out, tile=prefill.PrefillTile(32, 16, 4, 1))
    close(out[num_decodes:], paged_attention_reference(q[num_decodes:], k, v, starts - num_decodes, *rest, 0.25))
    assert (out[:num_decodes] == 7.0).all()


def test_prefill_descriptors():
    """The copy-engine path reads whole tiles only; what lies behind the context in the last block may be NaN."""
    k, v, *rest = paged_cache([31, 32, 33, 70], 32, 2, 32, torch.float32)
    q = torch.randn(31 + 32 + 33 + 40, 4, 32)
    args = (q, k, v, torch.tensor([0, 31, 63, 96, 136], dtype=torch.int32), *rest, 0.2)
    tile = prefill.PrefillTile(16, 16, 4, 1, use_desc=True)
    assert prefill._suits_descriptors(k, 16)
    assert not prefill._suits_descriptors(k, 64)
    assert not prefill._suits_descriptors(k.transpose(1, 2), 16)
    close(prefill.prefill_attention(*args, tile=tile), paged_attention_reference(*args))


@pytest.mark.parametrize(
    ("num_splits", "block_size", "window"),
    [(1, 16, None), (1, 64, None), (1, 32, 70), (2, 16, None), (2, 16, 1), (5, 64, None), (5, 32, 70)],
)
def test_decode_boundaries(num_splits, block_size, window):
    lens = [0, 1, 16, 17, 63, 64, 65, 129, 200, 0]
    num_kv = 2 if num_splits == 2 else 1
    k, v, *rest = paged_cache(lens, block_size, num_kv, 16, torch.float32, by_head=num_splits == 2)
    q = torch.randn(len(lens), 3 * num_kv, 16)
    launch = decode.DecodeLaunch(num_splits, 32)
    workspace = decode.DecodeWorkspace.allocate(len(lens), 3 * num_kv, launch, 16, q.device)
    workspace.parts.fill_(float("nan"))
    workspace.logsums.fill_(float("nan"))
    got = decode.decode_attention(q, k, v, *rest, 0.3, launch, window, workspace=workspace)
    close(got, paged_attention_reference(q, k, v, torch.arange(len(lens) + 1), *rest, 0.3, window))
    assert torch.equal(got[0], torch.zeros_like(got[0]))


@pytest.mark.parametrize("num_splits", [decode.MERGE_TILE - 1, decode.MERGE_TILE, decode.MERGE_TILE + 1])
def test_decode_merges_many_parts(num_splits):
    lens = [64 * num_splits, 64 * num_splits - 63, 70]
    k, v, *rest = paged_cache(lens, 64, 1, 16, torch.float32)
    q = torch.randn(3, 2, 16)
    expected = paged_attention_reference(q, k, v, torch.arange(4), *rest, 0.3)
    close(decode.decode_attention(q, k, v, *rest, 0.3, decode.DecodeLaunch(num_splits)), expected)


@pytest.mark.parametrize(("head_dim", "group", "dtype"), [*HEADS, (64, 17, torch.bfloat16)])
def test_decode_head_dims(dtype, head_dim, group):
    k, v, *rest = paged_cache([5, 100], 16, 2, head_dim, dtype)
    q = torch.randn(2, 2 * group, head_dim).to(dtype)
    launch = decode.fit_launch(decode.DecodeLaunch(2), head_dim, q.element_size(), (8, 0))
    got = decode.decode_attention(q, k, v, *rest, head_dim**-0.5, launch)
    close(got, paged_attention_reference(q, k, v, torch.arange(3), *rest, head_dim**-0.5))


def test_decode_launch_rule():
    """The rule as documented: no split when the batch fills the card, none shorter than MIN_KEYS; and two compilations
    for all of them."""
    splits = {batch: decode.choose_launch(batch, 8, 4096, 132).num_splits for batch in range(1, 300)}
    assert [splits[batch] for batch in (1, 2, 3, 4, 5, 8, 16, 32, 48, 57)] == [32, 16, 16, 16, 32, 32, 16, 8, 4, 4]
    assert all(splits[batch] == 1 for batch in range(58, 300))
    assert decode.choose_launch(1, 8, 10**6, 132).num_splits == 32
    assert decode.choose_launch(1, 8, 640, 132).num_splits == 8
    assert decode.choose_launch(1, 8, 63, 132).num_splits == 1
    kinds = {replace(decode.choose_launch(batch, 8, 4096, 132), num_splits=1) for batch in range(1, 300)}
    assert kinds == {decode.DecodeLaunch(1), decode.DecodeLaunch(1, prefetch=True)}


@pytest.mark.parametrize(
    ("head_dim", "element_size", "arch", "expected"),
    [
        (128, 2, (9, 0), (64, 4, 2)),
        (256, 2, (9, 0), (64, 4, 2)),
        (128, 2, (8, 6), (64, 4, 2)),
        (256, 2, (8, 9), (32, 4, 2)),
        (256, 2, (12, 0), (32, 4, 2)),
        (128, 4, (9, 0), (16, 4, 1)),
        (64, 2, (7, 5), (16, 4, 1)),
    ],
)
def test_decode_launch_fits_the_card(head_dim, element_size, arch, expected):
    launch = decode.fit_launch(decode.DecodeLaunch(2), head_dim, element_size, arch)
    assert (launch.block_n, launch.num_warps, launch.num_stages) == expected


@pytest.mark.parametrize(("parts", "size"), [(2, 63), (8, 64)])
def test_norm_of_parts(parts, size):
    """A product that comes in parts, rows with a room behind them."""
    x, residual, weight = torch.randn(parts, 5, size), torch.randn(5, size).bfloat16(), torch.randn(size).bfloat16()
    got, total = triton_norm.add_rms_norm(x, residual, weight, 1e-6)
    assert got.dtype == total.dtype == torch.bfloat16
    expected = (x.sum(0) + residual.float()).bfloat16()
    close(total, expected)
    close(got, norm.rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_of_parts(has_norm):
    qkv, weights = torch.randn(4, 3, 4 * 16), (torch.randn(16), torch.randn(16)) if has_norm else None
    table, positions, slots = torch.randn(40, 16), torch.tensor([3, 0, 39]), torch.tensor([7, -1, 2])
    found = []
    for product in (qkv, qkv.sum(0)):
        cache = torch.zeros(2, 2, 8, 1, 16)
        q = qk_norm_rope.qk_norm_rope(product, weights, 1e-6, table, positions, cache[0], cache[1], slots, 2)
        found.append((q, cache))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


MATMULS = [  # rows, outputs, inputs, splits, room behind x
    (3, 80, 64, 1, True),
    (16, 64, 128, 2, True),
    (17, 70, 256, 4, False),
    (40, 130, 64, 1, True),
]


@pytest.mark.parametrize(("rows", "outputs", "size", "splits", "has_room"), MATMULS)
def test_matmul(rows, outputs, size, splits, has_room):
    weight, bias = (torch.randn(outputs, size) / size**0.5).half(), torch.randn(outputs).half()
    x = torch.randn(rows, size).half()
    if has_room:  # whatever lies there
        room = empty_rows(rows, size, weight)
        assert room._base.fill_(torch.nan).shape[0] % 16 == 0
        x = room.copy_(x)
    launch = matmul.MatmulLaunch(16, 32, 1, splits)
    expected = torch.nn.functional.linear(x.float(), weight.float())
    for added in (None, bias):
        got = matmul.matmul(x, weight, launch, added)
        assert got.shape == ((rows, outputs) if splits == 1 else (splits, rows, outputs))
        total = got.float() if splits == 1 else got.sum(0)
        whole = expected if added is None else expected + added.float()
        torch.testing.assert_close(total, whole, rtol=2e-3, atol=4e-3)
        if splits == 1:
            gated = matmul.matmul(x, weight, launch, added, gated=True)
            torch.testing.assert_close(gated.float(), activation.silu_mul(whole), rtol=2e-3, atol=4e-3)


def test_matmul_rule():
    """Splits for two programs a multiprocessor, of whole steps; nothing where cuBLAS is faster."""
    launch = matmul.choose_launch
    assert launch(8, 1024, 2048) == matmul.MatmulLaunch(16, 128, 4, 8)
    assert launch(64, 4096, 1024) == matmul.MatmulLaunch(64, 128, 3, 4)  # 8 steps: pieces of two
    assert launch(20, 3072, 1024, gated=True) == matmul.MatmulLaunch(32, 128, 4)
    assert launch(128, 1024, 3072).splits == 8
    assert launch(128, 4096, 1024) is None
    assert launch(65, 3072, 1024, gated=True) is None
    assert launch(64, 6144, 4096) is None
    assert launch(64, 4096, 12288).splits == 4
    assert launch(9, 576, 576) is None  # no multiple of a step


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1024), (8, 96), (5, 200)])
def test_few_rows(rows, size):
    x, weight, bias = torch.randn(rows, size), torch.randn(42, size) / size**0.5, torch.randn(42)
    gain, residual = torch.randn(size), torch.randn(rows, 42)
    tile = (16, 32, 2)
    torch.testing.assert_close(few_rows.few_rows_linear(x, weight, bias, tile=tile), x @ weight.T + bias)
    normed = norm.rms_norm(x, gain, 1e-5)
    got = few_rows.few_rows_linear(x, weight, norm=(gain, 1e-5), residual=residual, tile=tile)
    torch.testing.assert_close(got, normed @ weight.T + residual, rtol=1e-4, atol=1e-5)
    got = few_rows.few_rows_linear(x, weight, bias, norm=(gain, 1e-5), gated=True, tile=tile)
    torch.testing.assert_close(got, activation.silu_mul(normed @ weight.T + bias), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (1, 576), (1, 1024), (2, 576), (3, 1024), (8, 64)])
def test_gemv(rows, size):
    x, weight, bias = torch.randn(rows, size), torch.randn(21, size) / size**0.5, torch.randn(21)
    torch.testing.assert_close(gemv.gemv(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gemv.gemv(x, weight, bias), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemv_fusions(dtype):
    rows, size = 2, 96
    x, weight = torch.randn(rows, size).to(dtype), (torch.randn(22, size) / 10).to(dtype)
    gain, residual = torch.randn(size).to(dtype), torch.randn(rows, 22).to(dtype)
    normed = norm.rms_norm(x.float(), gain.float(), 1e-5)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    got = gemv.gemv(x, weight, norm=(gain, 1e-5), gated=True)
    torch.testing.assert_close(got.float(), activation.silu_mul(normed @ weight.float().T), **tolerance)
    expected = x.float() @ weight.float().T + residual.float()
    got = gemv.gemv(x, weight, residual=residual, out=residual)
    assert got is residual
    torch.testing.assert_close(got.float(), expected, **tolerance)


@pytest.mark.parametrize(("num", "lookup"), [(1, (1, 1)), (3, (2, 3)), (4, (1, 5)), (7, (3, 4))])
def test_propose_and_accept(num, lookup, monkeypatch):
    """Of lanes that are padding, whose text does not repeat itself, that have penalties, and around a tile of 8."""
    monkeypatch.setattr(drafts, "TILE", 8)
    rng, block_size, width = np.random.default_rng(num), 4, 40
    lens = [1, 2, 7, 8, 9, 10, 17, 18, 25, 32, 12, 14]
    rows = torch.tensor([*rng.permutation(len(lens)), -1], dtype=torch.int32)
    history = torch.from_numpy(rng.integers(0, 3, (len(lens), width)).astype(np.int32))
    history[3, :8] = torch.arange(8)  # nothing repeats
    tables = torch.from_numpy(rng.permutation(len(lens) * 12).reshape(len(lens), 12).astype(np.int32))
    state = sampler_state.SamplerState.allocate(len(lens), 3, torch.device("cpu"))
    state.ints[::2, sampler_state.ROW_FLAGS] = sampler_state.FLAG_PENALTIES
    state.ints[1::2, sampler_state.ROW_FLAGS] = 255 - sampler_state.FLAG_PENALTIES
    state.recent.fill_(-1)
    ends = torch.tensor([lens[row] - 1 if row >= 0 else 5 for row in rows.tolist()])
    count, kinds = len(rows) * (1 + num), (torch.int32, torch.int64, torch.int64, torch.int32, torch.int64)
    fed = tuple(torch.full((count,), 77, dtype=kind) for kind in kinds)
    drafts.propose((rows, ends), history, tables, state.recent, fed, lookup, num, block_size)
    drawn = torch.from_numpy(rng.integers(0, 3, count))
    samples, steps = torch.zeros(count, 3, dtype=torch.int64), torch.ones(len(rows), dtype=torch.int32)
    kept, guessed = torch.zeros(len(rows), 3, dtype=torch.int32), torch.zeros(len(rows), 3, dtype=torch.int32)
    before = history.clone()
    drafts.accept((rows, ends, steps), history, fed, drawn, (samples, kept, guessed), state, num)
    for lane, row in enumerate(rows.tolist()):
        own = [part.view(-1, 1 + num)[lane].tolist() for part in fed]
        if row < 0:
            assert own == [[-1] * (1 + num), [0] * (1 + num), [0] * (1 + num), [0] * (1 + num), [-1] * (1 + num)]
            assert (steps[lane], ends[lane], kept[lane].tolist()) == (1, 5, [0, 0, 0])
            continue
        text = before[row, : lens[row]].numpy()
        first = ngram.find(text, *lookup, num)
        tokens = [int(text[-1]), *text[first : first + num].tolist()]
        places = [len(text) - 1 + i for i in range(len(tokens))]
        rest = 1 + num - len(tokens)
        assert own[0] == [row] * len(tokens) + [-1] * rest
        assert own[1] == tokens + [0] * rest
        assert own[2] == places + [0] * rest
        assert own[3] == [place + 1 for place in places] + [0] * rest
        slots = [int(tables[row, p // block_size]) * block_size + p % block_size for p in places]
        assert own[4] == slots + [-1] * rest
        recent = {place % sampler_state.RECENT: token for place, token in zip(places[1:], tokens[1:])}
        assert {at: token for at, token in enumerate(state.recent[row].tolist()) if token != -1} == recent
        new = drawn.view(-1, 1 + num)[lane].tolist()
        right = 0
        while right + 1 < len(tokens) and tokens[right + 1] == new[right]:
            right += 1
        assert history[row, len(text) : len(text) + right + 1].tolist() == new[: right + 1]
        assert torch.equal(history[row, len(text) + right + 1 :], before[row, len(text) + right + 1 :])
        assert (int(ends[lane]), int(steps[lane])) == (len(text) + right, 2)
        counts = np.bincount(new[: right + 1], minlength=3).tolist() if row % 2 == 0 else [0, 0, 0]
        assert state.counts[row].tolist() == counts
        assert state.ints[row, sampler_state.COUNTED] == (len(text) + right if row % 2 == 0 else 0)
        assert (kept[lane].tolist(), guessed[lane].tolist()) == ([0, right + 1, 0], [0, len(tokens) - 1, 0])
        assert samples.view(len(rows), 1 + num, 3)[lane, :, 1].tolist() == new
    assert (guessed[:, 1] == 0).any()
    assert (kept[:, 1] > 1).any()


@pytest.mark.parametrize("places", [range(-1, 1), range(2, 3), range(4)])
def test_feed(places):
    """Tokens of the text before and behind its end, the newest of them just drawn; of lanes that are padding, that
    begin, and that end with the text's room."""
    width, block_size, count = 12, 4, len(places)
    rows, ends = torch.tensor([1, -1, 2, 0, 3], dtype=torch.int32), torch.tensor([5, 7, 6, 0, 10])
    history = torch.arange(4 * width, dtype=torch.int32).view(4, width)
    tables = torch.tensor([[5, 6, 7], [2, 0, 1], [8, 9, 3], [11, 4, 10]], dtype=torch.int32)
    drawn = torch.tensor([70, 71, 72, 73, 74]) if places.stop > 1 else None
    kinds = (torch.int32, torch.int64, torch.int64, torch.int32, torch.int64)
    fed = tuple(torch.full((5 * count,), 77, dtype=kind) for kind in kinds)
    before = history.clone()
    drafts.feed((rows, ends), history, tables, drawn, places, block_size, fed)
    expected = before.clone()
    for lane, row in enumerate(rows.tolist()):
        for i, place in enumerate(places):
            at = int(ends[lane]) + place
            found = [int(part.view(5, count)[lane, i]) for part in fed]
            if row < 0 or not 0 <= at < width:
                assert found == [-1, 0, 0, 0, -1]
                continue
            is_newest = drawn is not None and i == count - 1
            token = int(drawn[lane]) if is_newest else int(before[row, at])
            slot = int(tables[row, at // block_size]) * block_size + at % block_size
            assert found == [row, token, at, at + 1, slot]
            if is_newest:
                expected[row, at] = token
    assert torch.equal(history, expected)


def test_advance():
    block_size, rows = 4, 5
    context_lens = torch.tensor([4, 0, 3, 8, 1], dtype=torch.int32)
    positions = context_lens.long() - 1
    positions[1] = 0
    tokens, slots = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 99)
    tables = torch.tensor([[3, 1], [0, 0], [4, 0], [6, 5], [2, 0]], dtype=torch.int32)
    out, step = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    sampled = torch.arange(10, 15)
    lane_rows = torch.tensor([0, -1, 1, 2, 3], dtype=torch.int32)
    ints = torch.zeros(4, sampler_state.NUM_INTS, dtype=torch.int32)
    ends = (lane_rows, ints, block_size)
    decode_state.advance(sampled, tokens, positions, context_lens, slots, tables, out, step, *ends)
    assert tokens.tolist() == [10, 0, 12, 13, 14]
    assert positions.tolist() == [4, 0, 3, 8, 1]
    assert context_lens.tolist() == [5, 0, 4, 9, 2]
    # Row 0 enters its second block, row 1 is padding, row 3 has outgrown its table.
    assert slots.tolist() == [1 * 4, -1, 4 * 4 + 3, -1, 2 * 4 + 1]
    decode_state.advance(sampled + 10, tokens, positions, context_lens, slots, tables, out, step, *ends)
    assert out.tolist() == [[10, 20], [-1, -1], [12, 22], [13, 23], [14, 24]]
    assert step.item() == 2
    assert slots.tolist() == [1 * 4 + 1, -1, 0 * 4, -1, 2 * 4 + 2]


def test_a_text_that_has_ended_is_not_computed_on():
    """By its length or by one of eight stop tokens, but not before min_tokens; also in a visit planned before."""
    block_size, lens = 16, [5, 5, 5, 5, 5]
    rows = torch.tensor([3, 0, 2, 1, -1], dtype=torch.int32)
    ints = torch.zeros(4, sampler_state.NUM_INTS, dtype=torch.int32)
    columns = [sampler_state.MAX_LEN, sampler_state.STOPS_FROM, sampler_state.FIRST_STOP + 7]
    ints[:, columns] = torch.tensor([[100, 0, 42], [100, 7, 42], [7, 0, 0], [8, 0, 1]], dtype=torch.int32)
    tables = torch.arange(1, 6, dtype=torch.int32)[:, None]
    row_tokens, row_tables = torch.arange(4), tables[[1, 3, 2, 0]].contiguous()
    lanes_of = (torch.zeros(5).long(), torch.zeros(5).long(), torch.zeros(5).int(), torch.zeros(5).long())
    tokens, _, context_lens, slots = lanes_of
    state = (row_tokens, row_tables, ints)
    sent = torch.full((5,), -1, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32) - 1
    lanes.begin(rows, *sent, state, (*lanes_of, tables), block_size, 1)
    assert context_lens.tolist() == [5, 5, 5, 5, 0]
    out, step = torch.full((5, 4), -7), torch.zeros(1, dtype=torch.int32)
    ends = (rows, ints, block_size)
    found = []
    for sampled in ([9, 41, 9, 41, 9], [8, 8, 8, 41, 8], [7] * 5):
        decode_state.advance(torch.tensor(sampled), *lanes_of, tables, out, step, *ends)
        found.append(context_lens.tolist())
    # 41 ends row 0 at once, row 1 from position 7 on; rows 2 and 3 end with 7 and 8 tokens.
    assert found == [[6, 0, 6, 6, 0], [7, 0, 0, 7, 0], [0, 0, 0, 8, 0]]
    assert out[:, :3].tolist() == [[9, 8, 7], [41, -1, -1], [9, 8, -1], [41, 41, 7], [-1, -1, -1]]
    assert slots.tolist() == [-1, -1, -1, 4 * 16 + 7, -1]
    assert tokens[:4].tolist() == [7, 41, 8, 7]
    following = torch.tensor(lens, dtype=torch.int32) + 2
    lanes.begin(rows, sent[0], following, state, (*lanes_of, tables), block_size, 1)
    assert context_lens.tolist() == [0, 0, 0, 8, 0]
    assert slots.tolist() == [-1, -1, -1, 4 * 16 + 7, -1]
