"""The gated activation of a SwiGLU MLP.

`silu_mul(gate_up)`: [tokens, 2 * size] -> [tokens, size], silu(gate) * up where gate is the first half of a row. The
activation is rounded to the input dtype before the product, as in Hugging Face.
Triton twin: `ops/triton/activation.py`.
"""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
