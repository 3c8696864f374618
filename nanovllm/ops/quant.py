"""Quantised matrices on a CPU: how they are packed, and the plain twin of ops/native/quant.c.

    matrix = pack("Q4_1", q, header)           # of weights/gguf_quants.py:split
    y = linear(x, matrix)                      # x float32 [rows, size] -> [rows, outputs]
    rows = dequantise_rows(matrix, ids)        # of an embedding

quant.c says what is multiplied with what and where the bits lie. Here the same arithmetic is written with whole
tensors: integers exactly, floats in the same order (block after block, every product and sum rounded to float32). So
the results are equal bit for bit. It is slow, and it needs no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    q, *header = (torch.nn.functional.pad(part, (0, 0, 0, 0, 0, padding)) for part in (q, *header))
    # [panels, lanes, headers, bytes] -> [panels, headers, what one lane has of each field, lanes]
    fields = [part.unflatten(0, (-1, LANES)) for part in header]
    wide = [2 if form.scales <= MINIMUM or i < (2 if form.scales == SUPER else 1) else 1 for i in range(len(fields))]
    heads = [part.unflatten(3, (-1, width)).permute(0, 2, 3, 1, 4).flatten(2) for part, width in zip(fields, wide)]
    blocks = _pack_bits(form, q.unflatten(0, (-1, LANES)))
    per = form.header_blocks
    data = torch.cat([*heads, blocks.unflatten(1, (-1, per)).flatten(2)], dim=2).flatten(1)
    return PackedMatrix(form, outputs, q.shape[1] * BLOCK, data.contiguous())


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


# ---- the arithmetic ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantisedRows:
    q: torch.Tensor  # int8 [rows, size]
    scale: torch.Tensor  # float32 [rows, blocks]
    product: torch.Tensor  # float32 [rows, blocks]: scale times the sum of the block
    sums: torch.Tensor  # int32 [rows, blocks, 2]: of half blocks


def quantise(x: torch.Tensor) -> QuantisedRows:
    """Block by block: scale = max |x| / 127, q = x / scale rounded to even. A block with an infinity or a NaN gets the
    scale NaN."""
    blocks = x.unflatten(1, (-1, BLOCK))
    finite = blocks.isfinite().all(-1)
    scale = blocks.abs().amax(-1) / torch.tensor(127.0)
    inverse = torch.where(finite & (scale > 0), 1 / scale, torch.zeros(()))
    q = torch.where(finite[..., None], blocks * inverse[..., None], torch.zeros(())).round().clamp(-127, 127)
    scale = torch.where(finite, scale, torch.full((), torch.nan))
    sums = q.to(torch.int32).unflatten(2, (2, 16)).sum(-1, dtype=torch.int32)
    return QuantisedRows(q.to(torch.int8).flatten(1), scale, scale * sums.sum(-1).float(), sums)


def linear(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows, w = quantise(x), numbers(matrix)
    p = rows.q.to(torch.int32).unflatten(1, (-1, BLOCK))
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
