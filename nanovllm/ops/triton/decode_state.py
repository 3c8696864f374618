"""The state of a device-resident decode loop, advanced by one token a row.

A captured graph holds forward, sampling and this kernel, so it can be replayed k times without the host. After a step
sampled `sampled`, for every live row: the token becomes the next input, position and context length grow by one, the
slot of the new token is looked up in the block table (whose blocks the host reserved ahead), and the token goes to
column `step` of the output buffer, from which the host copies k tokens at once. A row with context length 0 is padding
and stays as it is, with slot -1 and -1 in the output. A position past the block table also gets slot -1: the host
reserved too little, and a lost token is better than a write into a block of another sequence.

A text may end in the middle of a visit: by its length, which the host knew before, or by a stop token, which it learns
two visits later. So the end is looked for here, too (columns MAX_LEN and STOPS_FROM of the sampler's state), and the
row becomes padding: attention would otherwise read its whole context for each step that is left. MAX_LEN becomes 1,
where `lanes.begin` finds it if the next visit was planned before the host knew. The host decides for itself where a
text ends, and cuts off the -1 behind.

One program owns all rows, because it also counts `step` up: with several, one could do so before another has read it.
At 256 rows that is one pass of a few hundred nanoseconds.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops import sampler_state as spec

_INTS, _MAX_LEN, _STOPS_FROM = tl.constexpr(spec.NUM_INTS), tl.constexpr(spec.MAX_LEN), tl.constexpr(spec.STOPS_FROM)
_FIRST_STOP, _NUM_STOPS = tl.constexpr(spec.FIRST_STOP), tl.constexpr(spec.NUM_STOPS)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "table_width", "out_stride", "out_width"])
def advance_kernel(
    sampled_ptr, tokens_ptr, positions_ptr, context_lens_ptr, slots_ptr, tables_ptr, out_ptr, step_ptr, rows_ptr,
    ints_ptr, num_rows, table_stride, table_width, out_stride, out_width, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_ptr)
    for first in range(0, num_rows, TILE):
        lane = (first + tl.arange(0, TILE)).to(tl.int64)
        exists = lane < num_rows
        row = tl.load(rows_ptr + lane, mask=exists, other=-1).to(tl.int64)
        of_row = ints_ptr + tl.where(row >= 0, row, 0) * _INTS
        max_len, stops_from = tl.load(of_row + _MAX_LEN), tl.load(of_row + _STOPS_FROM)
        stops = tl.load((of_row + _FIRST_STOP)[:, None] + tl.arange(0, _NUM_STOPS)[None, :])
        context_len = tl.load(context_lens_ptr + lane, mask=exists, other=0)
        live = exists & (context_len > 0)
        token = tl.load(sampled_ptr + lane, mask=live, other=0)
        token = tl.where(live, token, tl.load(tokens_ptr + lane, mask=exists, other=0))
        position = tl.load(positions_ptr + lane, mask=live, other=0) + 1
        is_stop = (tl.max((stops == token[:, None] + 1).to(tl.int32), axis=1) > 0) & (position >= stops_from)
        ends = live & (row >= 0) & (is_stop | ((max_len > 0) & (position + 1 >= max_len)))
        goes_on = live & (ends == 0)
        reserved = goes_on & (position < table_width * BLOCK_SIZE)
        block = tl.load(tables_ptr + lane * table_stride + position // BLOCK_SIZE, mask=reserved, other=0).to(tl.int64)
        slot = tl.where(reserved, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(tokens_ptr + lane, token, mask=live)
        tl.store(positions_ptr + lane, position, mask=live)
        tl.store(context_lens_ptr + lane, tl.where(ends, 0, context_len + 1), mask=live)
        tl.store(slots_ptr + lane, slot, mask=exists)
        tl.store(of_row + _MAX_LEN, 1, mask=ends)
        tl.store(out_ptr + lane * out_stride + step, tl.where(live, token, -1), mask=exists & (step < out_width))
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
    rows: torch.Tensor,
    ints: torch.Tensor,
    block_size: int,
) -> None:
    """All in place. sampled, tokens int64 [rows], positions and context_lens integer [rows], slots int64 [rows],
    block_tables int32 [rows, max_blocks], out [rows, columns] and step int32 [1], which the host zeroes before a visit.
    rows int32 [rows]: which row of the sampler's state, `ints`, each has; -1 = none, which ends nothing."""
    num_rows = sampled.shape[0]
    advance_kernel[(1,)](
        sampled, tokens, positions, context_lens, slots, block_tables, out, step, rows, ints,
        num_rows, block_tables.stride(0), block_tables.shape[1], out.stride(0), out.shape[1],
        BLOCK_SIZE=block_size, TILE=256, num_warps=4,
    )  # fmt: skip
