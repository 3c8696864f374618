"""A linear map, x @ weight.T + bias, in the formulation that is fastest for its number of rows.

Everywhere but fp32 on the CPU this is F.linear. There MKL is fast for 1-3 rows (a matrix-vector product each) and
for many, but between them it reaches a third of what the transposed product weight @ x.T does. Measured on 2 cores with
AVX-512, weight [out, in], microseconds, F.linear / weight @ x.T (without the copy to row order, some 3 %):

    rows       1          3          4          8         16         32         48          64
 960 x  576  49/52      56/181    408/159    427/157    426/140    627/250    725/309     508/523
3072 x  576  273/269   371/644    578/639    846/647   1433/625   1555/698   1746/847    1434/1362
6144 x 1024  803/840   905/1883  1844/1866  2937/1997  2175/1889  2899/2278  3506/2814   4575/4581
4096 x 4096 2429/2445 2418/5216  4578/5004  7344/5365  9761/5207  7243/6198 11021/8802  13515/15078
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# From 4 rows on the transposed product gains 2.5x on small shapes and loses at most 10 % on large ones.
_TRANSPOSED_ROWS = range(4, 49)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dim() == 2 and x.shape[0] in _TRANSPOSED_ROWS and x.is_cpu and x.dtype == torch.float32:
        out = torch.mm(weight, x.t()).t().contiguous()  # later views and norms need rows in memory order
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


PIECE_NUMBERS = 2**25  # 64 MiB in 16 bits


def linear_in_pieces(
    x: torch.Tensor, shape: tuple[int, int], expanded: Callable[[int, int], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight.T + bias of a weight [outputs, inputs] that is kept in fewer bits. `expanded(first, last)` gives
    outputs first .. last of it in x's dtype; so many at a time that no more than PIECE_NUMBERS are in memory. Gate and
    up of an 8B model have three times as many, which a card of 8 GB misses."""
    out_size, size = shape
    rows = max(PIECE_NUMBERS // size // 128 * 128, 128)  # blocks of 128 x 128 are not cut
    if rows >= out_size:
        return F.linear(x, expanded(0, out_size), bias)
    out = torch.empty((len(x), out_size), dtype=x.dtype, device=x.device)
    for first in range(0, out_size, rows):
        last = min(first + rows, out_size)
        torch.mm(x, expanded(first, last).t(), out=out[:, first:last])
    return out if bias is None else out.add_(bias)
