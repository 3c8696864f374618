"""Lanes: the rows of a captured decode graph, filled from the sequences that run now.

A running sequence keeps one *row* of device memory for life: its newest token and its block table. A graph of batch
size B computes *lanes* 0..B-1, dense and in place. `begin` points lanes at rows when the host visits: the host uploads
the row, the position and, where it has it, the token; -1 stands for the row's newest token on the device, which is how
a step can be queued before the tokens of the last are on the host. A lane without a row (-1) is padding: context
length 0, slot -1, and no kernel reads or writes for it. So is one whose text has ended on the device, which the host
did not know yet (`decode_state.py`).

One program owns one lane.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops import sampler_state as spec

_INTS, _MAX_LEN = tl.constexpr(spec.NUM_INTS), tl.constexpr(spec.MAX_LEN)


@triton.jit(
    do_not_specialize=["row_table_stride", "table_stride", "num_blocks"],
    do_not_specialize_on_alignment=["rows_ptr", "host_tokens_ptr", "host_positions_ptr"],
)
def begin_kernel(
    rows_ptr, host_tokens_ptr, host_positions_ptr, row_tokens_ptr, row_tables_ptr, ints_ptr,
    tokens_ptr, positions_ptr, context_lens_ptr, slots_ptr, tables_ptr,
    row_table_stride, table_stride, num_blocks, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane).to(tl.int64)
    live = row >= 0
    max_len = tl.load(ints_ptr + row * _INTS + _MAX_LEN, mask=live, other=0)
    position = tl.where(live, tl.load(host_positions_ptr + lane), 0)
    live = live & ((max_len == 0) | (position + 1 < max_len))
    token = tl.load(host_tokens_ptr + lane)
    own = tl.load(row_tokens_ptr + row, mask=row >= 0, other=0)
    tl.store(tokens_ptr + lane, tl.where(token >= 0, token, own).to(tl.int64))
    tl.store(positions_ptr + lane, position.to(tl.int64))
    tl.store(context_lens_ptr + lane, tl.where(live, position + 1, 0).to(tl.int32))
    source = row_tables_ptr + row * row_table_stride
    block = tl.load(source + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(slots_ptr + lane, tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    for first in range(0, num_blocks, TILE):
        i = first + tl.arange(0, TILE)
        blocks = tl.load(source + i, mask=live & (i < num_blocks), other=0)
        tl.store(tables_ptr + lane * table_stride + i, blocks, mask=i < num_blocks)


def begin(
    rows: torch.Tensor,
    host_tokens: torch.Tensor,
    host_positions: torch.Tensor,
    row_state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lanes: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    block_size: int,
    num_blocks: int,
) -> None:
    """rows, host_tokens, host_positions int32 [lanes]; row_state = (tokens int64 [rows], block tables int32 [rows,
    width], `ints` of the sampler's state); lanes = (tokens int64, positions int64, context_lens int32, slots int64,
    block tables int32), written. num_blocks: how many columns of the tables any lane may read before the next visit."""
    row_tokens, row_tables, ints = row_state
    tokens, positions, context_lens, slots, tables = lanes
    begin_kernel[(len(rows),)](
        rows, host_tokens, host_positions, row_tokens, row_tables, ints, tokens, positions, context_lens, slots, tables,
        row_tables.stride(0), tables.stride(0), num_blocks, BLOCK_SIZE=block_size, TILE=128, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_lanes"], do_not_specialize_on_alignment=["rows_ptr"])
def keep_kernel(rows_ptr, tokens_ptr, row_tokens_ptr, num_lanes, TILE: tl.constexpr):
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + lane, mask=lane < num_lanes, other=-1).to(tl.int64)
    token = tl.load(tokens_ptr + lane, mask=row >= 0, other=0)
    tl.store(row_tokens_ptr + row, token, mask=row >= 0)


def keep_tokens(rows: torch.Tensor, tokens: torch.Tensor, row_tokens: torch.Tensor) -> None:
    """row_tokens[rows] = tokens, for lanes that have a row: what the next visit's -1 refers to."""
    keep_kernel[(triton.cdiv(len(rows), 256),)](rows, tokens, row_tokens, len(rows), TILE=256, num_warps=4)
