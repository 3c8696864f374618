"""What several kernels share: the dot product that is right everywhere, and facts about the card.

Conventions of this package. A kernel masks what its power-of-two tile covers beyond the data, so any head_dim or hidden
size works. Addresses that grow with the cache (slot * stride) are int64: 2^31 elements are only 4 GB of bf16.
"""

import functools

import torch
import triton
import triton.language as tl

# exp2 is one instruction, exp is exp2 after a product: kernels fold log2(e) into the score scale.
LOG2E = 1.4426950408889634

# Minus infinity that can be subtracted from itself: the starting maximum of an online softmax.
LOWEST = tl.constexpr(-1.0e30)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """a @ b accumulated in fp32. "ieee" matters for fp32 inputs only (the default would round them to tf32).

    The interpreter multiplies the bit patterns of bf16 as integers, without an error: there the inputs become fp32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) where there is no card (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
