"""What several kernels share: the dot product that is right everywhere, and facts about the card.

Conventions of this package. A kernel masks what its power-of-two tile covers beyond the data, so any head_dim or hidden
size works. Addresses that grow with the cache (slot * stride) are int64: 2^31 elements are only 4 GB of bf16.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@triton.jit
def start_next(DEPENDENT: tl.constexpr):
    """Dependent launch: the next kernel of the stream may start as soon as every program of this one has. Without it
    the next one starts when the last program has ended and its results are in memory: 1 us and more of an idle card."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(DEPENDENT: tl.constexpr):
    """The other half, before the first read or write of anything that an earlier kernel of the step reads or writes.
    What no kernel of a step writes may be loaded before it: weights, and the step's own inputs (positions, lengths,
    tables, slots). These are written between steps, and every step begins with a lookup of embeddings, which is not
    launched dependent and so starts when all before it has ended. A kernel that is launched dependent must wait, even
    if it needs nothing of the last kernel: the next one relies on all before it having ended."""
    if DEPENDENT:
        gdc_wait()


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) where there is no card (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def dependent_launch(device: torch.device) -> bool:
    """Whether the card has it: Hopper and later."""
    return capability(device) >= (9, 0)
