"""The two products of an expert over sorted rows (`moe_align.py`), with what stands before and after them fused.

GEMM 1:  active[i] = silu(gate[s] @ x[t]) * (up[s] @ x[t])      rows gathered from x, written in sorted order
GEMM 2:  out[pair] = weights[pair] * (down[s] @ active[i])       sorted rows read, scattered to their pairs

where sorted position i holds `pair` = order[i], of token t = pair // k, whose expert is in buffer s. GEMM 1 keeps a
tile of gate and the same tile of up in registers, so the [pairs, 2I] product never reaches memory; GEMM 2 applies the
router's weight in fp32, and as no two pairs share an output the k results of a token are added later in a fixed order
(`sum_pairs`).

Low-rank experts (`ops/moe.py`): with SPLIT, `up` reads the second half of a row of x. With SHARED, GEMM 2 is the
product that stands between the two: one weight for all buffers, no router's weight, rows stay in sorted order.

8-bit floats (FORM, SCALED: `moe_weights.py`): a tile is loaded as bytes, half as many, and converted to the dtype of x
before its product. With scales of blocks each step of BLOCK_K columns, which lies in one block, is a sum of its own in
registers, multiplied by the scale of its outputs and added: one multiplication for BLOCK_K products.

A tile is one block of positions (one buffer, at most BLOCK_M rows) by BLOCK_N outputs, over all of K: every sum has one
owner and one order. Nothing about a tile depends on other buffers' pairs but where it runs. That is the promise of
`ops/moe.py`, and why K is never cut between programs by how many experts happen to be in the call.

Grid. How many tiles there are is known only on the device. A fixed number of programs walks over them, stepping by the
grid's size, so a captured graph is right for every routing and a pool of hundreds of buffers costs no empty programs.
PROGRAMS_PER_SM is well over what fits at once: the hardware hands out programs as others end, and the ones with one
tile less come last, which keeps the end of the kernel short. Order: GROUP blocks side by side for one column of
tiles, then the next column. Blocks of one expert are neighbours, so its weight tile is read from memory once and GROUP
times from the L2 cache, while the rows of x of the group (8 x 128 x 4096 x 2 bytes = 8 MB) stay there.

Decode streams weights. Each byte is used by the few rows of one block; what matters is bytes on their way: 34 KB a
multiprocessor (`moe_gemv.py`). A stage of GEMM 1 with BLOCK_N = 32 and BLOCK_K = 128 holds 16 KB of weights and 4 KB of
x; with 4 stages two programs fit in 227 KB and 2 x 3 x 16 = 96 KB are in flight. GEMM 2 has fewer outputs (4096 for
14336 columns): BLOCK_N = 32 still gives 256 programs for two experts and 1024 for eight, so K stays whole.
Prefill multiplies: 128 x (128 + 128) x 64, 8 warps, reads 48 KB for 4.2 MFLOP, 87 FLOP a byte of shared memory.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.triton.common import dot, next_power_of_2, num_multiprocessors
from nanovllm.ops.triton.moe_align import Alignment
from nanovllm.ops.triton.moe_tiles import Tile
from nanovllm.ops.triton.moe_weights import num_scales, scales_at, stored_form, to_float

PROGRAMS_PER_SM = 16
GROUP = 8


@triton.jit
def find_tile(tile, num_blocks, num_columns, GROUP: tl.constexpr):
    """(block, column) of tile number `tile`; the last group may be smaller."""
    group = tile // (GROUP * num_columns)
    height = tl.minimum(num_blocks - group * GROUP, GROUP)
    rest = tile - group * GROUP * num_columns
    return group * GROUP + rest % height, rest // height


@triton.jit
def _load_tile(
    ptrs, k, FLOAT: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, STREAM: tl.constexpr, FORM: tl.constexpr
):
    """Weights [BLOCK_K, BLOCK_N]. STREAM: read once (decode), so they leave the cache first."""
    policy: tl.constexpr = "evict_first" if STREAM else ""
    if SIZE % BLOCK_K == 0:
        w = tl.load(ptrs + k[:, None], eviction_policy=policy)
    else:
        w = tl.load(ptrs + k[:, None], mask=k[:, None] < SIZE, other=0, eviction_policy=policy)
    return to_float(w, FLOAT, FORM)


@triton.jit
def _add(total, product, scale_ptrs, start, SCALED: tl.constexpr):
    """The product of columns start .. start + BLOCK_K: of one block each, if these have scales."""
    if SCALED > 1:
        return total + product * tl.load(scale_ptrs + start // SCALED)[None, :]
    else:
        return total + product


@triton.jit
def _load_rows(ptrs, k, valid, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows [BLOCK_M, BLOCK_K]. Those past the block's end are not read: at decode they are most of the tile."""
    if SIZE % BLOCK_K == 0:
        return tl.load(ptrs + k[None, :], mask=valid[:, None], other=0.0)
    else:
        return tl.load(ptrs + k[None, :], mask=valid[:, None] & (k[None, :] < SIZE), other=0.0)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "order_ptr", "blocks_ptr"])
def gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, order_ptr, blocks_ptr, num_blocks_ptr, out_ptr, x_stride, buffer_stride, scale_stride,
    SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr,
    FORM: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.load(num_blocks_ptr)
    num_columns: tl.constexpr = (OUT_SIZE + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), num_blocks * num_columns, tl.num_programs(0)):
        block, column = find_tile(tile, num_blocks, num_columns, GROUP)
        buffer = tl.load(blocks_ptr + block * 3).to(tl.int64)
        row = tl.load(blocks_ptr + block * 3 + 1) + tl.arange(0, BLOCK_M)
        valid = row < tl.load(blocks_ptr + block * 3 + 2)
        token = tl.load(order_ptr + row, mask=valid, other=0) // TOP_K
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        # Outputs past the end read row 0: cheaper than a mask on every weight.
        inside = tl.where(n < OUT_SIZE, n, 0)
        gate_ptrs = weight_ptr + buffer * buffer_stride + inside[None, :] * SIZE
        up_ptrs = gate_ptrs + OUT_SIZE * SIZE
        gate_scales = scales_at(scale_ptr + buffer * scale_stride, inside, SIZE, SCALED)
        up_scales = gate_scales + num_scales(OUT_SIZE, SIZE, SCALED)
        x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, SIZE, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = _load_rows(x_ptrs, k, valid, SIZE, BLOCK_K)
            w = _load_tile(gate_ptrs, k, x.dtype, SIZE, BLOCK_K, STREAM, FORM)
            gate = _add(gate, dot(x, w), gate_scales, start, SCALED)
            if SPLIT:
                x = _load_rows(x_ptrs + SIZE, k, valid, SIZE, BLOCK_K)
            w = _load_tile(up_ptrs, k, x.dtype, SIZE, BLOCK_K, STREAM, FORM)
            up = _add(up, dot(x, w), up_scales, start, SCALED)
        if SCALED == 1:
            gate *= tl.load(gate_scales)[None, :]
            up *= tl.load(up_scales)[None, :]
        active = gate / (1.0 + tl.exp(-gate)) * up
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * OUT_SIZE + n[None, :]
        tl.store(out_ptrs, active.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < OUT_SIZE)[None, :])


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "order_ptr", "blocks_ptr", "weights_ptr"])
def down_kernel(
    x_ptr, weight_ptr, scale_ptr, order_ptr, blocks_ptr, num_blocks_ptr, weights_ptr, out_ptr,
    buffer_stride, scale_stride,
    SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, SHARED: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.load(num_blocks_ptr)
    num_columns: tl.constexpr = (OUT_SIZE + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), num_blocks * num_columns, tl.num_programs(0)):
        block, column = find_tile(tile, num_blocks, num_columns, GROUP)
        buffer = tl.load(blocks_ptr + block * 3).to(tl.int64)
        row = tl.load(blocks_ptr + block * 3 + 1) + tl.arange(0, BLOCK_M)
        valid = row < tl.load(blocks_ptr + block * 3 + 2)
        if SHARED:
            buffer = buffer * 0
            target = row
        else:
            target = tl.load(order_ptr + row, mask=valid, other=0)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.where(n < OUT_SIZE, n, 0)
        weight_ptrs = weight_ptr + buffer * buffer_stride + inside[None, :] * SIZE
        scale_ptrs = scales_at(scale_ptr + buffer * scale_stride, inside, SIZE, SCALED)
        x_ptrs = x_ptr + row.to(tl.int64)[:, None] * SIZE
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, SIZE, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = _load_rows(x_ptrs, k, valid, SIZE, BLOCK_K)
            w = _load_tile(weight_ptrs, k, x.dtype, SIZE, BLOCK_K, STREAM, FORM)
            total = _add(total, dot(x, w), scale_ptrs, start, SCALED)
        if SCALED == 1:
            total *= tl.load(scale_ptrs)[None, :]
        if not SHARED:
            total *= tl.load(weights_ptr + target, mask=valid, other=0.0)[:, None]
        out_ptrs = out_ptr + target.to(tl.int64)[:, None] * OUT_SIZE + n[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < OUT_SIZE)[None, :])


def gate_up_gemm(
    x: torch.Tensor, weight: torch.Tensor | ScaledStack, rows: Alignment, top_k: int, block_m: int, tile: Tile
) -> torch.Tensor:
    """x [T, H] or [T, 2H], weight [S, 2I, H] -> [T * k, I] in sorted order."""
    size, out_size = weight.shape[2], weight.shape[1] // 2
    out = torch.empty((len(rows.order), out_size), dtype=x.dtype, device=x.device)
    numbers, scale, strides, form = stored_form(weight)
    tensors = (x, numbers, scale, rows.order, rows.blocks, rows.num_blocks, out, x.stride(0), *strides)
    facts = {"SIZE": size, "OUT_SIZE": out_size, "TOP_K": top_k, "SPLIT": x.shape[1] != size, **form}
    options = launch_options(block_m, size, tile, form["SCALED"])
    gate_up_kernel[_grid(rows, out_size, tile, x.device)](*tensors, **facts, **options)
    return out


def down_gemm(
    active: torch.Tensor,
    weight: torch.Tensor | ScaledStack,
    rows: Alignment,
    weights: torch.Tensor,
    out: torch.Tensor,
    block_m: int,
    tile: Tile,
) -> None:
    """active [T * k, I] in sorted order, weight [S, H, I] -> out [T, k, H], times the router's weights. `weight` [H, I]
    is one for all buffers (SHARED): then the weights are not read, and out [T * k, H] is in sorted order."""
    (out_size, size), is_shared = weight.shape[-2:], len(weight.shape) == 2
    numbers, scale, strides, form = stored_form(weight)
    tensors = (active, numbers, scale, rows.order, rows.blocks, rows.num_blocks, weights, out, *strides)
    facts = {"SIZE": size, "OUT_SIZE": out_size, "SHARED": is_shared, **form}
    options = launch_options(block_m, size, tile, form["SCALED"])
    down_kernel[_grid(rows, out_size, tile, out.device)](*tensors, **facts, **options)


def between_gemm(active: torch.Tensor, weight: torch.Tensor, rows: Alignment, block_m: int, tile: Tile) -> torch.Tensor:
    """active [T * k, I] and weight [R, I] -> [T * k, R], both in sorted order. Not one product of a library over all
    rows: rows of pairs without a buffer were never written, and a library may add up differently by a row's place."""
    out = torch.empty((len(active), len(weight)), dtype=active.dtype, device=active.device)
    down_gemm(active, weight, rows, active, out, block_m, tile)
    return out


def _grid(rows: Alignment, out_size: int, tile: Tile, device: torch.device) -> tuple[int]:
    most = len(rows.blocks) * triton.cdiv(out_size, tile.block_n)
    return (min(most, num_multiprocessors(device) * PROGRAMS_PER_SM),)


def launch_options(block_m: int, size: int, tile: Tile, scaled: int = 0) -> dict[str, int]:
    """`scaled`: columns of a block that has a scale, if more than one; a step does not reach over it."""
    block_k = min(tile.block_k, max(16, next_power_of_2(size)), scaled if scaled > 1 else tile.block_k)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": tile.block_n, "BLOCK_K": block_k, "GROUP": GROUP, "STREAM": block_m <= 32}
    return {**blocks, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
