"""The plain mixture-of-experts operators against transformers' own, their promise about passes, and the tile table."""

import json

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from nanovllm.errors import ConfigError
from nanovllm.ops import moe

pytest.importorskip("triton")

from nanovllm.ops.triton import moe_tiles
from nanovllm.ops.triton.moe_tiles import MoeShape, Tile, TileChoice

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HIDDEN, SIZE = 32, 64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def block_of(name, num_experts, top_k, renormalise):
    """A sparse block of transformers and (router, gate_up [E, 2I, H], down [E, H, I])."""
    if name == "mixtral":
        config = MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=SIZE, num_local_experts=num_experts, num_experts_per_tok=top_k
        )
        block = modeling_mixtral.MixtralSparseMoeBlock(config)
    else:
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=SIZE,
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=renormalise,
        )
        block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape) / 6
    return block, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj


@pytest.mark.parametrize(
    ("name", "num_experts", "top_k", "renormalise"),
    [("mixtral", 8, 2, True), ("mixtral", 4, 1, True), ("qwen3", 60, 8, True), ("qwen3", 16, 4, False)],
)
@pytest.mark.parametrize("num_tokens", [1, 7, 50])
def test_a_layer_equals_transformers(name, num_experts, top_k, renormalise, num_tokens):
    block, router, gate_up, down = block_of(name, num_experts, top_k, renormalise)
    x = torch.randn(num_tokens, HIDDEN)
    with torch.no_grad():
        expected = block(x[None])
        expected = (expected[0] if isinstance(expected, tuple) else expected).view(num_tokens, HIDDEN)
        ids, weights = moe.route(x @ router.T, top_k, renormalise)
        got = moe.sum_pairs(moe.expert_pairs(x, gate_up, down, ids, weights))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_route_by_groups_by_hand():
    """Groups (0, 1), (2, 3), (4, 5). By softmax the best expert counts, by sigmoid and bias the sum of two; excluded
    experts are out even where score + bias is negative; weights are without bias."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 1.0, 1.0]])
    assert moe.route(logits, 2, False, 1.0, 3, 1)[0].tolist() == [[0, 1]]
    bias = torch.full((6,), -2.0)
    ids, weights = moe.route(logits, 3, True, 2.5, 3, 2, bias)
    assert ids.tolist() == [[2, 3, 4]]
    scores = logits.sigmoid()[0, [2, 3, 4]]
    torch.testing.assert_close(weights[0], 2.5 * scores / scores.sum())
    bias[5] = 0.0
    assert moe.route(logits, 3, True, 1.0, 3, 2, bias)[0].tolist() == [[5, 2, 3]]


def test_route_by_hand():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-200.0, -300.0, 0.0, -100.0]])
    ids, weights = moe.route(logits, 2, False)
    assert ids.tolist() == [[1, 2], [2, 3]]  # equal: lower id first; probability 0 in fp32: by logit still
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids.long()))
    torch.testing.assert_close(moe.route(logits, 2, True)[1], torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)


# Columns of gate and up, size, [outputs, columns] of down, rows of `between`, whether gate and up read halves.
DENSE = [
    (n, size, (n, size), None, False) for n, size in ((32, 64), (128, 256), (24, 20))
]  # last: no whole cache lines
SIZES = ((16, 64, (8, 64), None), (16, 64, (40, 24), 24), (8, 40, (48, 16), 16), (24, 20, (7, 20), None))
LOW_RANK = [(*sizes, True) for sizes in SIZES]
every_shape = pytest.mark.parametrize("shape", DENSE + LOW_RANK, ids=str)


def pool_of(num_buffers, shape, dtype):
    """(gate_up, down) as views of one pool whose buffers have room for more."""
    columns, size, down, *_ = shape
    first, second = 2 * size * columns, down[0] * down[1]
    pool = (torch.randn(num_buffers, first + second + 24) * columns**-0.5).to(dtype)
    return pool[:, :first].view(num_buffers, 2 * size, columns), pool[:, first:][:, :second].view(num_buffers, *down)


def rest_of(num_tokens, shape, dtype):
    """x and `between`."""
    columns, size, _, rows, is_split = shape
    between = None if rows is None else (torch.randn(rows, size) * size**-0.5).to(dtype)
    return torch.randn(num_tokens, columns * (1 + is_split)).to(dtype), between


@pytest.mark.parametrize("dtype", DTYPES)
@every_shape
@pytest.mark.parametrize("num_tokens", [1, 2, 37, 150])
def test_several_passes_give_the_bits_of_one(dtype, shape, num_tokens):
    gate_up, down = pool_of(8, shape, dtype)
    x, between = rest_of(num_tokens, shape, dtype)
    ids, weights = moe.route(torch.randn(num_tokens, 8), 2, True)
    whole = moe.expert_pairs(x, gate_up.contiguous(), down.contiguous(), ids, weights, between=between)
    elsewhere = torch.tensor([9, 2, 10, 0, 4, 5, 1, 7])
    far_up, far_down = pool_of(11, shape, dtype)
    far_up[elsewhere], far_down[elsewhere] = gate_up, down
    out = torch.full_like(whole, float("nan"))
    for some in ([0], [6, 2], [], [1, 3, 4], [5, 7]):
        buffers = torch.where(torch.isin(ids, torch.tensor(some)), elsewhere[ids], -1).int()
        moe.expert_pairs(x, far_up, far_down, buffers, weights, out=out, between=between)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@every_shape
def test_every_pair_by_the_formula_and_rows_without_a_buffer_are_kept(dtype, shape):
    gate_up, down = pool_of(5, shape, dtype)
    (x, between), weights = rest_of(4, shape, dtype), torch.rand(4, 2)
    buffers = torch.tensor([[3, 3], [-1, 0], [4, -1], [-1, -1]], dtype=torch.int32)
    out = torch.full((4, 2, down.shape[1]), 7.0, dtype=dtype)
    assert moe.expert_pairs(x, gate_up, down, buffers, weights, out, between=between) is out
    assert (out[buffers < 0] == 7.0).all()
    columns = gate_up.shape[2]
    for t, j in torch.nonzero(buffers >= 0).tolist():
        gate, up = gate_up[buffers[t, j]].float().chunk(2)
        active = torch.nn.functional.silu(gate @ x[t, :columns].float()) * (up @ x[t, -columns:].float())
        active = active if between is None else between.float() @ active
        expected = weights[t, j] * (down[buffers[t, j]].float() @ active)
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(out[t, j].float(), expected, rtol=tolerance, atol=tolerance)
    empty = moe.expert_pairs(x[:0], gate_up, down, buffers[:0], weights[:0], between=between)
    assert empty.shape == (0, 2, down.shape[1])


def test_sum_pairs_rounds_once():
    pairs = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)  # 257 is not a bf16, 258 is
    assert moe.sum_pairs(pairs).item() == 258.0


# ---- tiles ---------------------------------------------------------------------------------------------------------

MIXTRAL = MoeShape(4096, 14336, 2, torch.bfloat16)
HOPPER = (9, 0)


def test_the_rule():
    rule = {1: "gemv 1", 2: "gemv 1", 3: "tiles 16", 16: "tiles 16", 17: "tiles 64", 128: "tiles 64"}
    rule |= {129: "tiles 128", 512: "tiles 128", 513: "tiles 128", 3071: "tiles 128", 3072: "grouped 128"}
    choices = {n: moe_tiles.default_tiles(n, MIXTRAL, HOPPER) for n in rule}
    assert {n: f"{choice.kind} {choice.block_m}" for n, choice in choices.items()} == rule
    many = MoeShape(2048, 768, 8, torch.bfloat16)
    choices = [moe_tiles.default_tiles(n, many, HOPPER) for n in (4, 5, 64, 65, 512, 513)]
    assert [choice.block_m for choice in choices] == [1, 16, 16, 64, 64, 128]


def test_the_grouped_product_is_for_hopper_and_bf16():
    for shape, arch in [
        (MIXTRAL, (8, 0)),
        (MIXTRAL, (10, 0)),
        (MoeShape(4096, 14336, 2, torch.float16), HOPPER),
        (MoeShape(4096, 14340, 2, torch.bfloat16), HOPPER),
        (MoeShape(2048, 768, 8, torch.bfloat16), HOPPER),
    ]:
        assert not moe_tiles.uses_grouped(16384, shape, arch)
    assert moe_tiles.uses_grouped(16384, MIXTRAL, HOPPER)


def test_low_rank_experts_have_plans_of_their_own():
    """No grouped product, no entries that were measured of dense experts, and a second product of other sizes."""
    low_rank = MoeShape(1024, 14336, 2, torch.bfloat16, (4096, 1024))
    assert not moe_tiles.uses_grouped(16384, low_rank, HOPPER)
    assert moe_tiles.default_tiles(16384, low_rank, HOPPER).kind == "tiles"
    small = MoeShape(1024, 14336, 2, torch.bfloat16, (4096, 256))
    assert moe_tiles.default_tiles(1, small, HOPPER).down.block_k == 256


@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("low_rank", [False, True])
def test_stages_fit_the_shared_memory(arch, low_rank):
    """Of low-rank experts gate and up read rows of their own."""
    shape = (
        MoeShape(1024, 14336, 2, torch.float16, (4096, 1024)) if low_rank else MoeShape(4096, 14336, 2, torch.float16)
    )
    limit = moe_tiles.SHARED.get(arch, moe_tiles.LEAST_SHARED)
    for num_tokens in (3, 17, 65, 129, 513):
        choice = moe_tiles.default_tiles(num_tokens, shape, arch)
        for tile, num_weights, num_rows in ((choice.gate_up, 2, 1 + low_rank), (choice.down, 1, 1)):
            numbers = (num_rows * choice.block_m + num_weights * tile.block_n) * tile.block_k
            assert tile.num_stages * numbers * 2 <= limit
            assert tile.num_stages >= 2


@pytest.mark.parametrize("arch", [(7, 5), (8, 0), (8, 9), HOPPER])
@pytest.mark.parametrize("sizes", [(4096, 14336, 2), (2048, 768, 8), (7168, 2048, 8)])
def test_tiles_of_8_bit_floats(arch, sizes):
    """Steps over columns stay in a block of 128, and rows of a program in one; never PyTorch's grouped product."""
    *dims, top_k = sizes
    shape = MoeShape(*dims, top_k, torch.bfloat16, eight_bits=True)
    assert shape.element_size == 1
    for num_tokens in (1, 2, 3, 17, 64, 65, 513, 4096, 16384):
        choice = moe_tiles.default_tiles(num_tokens, shape, arch)
        assert choice.kind == ("gemv" if num_tokens <= (4 if top_k >= 4 else 2) else "tiles")
        for tile in (choice.gate_up, choice.down):
            assert 128 % tile.block_n == 0
            assert choice.kind == "gemv" or 128 % tile.block_k == 0


def test_sizes_to_warm_cover_every_plan():
    device = torch.device("cpu")
    sizes = moe_tiles.sizes_to_warm(100, MIXTRAL, device)
    choices = {moe_tiles.choose_tiles(n, MIXTRAL, device) for n in range(1, 101)}
    assert {moe_tiles.choose_tiles(n, MIXTRAL, device) for n in sizes} == choices
    assert sizes == sorted(sizes, reverse=True)


def test_the_table_as_shipped_is_sound():
    assert moe_tiles.TABLE.is_file()
    moe_tiles.read_table(moe_tiles.TABLE)


def test_a_table_is_read_as_written(tmp_path):
    path = tmp_path / "tiles.json"
    first = TileChoice("tiles", 32, Tile(64, 128, 4, 3), Tile(128, 64, 8, 4))
    moe_tiles.write_table(path, [moe_tiles.entry_of("card", MIXTRAL, 64, first)])
    second = TileChoice("gemv", 1, Tile(1, 512, 1, 1), Tile(2, 1024, 1, 1))
    moe_tiles.write_table(path, [moe_tiles.entry_of("card", MIXTRAL, n, second) for n in (64, 1)])
    moe_tiles.write_table(path, [moe_tiles.entry_of("other", MIXTRAL, 1, first)])
    key = ("card", 4096, 14336, 2, 2)
    assert moe_tiles.read_table(path) == [(key, 1, second), (key, 64, second), (("other", *key[1:]), 1, first)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_m": 24}, "power of two"),
        ({"block_m": 8}, "at least 16"),
        ({"block_m": True}, "integer"),
        ({"kind": "magic"}, "kind"),
        ({"device": 3}, "device"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"hidden": 1 << 40}, "hidden"),
        ({"gate_up": [64, 128, 4]}, "num_stages"),
        ({"down": [64, 100, 4, 3]}, "powers"),
        ({"down": [64, 128, 4, 99]}, "num_stages"),
        ({"top_k": "2"}, "top_k"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path, change, complaint):
    entry = moe_tiles.entry_of("card", MIXTRAL, 64, TileChoice("tiles", 32)) | change
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=complaint):
        moe_tiles.read_table(path)


@pytest.mark.parametrize("text", ["{", "{}", "[3]"])
def test_a_wrong_file_is_refused(tmp_path, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="tiles"):
        moe_tiles.read_table(path)
