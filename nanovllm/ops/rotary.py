"""Rotary position embedding, "neox" halves: element i of a head is paired with element i + rot_dim / 2.

The table cos_sin [max_position, rot_dim] is fp32; a row is cos(angles) followed by sin(angles), half each. rot_dim may
be smaller than head_dim; the rest of a head passes unchanged. The rotation of a pair (a, b) by angle t is

    (a cos t - b sin t,  b cos t + a sin t)

computed in fp32 and rounded once to the dtype of the input. With a head seen as [2, half] (first halves, second halves)
that is x * cos + flip(x) * (-sin, sin): three operations on all heads of q and k at once, which is what counts for one
token on a CPU, where every call costs 2-3 us whatever its size. The angles are the same in every layer, so a forward
pass gathers them once (`gather_angles`).
"""

from typing import NamedTuple

import torch


class Angles(NamedTuple):
    cos: torch.Tensor  # fp32 [tokens, 1, 1, rot_dim / 2]
    sin: torch.Tensor  # fp32 [tokens, 1, 2, rot_dim / 2]: -sin, then sin


def gather_angles(cos_sin: torch.Tensor, positions: torch.Tensor) -> Angles:
    cos, sin = cos_sin.index_select(0, positions)[:, None, None].chunk(2, dim=-1)
    return Angles(cos, torch.cat((-sin, sin), dim=2))


def rotate(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """[tokens, heads, head_dim], any strides -> the same, turned, in new memory."""
    tokens, num_heads, head_dim = heads.shape
    half = angles.cos.shape[-1]
    turned = heads if 2 * half == head_dim else heads[..., : 2 * half]
    pairs = turned.float().unflatten(-1, (2, half))
    out = (pairs * angles.cos).addcmul_(pairs.flip(2), angles.sin).view(tokens, num_heads, 2 * half).to(heads.dtype)
    return out if 2 * half == head_dim else torch.cat((out, heads[..., 2 * half :]), dim=-1)
