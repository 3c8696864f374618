"""Quantised matrices on a CPU: how they are packed, and the plain twin of ops/native/quant.c.

    matrix = pack("Q4_1", q, header)           # of weights/gguf_quants.py:split
    y = linear(x, matrix)                      # x float32 [rows, size] -> [rows, outputs]
    rows = dequantise_rows(matrix, ids)        # of an embedding

quant.c says what is multiplied with what and where the bits lie. Here the same arithmetic is written with whole
tensors: integers exactly, floats in the same order (block after block, every product and sum rounded to float32). So
the results are equal bit for bit. It is slow, and it needs no compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

LANES, BLOCK = 8, 32
SCALE, MINIMUM, SUPER, HALVES = range(4)


@dataclass(frozen=True)
class Format:
    """A weight is d (q - offset), or d q + m; `scales` says how d and m are kept (quant.c)."""

    name: str
    index: int  # in FORMATS of quant.c
    bits: int
    scales: int
    offset: int = 0

    @property
    def header_blocks(self) -> int:
        """Blocks that follow one header."""
        return 8 if self.scales >= SUPER else 1

    @property
    def header_bytes(self) -> int:
        return LANES * (2, 4, 20, 18)[self.scales]

    @property
    def block_bytes(self) -> int:
        return LANES * BLOCK // 8 * self.bits

    def panel_bytes(self, size: int) -> int:
        return size // BLOCK * self.block_bytes + size // BLOCK // self.header_blocks * self.header_bytes


FORMATS = {
    found.name: found
    for found in (
        Format("Q4_0", 0, 4, SCALE, 8),
        Format("Q4_1", 1, 4, MINIMUM),
        Format("Q5_0", 2, 5, SCALE, 16),
        Format("Q5_1", 3, 5, MINIMUM),
        Format("Q8_0", 4, 8, SCALE),
        Format("Q4_K", 5, 4, SUPER),
        Format("Q5_K", 6, 5, SUPER),
        Format("Q6_K", 7, 6, HALVES, 32),
    )
}


@dataclass(frozen=True)
class PackedMatrix:
    """`data`: uint8 [panels, bytes of a panel], eight outputs a panel; the last one is filled up with zeros."""

    form: Format
    outputs: int
    size: int
    data: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.size

    def narrow(self, start: int, length: int) -> PackedMatrix:
        """Some of the outputs, without a copy: from the beginning of a panel to the end of one or of the matrix."""
        stop = start + length
        assert start % LANES == 0
        assert stop % LANES == 0 or stop == self.outputs
        return PackedMatrix(self.form, length, self.size, self.data[start // LANES : -(-stop // LANES)])


class StackedMatrix(Protocol):
    """Matrices with the same inputs, one below the other; those that are not quantised are float32."""

    @property
    def matrices(self) -> Sequence[PackedMatrix | torch.Tensor]: ...

    @property
    def shape(self) -> tuple[int, int]: ...


def stack(matrices: Iterable[PackedMatrix | torch.Tensor]) -> list[PackedMatrix | torch.Tensor]:
    """The same with fewer: neighbours of one format become one matrix, where the first of them ends with its panel."""
    runs: list[list[PackedMatrix | torch.Tensor]] = []
    for matrix in matrices:
        last = runs[-1][-1] if runs else None
        floats = isinstance(last, torch.Tensor) and isinstance(matrix, torch.Tensor)
        packed = isinstance(last, PackedMatrix) and isinstance(matrix, PackedMatrix)
        if floats or (packed and last.form == matrix.form and last.outputs % LANES == 0):  # type: ignore[union-attr]
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return [run[0] if len(run) == 1 else _join(run) for run in runs]


def _join(run: list[Any]) -> PackedMatrix | torch.Tensor:
    if isinstance(run[0], torch.Tensor):
        return torch.cat(run)
    data = torch.cat([matrix.data for matrix in run])
    return PackedMatrix(run[0].form, sum(matrix.outputs for matrix in run), run[0].size, data)


@dataclass(frozen=True)
class Numbers:
    """A matrix as the numbers it is made of, for the twin: w = scale * (q - offset) + minimum."""

    q: torch.Tensor  # int32 [outputs, blocks, 32]
    scale: torch.Tensor  # float32 [outputs, blocks]; of HALVES: d [outputs, blocks]
    minimum: torch.Tensor | None  # float32 [outputs, blocks]
    halves: torch.Tensor | None = None  # int32 [outputs, blocks, 2]: the scales of half blocks


# ---- numbers to panels and back ------------------------------------------------------------------------------------


def _f16(raw: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] bytes -> float32 [..., n]"""
    return raw.contiguous().view(torch.float16).float()


def _bit_plane(packed: torch.Tensor, step: int) -> torch.Tensor:
    """[..., bytes] -> [..., 8 // step, bytes]: the field of `step` bits at each place of every byte."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & (2**step - 1)


def pack(name: str, q: torch.Tensor, header: list[torch.Tensor]) -> PackedMatrix:
    """q uint8 [outputs, size], and the parts of a header in their order, each uint8 [outputs, headers, bytes]: what
    weights/gguf_quants.py:split finds in a GGUF tensor."""
    form, outputs = FORMATS[name], len(q)
    padding, q = -outputs % LANES, q.unflatten(1, (-1, BLOCK))
    if padding:
        q, *header = (torch.nn.functional.pad(part, (0, 0, 0, 0, 0, padding)) for part in (q, *header))
    # [panels, lanes, headers, bytes] -> [panels, headers, what one lane has of each field, lanes]
    fields = [part.unflatten(0, (-1, LANES)) for part in header]
    wide = [2 if form.scales <= MINIMUM or i < (2 if form.scales == SUPER else 1) else 1 for i in range(len(fields))]
    heads = [part.unflatten(3, (-1, width)).permute(0, 2, 3, 1, 4).flatten(2) for part, width in zip(fields, wide)]
    blocks = _pack_bits(form, q.unflatten(0, (-1, LANES)))
    per = form.header_blocks
    data = torch.cat([*heads, blocks.unflatten(1, (-1, per)).flatten(2)], dim=2).flatten(1)
    return PackedMatrix(form, outputs, q.shape[1] * BLOCK, data.contiguous())


MOVED = ("Q4_0", "Q4_1", "Q8_0")


def move_blocks(name: str, raw: torch.Tensor) -> PackedMatrix:
    """What `pack` makes of GGUF's blocks, uint8 [outputs, bytes of a row], of a type of MOVED. The small integers are
    not taken apart: in 4 bits a byte holds the weights i and i + 16 of its block, in the file and in a panel.

    Takes a tenth of the time of `split` and `pack`, 0.4 to 0.7 ns a byte. In numpy, because torch takes two to five
    times as long to copy such small pieces."""
    form, outputs = FORMATS[name], len(raw)
    numbers, words = form.header_bytes // (2 * LANES), form.block_bytes // (4 * LANES)
    stored = np.dtype([("header", "<i2", (numbers,)), ("q", "<i4", (words,))])
    record = np.dtype([("header", "<i2", (numbers, LANES)), ("q", "<i4", (words, LANES))])
    if outputs % LANES:
        raw = torch.nn.functional.pad(raw, (0, 0, 0, -outputs % LANES))
    blocks = raw.contiguous().numpy().view(stored)
    size = blocks.shape[1] * BLOCK
    data = torch.empty(len(blocks) // LANES, form.panel_bytes(size), dtype=torch.uint8)
    for field in ("header", "q"):
        lanes = blocks[field].reshape(-1, LANES, *blocks[field].shape[1:])
        data.numpy().view(record)[field][...] = lanes.transpose(0, 2, 3, 1)
    return PackedMatrix(form, outputs, size, data)


def _pack_bits(form: Format, q: torch.Tensor) -> torch.Tensor:
    """[panels, lanes, blocks, 32] -> [panels, blocks, bytes of a block]"""
    vectors = q.unflatten(3, (8, 4)).permute(0, 2, 3, 1, 4).flatten(3)  # [panels, blocks, 8 vectors, 32 bytes]
    if form.bits == 8:
        return vectors.flatten(2)
    low = vectors & 15
    parts = [(low[..., :4, :] | low[..., 4:, :] << 4).flatten(2)]
    tops = vectors >> 4
    if form.bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        parts.append((tops << shifts).sum(-2, dtype=torch.uint8))
    if form.bits == 6:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
        parts.append((tops.unflatten(-2, (2, 4)) << shifts).sum(-2, dtype=torch.uint8).flatten(2))
    return torch.cat(parts, dim=2)


def _unpack_bits(form: Format, data: torch.Tensor) -> torch.Tensor:
    """[panels, blocks, bytes of a block] -> int32 [panels, lanes, blocks, 32]"""
    if form.bits == 8:
        vectors = data.view(torch.int8).to(torch.int32).unflatten(2, (8, 32))
    else:
        packed = data[..., :128].unflatten(2, (4, 32)).to(torch.int32)
        vectors = torch.cat([packed & 15, packed >> 4], dim=2)
        if form.bits == 5:
            vectors = vectors | _bit_plane(data[..., 128:], 1).to(torch.int32) << 4
        if form.bits == 6:
            tops = _bit_plane(data[..., 128:].unflatten(2, (2, 32)), 2).flatten(2, 3)
            vectors = vectors | tops.to(torch.int32) << 4
    return vectors.unflatten(3, (LANES, 4)).permute(0, 3, 1, 2, 4).flatten(3)


def numbers(matrix: PackedMatrix, panels: torch.Tensor | slice = slice(None)) -> Numbers:
    """Of all panels, or of some."""
    form, data = matrix.form, matrix.data[panels]
    per = form.header_blocks
    records = data.unflatten(1, (-1, form.header_bytes + per * form.block_bytes))
    header, bits = records[..., : form.header_bytes], records[..., form.header_bytes :]
    q = _unpack_bits(form, bits.unflatten(2, (per, -1)).flatten(1, 2)).flatten(0, 1)

    def lanes_first(part: torch.Tensor) -> torch.Tensor:
        """[panels, headers, numbers a lane, lanes] -> [outputs, headers * numbers a lane]"""
        return part.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)

    d = lanes_first(_f16(header[..., :16]).unsqueeze(2))
    if form.scales == SCALE:
        return Numbers(q, d, None)
    if form.scales == MINIMUM:
        return Numbers(q, d, lanes_first(_f16(header[..., 16:32]).unsqueeze(2)))
    d = d.repeat_interleave(per, 1)
    if form.scales == HALVES:
        halves = lanes_first(header[..., 16:].view(torch.int8).to(torch.int32).unflatten(2, (16, LANES)))
        return Numbers(q, d, None, halves.unflatten(1, (-1, 2)))
    n = lanes_first(_f16(header[..., 16:32]).unsqueeze(2)).repeat_interleave(per, 1)
    s, t = (lanes_first(header[..., at : at + 64].unflatten(2, (8, LANES)).float()) for at in (32, 96))
    return Numbers(q, d * s, n * t)


# ---- floats to numbers --------------------------------------------------------------------------------------------

PIECE_ROWS = 4096  # at once: quantising takes a few copies of them in float32
REFITS = 4


def quantise_matrix(name: str, w: torch.Tensor, outputs: int | None = None) -> PackedMatrix:
    """A matrix of floats, with zeros below it up to `outputs` rows.

    Q8_0: d is the block's largest |w| / 127. Q4_1: q from 0 to 15 spans the block from its smallest to its largest
    weight at first; then d and m are fitted to these q by least squares and q is rounded anew, a few times. Of the
    squared error of normally distributed weights that leaves 86 %; Q4_0, which has no m, has 121 % (108 % with a search
    for d) and is only a tenth smaller.
    """
    form, blocks = FORMATS[name], w.shape[1] // BLOCK
    pieces = []
    for rows in w.split(PIECE_ROWS):
        x = rows.float().unflatten(1, (blocks, BLOCK))
        q, header = round_eight_bits(x) if name == "Q8_0" else round_four_bits(x)
        heads = [number.half().view(torch.uint8).view(len(rows), blocks, 2) for number in header]
        pieces.append(pack(name, q.flatten(1), heads).data)
    outputs = len(w) if outputs is None else outputs
    data = torch.cat(pieces)
    missing = -(-outputs // LANES) - len(data)
    return PackedMatrix(form, outputs, w.shape[1], torch.nn.functional.pad(data, (0, 0, 0, missing)))


def _rounded(x: torch.Tensor, d: torch.Tensor, m: torch.Tensor | float, least: int, most: int) -> torch.Tensor:
    """(x - m) / d with d and m as they will be stored, in 16 bits."""
    return torch.where(d == 0, 0.0, (x - m) / d).round().clamp(least, most)


def round_eight_bits(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    d = (x.abs().amax(-1, keepdim=True) / 127).half().float()
    return _rounded(x, d, 0.0, -127, 127).to(torch.int8).view(torch.uint8), [d]


def round_four_bits(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    low, high = x.aminmax(dim=-1, keepdim=True)
    best = ((high - low) / 15).half().float(), low.half().float()
    error, q = torch.full_like(low, torch.inf), x
    d, m = best
    for _ in range(1 + REFITS):
        tried = _rounded(x, d, m, 0, 15)
        found = (tried * d + m - x).square().sum(-1, keepdim=True)
        better = found < error
        best = torch.where(better, d, best[0]), torch.where(better, m, best[1])
        error, q = torch.where(better, found, error), torch.where(better, tried, q)
        centred, mean = tried - tried.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
        spread = centred.square().sum(-1, keepdim=True)
        d = torch.where(spread == 0, 0.0, (centred * x).sum(-1, keepdim=True) / spread).half().float()
        m = (mean - d * tried.mean(-1, keepdim=True)).half().float()
    return q.to(torch.uint8), list(best)


# ---- the arithmetic ------------------------------------------------------------------------------------------------

MOST = 127 * 128  # an input is two bytes, 128 a + b


@dataclass(frozen=True)
class QuantisedRows:
    q: torch.Tensor  # int32 [rows, size], at most MOST
    scale: torch.Tensor  # float32 [rows, blocks]
    product: torch.Tensor  # float32 [rows, blocks]: scale times the sum of the block
    sums: torch.Tensor  # int32 [rows, blocks, 2]: of half blocks


def quantise(x: torch.Tensor) -> QuantisedRows:
    """Block by block: scale = max |x| / MOST, q = x / scale rounded to even. A block with an infinity or a NaN gets the
    scale NaN, one whose scale is no normal number is zero."""
    blocks = x.unflatten(1, (-1, BLOCK))
    finite = blocks.isfinite().all(-1)
    scale = blocks.abs().amax(-1) / torch.tensor(float(MOST))
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, torch.zeros(()))
    inverse = torch.where(finite & (scale > 0), 1 / scale, torch.zeros(()))
    q = torch.where(finite[..., None], blocks * inverse[..., None], torch.zeros(())).round().clamp(-MOST, MOST)
    scale = torch.where(finite, scale, torch.full((), torch.nan))
    sums = q.to(torch.int32).unflatten(2, (2, 16)).sum(-1, dtype=torch.int32)
    return QuantisedRows(q.to(torch.int32).flatten(1), scale, scale * sums.sum(-1).float(), sums)


def linear(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows, w = quantise(x), numbers(matrix)
    p = rows.q.unflatten(1, (-1, BLOCK))
    total = torch.zeros(len(x), len(w.q))
    for b in range(p.shape[1]):
        if w.halves is None:
            exact = (p[:, None, b].long() * (w.q[:, b] - matrix.form.offset)).sum(-1).float()
        else:
            parts = p[:, None, b].unflatten(-1, (2, 16)).long() * (w.q[:, b] - matrix.form.offset).unflatten(
                -1, (2, 16)
            )
            exact = (parts.sum(-1) * w.halves[:, b]).sum(-1).float()
        total = total + (w.scale[:, b] * rows.scale[:, b, None]) * exact
        if w.minimum is not None:
            product = w.minimum[:, b] * rows.product[:, b, None]
            total = total - product if matrix.form.scales == SUPER else total + product
    total = total[:, : matrix.outputs]
    return total if bias is None else total + bias


def dequantise_rows(matrix: PackedMatrix, ids: torch.Tensor) -> torch.Tensor:
    """float32 [len(ids), size]: rows of the matrix, as GGUF defines their values."""
    found = numbers(matrix, ids // LANES)
    lanes = torch.arange(len(ids)) * LANES + ids % LANES  # each id has a panel of its own here
    q = (found.q[lanes] - matrix.form.offset).float()
    if found.halves is not None:
        scale = (found.halves[lanes].float() * found.scale[lanes, :, None]).repeat_interleave(16, -1)
        return (q * scale).flatten(1)
    w = q * found.scale[lanes, :, None]
    if found.minimum is not None:
        minimum = found.minimum[lanes, :, None]
        w = w - minimum if matrix.form.scales == SUPER else w + minimum
    return w.flatten(1)
