"""Experts in integers against their twin under Triton's interpreter (`test_triton_interpreter.py`): blocks of bytes as
the engine has them, sizes on both sides of a block of words."""

import os

import pytest
import torch

from nanovllm.moe.scaled import expert_views
from nanovllm.ops import integers, moe
from nanovllm.ops.triton import moe_experts, moe_integers
from nanovllm.ops.triton.moe_integers import IntegerTile
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)
FORMS = {
    "int4-128": ((256, 128), ExpertIntegers((4, 128), (4, 128))),
    "int4-32": ((160, 96), ExpertIntegers((4, 32), (4, 32))),
    "int8 down": ((96, 160), ExpertIntegers((4, 64), (8, 16))),
}
TILE = IntegerTile(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pool_of(num_buffers, name):
    """(gate_up, down), views of one pool of bytes: words of all bit patterns, also past the end of a row."""
    sizes, form = FORMS[name]
    whole = ExpertForm.dense(*sizes, integers=form)
    pool = torch.randint(0, 256, (num_buffers, whole.length), dtype=torch.uint8)
    stacks = expert_views(whole, pool)
    for stack in stacks:
        groups, rows = stack.factors.shape[1:]
        size = stack.columns**-0.5 / 2**stack.bits
        for buffer in range(num_buffers):
            scale, offset = torch.rand(rows, groups) * 4 * size, torch.randn(rows, groups) * size
            stack.factors[buffer].copy_(integers.pack_factors(scale, offset, groups))
    return stacks


def compare(name, num_tokens, dtype=torch.float32, tile=None, tolerance=2e-3):
    gate_up, down = pool_of(3, name)
    (hidden, _), _ = FORMS[name]
    x = torch.randn(num_tokens, hidden).to(dtype)
    ids, weights = moe.route(torch.randn(num_tokens, 3), 2, True)
    buffers = torch.where(ids == 1, -1, ids) if num_tokens > 1 else ids
    out = torch.full((num_tokens, 2, hidden), 7.0, dtype=dtype)
    expected = out.float()
    moe_integers.integer_pairs(x, gate_up, down, buffers, weights, out, tile)
    moe.expert_pairs(x.float(), gate_up, down, buffers, weights, expected)
    limit = tolerance * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=limit)
    assert (out[buffers < 0] == 7.0).all()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_token_or_two(name, num_tokens):
    compare(name, num_tokens)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_tokens", [3, 17, 40])
def test_more_tokens(name, num_tokens):
    compare(name, num_tokens, tile=TILE)


def test_tiles_as_they_are_chosen():
    for num_tokens in (3, 20, 66):
        compare("int4-32", num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_16_bits(num_tokens):
    compare("int4-128", num_tokens, torch.float16, tolerance=3e-2)


@pytest.mark.parametrize("name", FORMS)
def test_several_passes_give_the_bits_of_one(name):
    """Other passes, and a pool in which the experts lie elsewhere."""
    elsewhere, experts, far = torch.tensor([4, 1, 2], dtype=torch.int32), pool_of(3, name), pool_of(5, name)
    (hidden, _), _ = FORMS[name]
    for near, other in zip(experts, far):
        other.words[elsewhere], other.factors[elsewhere] = near.words, near.factors
    for num_tokens in (2, 19):
        x = torch.randn(num_tokens, hidden)
        ids, weights = moe.route(torch.randn(num_tokens, 3), 2, True)
        whole = moe_experts.expert_pairs(x, *experts, ids, weights)
        out = torch.full_like(whole, float("nan"))
        for some in ([1], [0, 2]):
            buffers = torch.where(torch.isin(ids, torch.tensor(some)), elsewhere[ids], -1).int()
            moe_experts.expert_pairs(x, *far, buffers, weights, out)
        assert torch.equal(out, whole)
