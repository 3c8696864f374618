"""Experts in 8-bit floats against their twin under Triton's interpreter (`test_triton_interpreter.py`): blocks of bytes
as the engine has them, with scales of rows and of 128 x 128, sizes on both sides of a block."""

import os
from dataclasses import replace

import pytest
import torch

from nanovllm.moe.scaled import expert_views
from nanovllm.ops import moe
from nanovllm.ops.triton import e4m3, moe_experts, moe_weights
from nanovllm.ops.triton.moe_tiles import Tile, TileChoice
from nanovllm.weights.expert_form import ExpertForm

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)
CHOICES = {
    "gemv": TileChoice("gemv", 1, Tile(8, 256, 1, 1), Tile(16, 128, 1, 1)),
    "tiles": TileChoice("tiles", 16, Tile(64, 64, 4, 1), Tile(64, 256, 4, 1)),  # steps are cut to a block of 128
}
ROWS, BLOCKS = (40, 24, 0), (144, 128, 128)  # hidden size, intermediate size, block of scales
ODD = [(37, 23, 0), (127, 129, 128), (128, 127, 128), (257, 130, 128)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pool_of(num_buffers, sizes):
    """(gate_up, down), views of one pool of bytes. Numbers of all sizes, and scales that differ by a factor of 8."""
    form = ExpertForm.dense(*sizes)
    pool = torch.randint(0, 256, (num_buffers, form.length), dtype=torch.uint8)
    pool[pool & 0x7F == 0x7F] = 0  # NaN
    stacks = expert_views(form, pool)
    for stack in stacks:
        stack.scale.copy_(torch.exp2(3 * torch.rand(stack.scale.shape)) * stack.shape[2] ** -0.5 / 100)
    return stacks


def compare(choice, sizes, num_tokens, dtype=torch.float32, as_card=False, tolerance=2e-5):
    gate_up, down = pool_of(3, sizes)
    x = torch.randn(num_tokens, sizes[0]).to(dtype)
    ids, weights = moe.route(torch.randn(num_tokens, 3), 2, True)
    buffers = torch.where(ids == 1, -1, ids) if num_tokens > 1 else ids
    out = torch.full((num_tokens, 2, sizes[0]), 7.0, dtype=dtype)
    expected = out.float()
    moe_experts.expert_pairs(x, gate_up, down, buffers, weights, out, choice=choice)
    moe.expert_pairs(x.float(), gate_up, down, buffers, weights, expected)
    limit = tolerance * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=limit)
    assert (out[buffers < 0] == 7.0).all()


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("sizes", [ROWS, BLOCKS, *ODD], ids=str)
def test_products(choice, sizes):
    compare(choice, sizes, 2 if choice.kind == "gemv" else 17)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [ROWS, BLOCKS], ids=str)
def test_16_bits(sizes, dtype):
    for choice in CHOICES.values():
        compare(choice, sizes, 2, dtype, tolerance=3e-2)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_converted_by_the_card(choice, monkeypatch):
    monkeypatch.setattr(moe_weights, "form_of", lambda *_: e4m3.BY_CARD)
    compare(choice, BLOCKS, 2)


@pytest.mark.parametrize("sizes", [ROWS, BLOCKS], ids=str)
def test_several_passes_give_the_bits_of_one(sizes):
    """Other passes, and a pool in which the experts lie elsewhere."""
    elsewhere, experts = torch.tensor([4, 1, 2], dtype=torch.int32), pool_of(3, sizes)
    far = pool_of(5, sizes)
    for near, other in zip(experts, far):
        other.q.view(torch.uint8)[elsewhere], other.scale[elsewhere] = near.q.view(torch.uint8), near.scale
    for choice, num_tokens in ((CHOICES["gemv"], 2), (CHOICES["tiles"], 19)):
        x = torch.randn(num_tokens, sizes[0])
        ids, weights = moe.route(torch.randn(num_tokens, 3), 2, True)
        whole = moe_experts.expert_pairs(x, *experts, ids, weights, choice=choice)
        out = torch.full_like(whole, float("nan"))
        for some in ([1], [0, 2]):
            buffers = torch.where(torch.isin(ids, torch.tensor(some)), elsewhere[ids], -1).int()
            moe_experts.expert_pairs(x, *far, buffers, weights, out, choice=choice)
        assert torch.equal(out, whole)


def test_default_choices_run_here():
    for num_tokens in (0, 1, 3):
        compare(None, BLOCKS, num_tokens) if num_tokens else compare_nothing()


def compare_nothing():
    gate_up, down = pool_of(2, ROWS)
    nothing = moe_experts.expert_pairs(
        torch.empty(0, ROWS[0]), gate_up, down, torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    )
    assert nothing.shape == (0, 2, ROWS[0])


def test_a_scale_in_the_wrong_place_would_show():
    """The proof that the tests above can fail."""
    gate_up, down = pool_of(2, BLOCKS)
    x, ids, weights = torch.randn(1, BLOCKS[0]), torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2)
    expected = moe.expert_pairs(x, gate_up, down, ids, weights)
    wrong = replace(down, scale=down.scale.roll(1, 1))
    found = moe_experts.expert_pairs(x, gate_up, wrong, ids, weights, choice=CHOICES["tiles"])
    assert not torch.allclose(found, expected, rtol=0.05, atol=0)
