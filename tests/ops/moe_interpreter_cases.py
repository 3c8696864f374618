"""The mixture-of-experts kernels against their twins under Triton's interpreter (`test_triton_interpreter.py`).

Tiny experts, every path forced in turn. Sizes sit around BLOCK_M, tokens meet at one expert or none, experts stay
empty, rows name an expert twice, pairs have no buffer, and weights are views of a pool whose buffers lie apart.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.ops import moe
from nanovllm.ops.triton import moe_align, moe_experts, moe_grouped, moe_route
from nanovllm.ops.triton.moe_tiles import Tile, TileChoice

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GEMV = TileChoice("gemv", 1, Tile(8, 32, 1, 1), Tile(16, 16, 1, 1))
TILES = TileChoice("tiles", 16, Tile(16, 16, 4, 1), Tile(32, 32, 4, 1))
WIDE = TileChoice("tiles", 32, Tile(64, 64, 4, 1), Tile(16, 16, 4, 1))
GROUPED = TileChoice("grouped", 16)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


DENSE = (24, 20, (24, 20), None, torch.float32)
# Columns of gate and up, size, [outputs, columns] of down, rows of `between`, dtype. Low-rank: gate and up read halves.
LOW_RANK = [
    (8, 20, (24, 16), 16, torch.float32),
    (24, 20, (8, 20), None, torch.float32),
    (32, 48, (16, 8), 8, torch.float16),
]
CHOICES = {"gemv": GEMV, "tiles": TILES, "wide": WIDE, "grouped": GROUPED}


def choices(*names):
    return pytest.mark.parametrize("choice", [CHOICES[name] for name in names], ids=names)


def pool_of(num_buffers, shape, gap=8):
    """(gate_up, down) as views of one pool, `gap` NaN elements between its buffers."""
    columns, size, down, _, dtype = shape
    first, second = 2 * size * columns, down[0] * down[1]
    pool = (torch.randn(num_buffers, first + second + gap) * columns**-0.5).to(dtype)
    pool[:, first + second :] = float("nan")
    gate_up = pool[:, :first].view(num_buffers, 2 * size, columns)
    return gate_up, pool[:, first : first + second].view(num_buffers, *down)


def reference(x, gate_up, down, buffers, weights):
    """Pair by pair in fp32; the SiLU product rounded as the contract says. -1: zeros."""
    out = torch.zeros(*buffers.shape, x.shape[1])
    for t, j in torch.nonzero(buffers >= 0).tolist():
        s = buffers[t, j]
        gate, up = (gate_up[s].float() @ x[t].float()).chunk(2)
        active = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
        out[t, j] = weights[t, j] * (down[s].float() @ active)
    return out


def check(choice, num_tokens, num_buffers, top_k, hidden=24, size=20, dtype=torch.float32, buffers=None):
    x = torch.randn(num_tokens, hidden).to(dtype)
    gate_up, down = pool_of(num_buffers, (hidden, size, (hidden, size), None, dtype))
    ids, weights = moe.route(torch.randn(num_tokens, num_buffers), top_k, False)
    buffers = ids if buffers is None else buffers
    out = torch.full((num_tokens, top_k, hidden), 7.0, dtype=dtype)
    got = moe_experts.expert_pairs(x, gate_up, down, buffers, weights, out=out, choice=choice)
    assert got is out
    expected = reference(x, gate_up, down, buffers, weights)
    expected[buffers < 0] = 7.0
    torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (out[buffers < 0] == 7.0).all()


@choices("gemv", "tiles", "wide", "grouped")
@pytest.mark.parametrize(
    ("num_tokens", "num_buffers", "top_k"), [(1, 1, 1), (1, 8, 2), (2, 60, 8), (15, 4, 2), (16, 4, 1), (17, 8, 2)]
)
def test_experts(choice, num_tokens, num_buffers, top_k):
    if choice is GEMV and num_tokens > 2:
        pytest.skip("the boundaries of tiles")
    check(choice, num_tokens, num_buffers, top_k)


@choices("tiles", "wide")
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 33])
def test_one_expert_takes_all(choice, num_tokens):
    check(choice, num_tokens, 4, 1, buffers=torch.full((num_tokens, 1), 2, dtype=torch.int32))


@choices("gemv", "tiles", "wide", "grouped")
def test_holes_and_repeats(choice):
    """-1 leaves a row untouched; a token may name an expert twice; buffers 0, 3 and 5 are empty."""
    buffers = torch.tensor([[1, 1], [-1, 2], [4, -1], [-1, -1], [2, 1]], dtype=torch.int32)
    check(choice, 5, 6, 2, buffers=buffers)
    check(choice, 5, 6, 2, buffers=torch.full_like(buffers, -1))


@choices("gemv", "tiles", "grouped")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "size"), [(32, 48), (64, 16)])
def test_dtypes_and_whole_tiles(choice, dtype, hidden, size):
    check(choice, 5, 4, 2, hidden, size, dtype)


@choices("gemv", "tiles", "wide")
@pytest.mark.parametrize("shape", [DENSE, *LOW_RANK], ids=str)
def test_several_passes_give_the_bits_of_one_which_are_near_the_twins(choice, shape):
    """Other passes, and a pool in which the experts lie elsewhere."""
    columns, size, _, rows, dtype = shape
    num_tokens = 3 if choice is GEMV else 19
    gate_up, down = pool_of(6, shape)
    between = None if rows is None else (torch.randn(rows, size) * size**-0.5).to(dtype)
    x = torch.randn(num_tokens, columns if shape is DENSE else 2 * columns).to(dtype)
    ids, weights = moe.route(torch.randn(num_tokens, 6), 2, True)
    whole = moe_experts.expert_pairs(x, gate_up, down, ids, weights, choice=choice, between=between)
    expected = moe.expert_pairs(x, gate_up, down, ids, weights, between=between)
    torch.testing.assert_close(whole, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    elsewhere = torch.tensor([7, 2, 9, 0, 4, 5], dtype=torch.int32)
    far_up, far_down = pool_of(11, shape)
    far_up[elsewhere], far_down[elsewhere] = gate_up, down
    out = torch.full_like(whole, float("nan"))
    for experts in ([0], [5, 2], [1, 3, 4]):
        buffers = torch.where(torch.isin(ids, torch.tensor(experts)), elsewhere[ids], -1).int()
        moe_experts.expert_pairs(x, far_up, far_down, buffers, weights, out=out, choice=choice, between=between)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("shape", [DENSE, LOW_RANK[0]], ids=["dense", "low-rank"])
def test_default_choices_run_here(shape):
    for num_tokens in (0, 1, 2, 3, 17):
        gate_up, down = pool_of(4, shape)
        x = torch.randn(num_tokens, 24 if shape is DENSE else 16)
        between = None if shape is DENSE else torch.randn(16, 20)
        ids, weights = moe.route(torch.randn(num_tokens, 4), 2, True)
        got = moe_experts.expert_pairs(x, gate_up, down, ids, weights, between=between)
        expected = moe.expert_pairs(x, gate_up, down, ids, weights, between=between)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- align ---------------------------------------------------------------------------------------------------------


def check_alignment(buffers, num_buffers, block_m):
    found = moe_align.align(buffers, num_buffers, block_m)
    flat = buffers.flatten()
    counts = torch.bincount(flat[flat >= 0], minlength=num_buffers)
    ends = counts.cumsum(0)
    assert torch.equal(found.ends.long(), ends)
    order = flat.sort(stable=True).indices[(flat < 0).sum() :]
    assert torch.equal(found.order[: len(order)].long(), order)
    blocks = [
        (s, start, int(ends[s]))
        for s in range(num_buffers)
        for start in range(int(ends[s] - counts[s]), int(ends[s]), block_m)
    ]
    assert found.num_blocks.item() == len(blocks)
    assert len(blocks) <= len(found.blocks)
    assert [tuple(row) for row in found.blocks[: len(blocks)].tolist()] == blocks


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_align(data):
    num_buffers = data.draw(st.sampled_from([1, 2, 7, 8, 9, 60, 300]))
    top_k = data.draw(st.sampled_from([1, 2, 8]))
    num_tokens = data.draw(st.sampled_from([1, 2, 15, 16, 17, 33]))
    used = data.draw(st.lists(st.integers(-1, num_buffers - 1), min_size=1, max_size=5))
    picks = data.draw(st.lists(st.sampled_from(used), min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    buffers = torch.tensor(picks, dtype=torch.int32).view(num_tokens, top_k)
    check_alignment(buffers, num_buffers, data.draw(st.sampled_from([16, 32])))


@pytest.mark.parametrize("num_pairs", [511, 512, 513, 767, 769, 1500])
def test_align_with_several_programs(num_pairs):
    check_alignment(torch.randint(-1, 9, (num_pairs, 1), dtype=torch.int32), 9, 16)
    check_alignment(torch.full((num_pairs, 1), 3, dtype=torch.int32), 5, 16)


@pytest.mark.parametrize(("limit", "rows"), [(4, 600), (20, 5300)])
def test_align_with_longer_stretches(limit, rows, monkeypatch):
    """More pairs than MAX_PROGRAMS stretches of the usual length; and more programs than one tile of counts."""
    monkeypatch.setattr(moe_align, "MAX_PROGRAMS", limit)
    check_alignment(torch.randint(-1, 6, (rows, 2), dtype=torch.int32), 6, 64)


def test_gather_and_scatter():
    buffers = torch.tensor([[2, 0], [-1, 2], [0, -1]], dtype=torch.int32)
    rows = moe_align.align(buffers, 3, 16)
    x = torch.randn(3, 40)
    gathered = moe_grouped.gather_rows(x, rows, 2)
    assert torch.equal(gathered[:4], x[[0, 2, 0, 1]])
    weights, out = torch.rand(3, 2), torch.zeros(3, 2, 40)
    moe_grouped.scatter_rows(gathered, rows, weights, out)
    expected = torch.where((buffers >= 0)[:, :, None], weights[:, :, None] * x[:, None], 0.0)
    assert torch.equal(out, expected)


# ---- route and sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 4), (8, 2), (60, 8), (64, 6), (128, 8), (256, 3)])
def test_route(num_experts, top_k, renormalise):
    logits = torch.randn(5, num_experts + 3)[:, :num_experts]
    logits[1] = 0.5  # all equal
    logits[3, ::2], logits[3, 1::2] = 0.0, -0.0  # equal, though not in their bits
    logits[4] = -logits[4].abs()
    logits[2, num_experts // 2 :] = -1e4  # probabilities that are 0 in fp32 have an order still
    for x in (logits, logits.bfloat16()):
        ids, weights = moe_route.route(x, top_k, renormalise)
        expected_ids, expected = moe.route(x, top_k, renormalise)
        assert torch.equal(ids, expected_ids)
        assert ids.dtype == torch.int32
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "top_groups", "top_k"), [(256, 8, 4, 8), (60, 5, 2, 6), (8, 4, 1, 2)]
)
def test_route_by_groups(num_experts, num_groups, top_groups, top_k, with_bias):
    logits, bias = torch.randn(6, num_experts), torch.randn(num_experts) - 2 if with_bias else None
    logits[1] = 0.5
    for renormalise, scale in ((True, 2.5), (False, 1.0)):
        choice = (top_k, renormalise, scale, num_groups, top_groups, bias)
        (ids, weights), (expected_ids, expected) = moe_route.route(logits, *choice), moe.route(logits, *choice)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_route_of_bad_rows_stays_in_range():
    logits = torch.randn(3, 7)
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("nan")
    ids, weights = moe_route.route(logits, 3, True)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 7 for row in ids.tolist())
    assert 3 not in ids[2]
    assert weights.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter truncates to bf16
@pytest.mark.parametrize(("top_k", "hidden"), [(1, 5), (2, 64), (8, 1025)])
def test_sum_pairs(top_k, hidden, dtype):
    pairs = torch.randn(3, top_k, hidden).to(dtype)
    assert torch.equal(moe_route.sum_pairs(pairs), moe.sum_pairs(pairs))
    more = torch.randn(3, hidden).to(dtype)
    assert torch.equal(moe_route.sum_pairs(pairs, more), moe.sum_pairs(pairs) + more)
