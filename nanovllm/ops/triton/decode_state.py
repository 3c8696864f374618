"""The state of a device-resident decode loop, advanced by one token a row.

A captured graph holds forward, sampling and this kernel, so it can be replayed k times without the host. After a step
sampled `sampled`, for every live row: the token becomes the next input, position and context length grow by one, the
slot of the new token is looked up in the block table (whose blocks the host reserved ahead), and the token goes to
column `step` of the output buffer, from which the host copies k tokens at once. A row with context length 0 is padding
and stays as it is, with slot -1. A position past the block table also gets slot -1: the host reserved too little, and a
lost token is better than a write into a block of another sequence.

One program owns all rows, because it also counts `step` up: with several, one could do so before another has read it.
At 256 rows that is one pass of a few hundred nanoseconds.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "table_stride", "table_width", "out_stride", "out_width"])
def advance_kernel(
    sampled_ptr, tokens_ptr, positions_ptr, context_lens_ptr, slots_ptr, tables_ptr, out_ptr, step_ptr,
    num_rows, table_stride, table_width, out_stride, out_width, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_ptr)
    for first in range(0, num_rows, TILE):
        row = (first + tl.arange(0, TILE)).to(tl.int64)
        exists = row < num_rows
        context_len = tl.load(context_lens_ptr + row, mask=exists, other=0)
        live = exists & (context_len > 0)
        token = tl.load(sampled_ptr + row, mask=live, other=0)
        position = tl.load(positions_ptr + row, mask=live, other=0) + 1
        reserved = live & (position < table_width * BLOCK_SIZE)
        block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=reserved, other=0).to(tl.int64)
        slot = tl.where(reserved, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(tokens_ptr + row, token, mask=live)
        tl.store(positions_ptr + row, position, mask=live)
        tl.store(context_lens_ptr + row, context_len + 1, mask=live)
        tl.store(slots_ptr + row, slot, mask=exists)
        tl.store(out_ptr + row * out_stride + step, token, mask=live & (step < out_width))
    tl.debug_barrier()  # every warp has read step
    tl.store(step_ptr, step + 1)


def advance(
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    step: torch.Tensor,
    block_size: int,
) -> None:
    """All in place. sampled, tokens int64 [rows], positions and context_lens integer [rows], slots int64 [rows],
    block_tables int32 [rows, max_blocks], out [rows, columns] and step int32 [1], which the host zeroes before a visit.
    """
    num_rows = sampled.shape[0]
    advance_kernel[(1,)](
        sampled, tokens, positions, context_lens, slots, block_tables, out, step,
        num_rows, block_tables.stride(0), block_tables.shape[1], out.stride(0), out.shape[1],
        BLOCK_SIZE=block_size, TILE=256, num_warps=4,
    )  # fmt: skip
