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
    if it needs nothing of the last kernel: the next one relies on all before it having ended. (One program that waits
    is enough for that: a kernel ends with the last of its programs.)"""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def prefetch(ptrs):
    """Asks for the cache lines at these addresses, of anything that may be loaded before the wait: they travel from
    memory to the L2 cache meanwhile, and no register waits for them."""
    if not INTERPRETED:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_sum(ptrs, mask, part_stride, PARTS: tl.constexpr):
    """fp32: the sum of the PARTS of a product (`matmul.py`), in their order; all of them are requested at once."""
    total = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptrs + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) where there is no card (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def parts_of(x: torch.Tensor) -> tuple[int, int]:
    """Of a product [rows, size] or [parts, rows, size]: (number of parts, elements from one to the next)."""
    return (1, 0) if x.dim() == 2 else (x.shape[0], x.stride(0))


MOST_ROOM = 256


def empty_rows(rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, size], with room behind it for whole tiles of rows. A kernel that copies tiles of x by the copy engine may
    read there, whatever lies there, and store nothing of it. Outside of x it would get zeros, but slowly: products of
    96 rows took 20 to 30 % longer than those of 128."""
    room = max(16, next_power_of_2(rows)) if 2 < rows <= MOST_ROOM else rows
    return torch.empty((room, size), dtype=like.dtype, device=like.device)[:rows]


def with_room(x: torch.Tensor, tile: int) -> torch.Tensor:
    """x [rows, size] with the rows behind its last one that its storage has, up to whole tiles."""
    wanted = triton.cdiv(len(x), tile) * tile
    there = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.shape[1]) // x.stride(0) + 1
    return torch.as_strided(x, (min(wanted, there), x.shape[1]), x.stride()) if there > len(x) else x


def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles can be copied by descriptors: Hopper and later (and the interpreter)."""
    return capability(device) >= (9, 0) or device.type == "cpu"


def dependent_launch(device: torch.device) -> bool:
    """Whether the card has it: Hopper and later."""
    return capability(device) >= (9, 0)
