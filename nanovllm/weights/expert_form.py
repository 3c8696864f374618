"""The sizes of one layer's experts in memory, [gate | up | down], dense or low-rank. No torch here.

To the kernels a low-rank expert (lowrank/format.py) is an expert of other sizes. K is the SVD rank of w1 and w3, r2
that of w2:

    dense        gate, up [I, H]    down [H, I]       reads x                writes y
    "input"      gate, up [I, K]    down [H, r2]      reads z = x [U1 | U3]  multiplies silu(gate) * up by U2 first
    "output"     gate, up [I, K]    down [r2, I]      reads z                writes r2 numbers; U2 follows their sum

What all experts of a layer share is small and stays on the device: u13 = [U1 | U3]^T [2K, H] and u2, as [r2, I] = U2^T
("input") or [H, r2] = U2 ("output").

The ranks (processes) of a tensor-parallel engine cut an expert by I, gate and up by rows. Each then has I / n of the
numbers a = silu(gate) * up, and what follows is linear in them, so it is computed from a part of them and added up over
the ranks at the end, once a layer:

    dense       y  = sum_n down[:, In] a[In]             down is cut by columns
    "output"    y  = U2 (sum_n V2[:, In] a[In])          V2 is cut by columns; r2 numbers a token are added up, then U2
    "input"     y  = sum_n V2 (U2^T[:, In] a[In])        U2 is cut by columns; V2 [H, r2] is whole on every rank

The last is the price of adding once: cutting V2 too would need U2^T a whole before it, a sum over the ranks for every
pair (token, expert) and not for every token. z = x [U1 | U3] is computed by all: to cut it would need a sum of its own.

Dense experts may be kept in 8-bit floats (ops/fp8.py). A block is then bytes, and the scales follow them, so that one
copy brings all of an expert:

    [gate q | up q | down q | scales of gate | of up | of down | unused]      q: a byte each; scales: fp32

A scale is that of a row, or of a block of 128 x 128. The scales begin at a multiple of ALIGNED bytes, and a block has a
multiple of BLOCK_STEP bytes: numbers that are added to a product of round sizes would leave it few divisors, and a
block is copied in pieces of equal size. Ranks cut blocks of scales only where 128 divides the part of each rank;
otherwise the experts are expanded there (`share`).

Or in integers of 4 or 8 bits (ops/integers.py), gate and up alike, down perhaps in others. A row of words begins at a
multiple of 64 bytes; the factors of gate and up lie beside each other, group after group:

    [gate words | up words | down words | factors of gate and up, [groups, 2I] | of down, [groups, H] | unused]

Ranks cut down's inputs at multiples of 32; groups become smaller where a cut is not at a border of theirs.

SVD ranks are rounded up to SVD_RANK_STEP with zeros, and K is the larger of two: rows of 16-bit numbers then begin at
multiples of 16 bytes, which a GPU loads at once, and layers of similar SVD ranks share compiled kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

SVD_RANK_STEP = 8
SCALE_BYTES = 4
ALIGNED, BLOCK_STEP = 16, 512
GATE, UP, DOWN = "gate", "up", "down"
WORD_BLOCK_BYTES, LEAST_CUT = 64, 32  # of ops/integers.py: 16 words; inputs


@dataclass(frozen=True)
class ExpertIntegers:
    """(bits, inputs that share factors), of gate and up, and of down."""

    gate_up: tuple[int, int]
    down: tuple[int, int]

    def of(self, part: str) -> tuple[int, int]:
        return self.down if part == DOWN else self.gate_up

    def cut(self, inputs: int) -> ExpertIntegers | None:
        """Of a rank that has so many inputs of down. None: cuts are within 32 of them."""
        bits, group = self.down
        least = min(group, LEAST_CUT)
        group = math.gcd(group, inputs)
        return replace(self, down=(bits, group)) if inputs % LEAST_CUT == 0 and group % least == 0 else None

    @property
    def name(self) -> str:
        """Of gate and up, as layers/integers.py:IntegerForm is called."""
        return "int{}-{}".format(*self.gate_up)


@dataclass(frozen=True)
class ExpertForm:
    hidden: int
    intermediate: int
    columns: int  # K: numbers that gate and up read
    svd_rank2: int = 0  # 0: dense
    side: str = ""  # of w2: "input", "output"
    # 8-bit floats: rows and columns of a block that has a scale, 0 = a row has one. None: numbers of the model's dtype.
    scale_block: int | None = None
    integers: ExpertIntegers | None = None

    @classmethod
    def dense(
        cls,
        hidden: int,
        intermediate: int,
        scale_block: int | None = None,
        integers: ExpertIntegers | None = None,
    ) -> ExpertForm:
        return cls(hidden, intermediate, hidden, scale_block=scale_block, integers=integers)

    @property
    def is_bytes(self) -> bool:
        """A block is bytes, not numbers of the model's dtype."""
        return self.scale_block is not None or self.integers is not None

    @property
    def is_low_rank(self) -> bool:
        return self.side != ""

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """In the order in which they lie."""
        down = {"": (self.hidden, self.intermediate), "input": (self.hidden, self.svd_rank2)}
        gate = (self.intermediate, self.columns)
        return {GATE: gate, UP: gate, DOWN: down.get(self.side, (self.svd_rank2, self.intermediate))}

    @cached_property
    def cut_dims(self) -> dict[str, int]:
        """Along which dimension ranks cut what has the intermediate size in it; the rest is whole on each."""
        return {GATE: 0, UP: 0, "u2" if self.side == "input" else DOWN: 1}

    def share(self, num_ranks: int) -> ExpertForm:
        """Of one rank's part of an expert."""
        assert self.intermediate % num_ranks == 0
        size = self.intermediate // num_ranks
        cuts_blocks = num_ranks > 1 and self.scale_block and size % self.scale_block
        block = None if cuts_blocks else self.scale_block
        integers = self.integers if num_ranks == 1 or self.integers is None else self.integers.cut(size)
        return replace(self, intermediate=size, scale_block=block, integers=integers)

    @cached_property
    def shared(self) -> dict[str, tuple[int, int]]:
        if not self.is_low_rank:
            return {}
        u2 = (self.svd_rank2, self.intermediate) if self.side == "input" else (self.hidden, self.svd_rank2)
        return {"u13": (2 * self.columns, self.hidden), "u2": u2}

    @property
    def in_size(self) -> int:
        """Numbers of a token that its experts read."""
        return 2 * self.columns if self.is_low_rank else self.hidden

    @property
    def out_size(self) -> int:
        """Numbers that an expert gives for a token."""
        return self.parts[DOWN][0]

    @cached_property
    def numel(self) -> int:
        return sum(rows * columns for rows, columns in self.parts.values())

    def part_size(self, part: str) -> int:
        """Of its numbers in a block: as many numbers or, where a block is bytes, bytes."""
        rows, columns = self.parts[part]
        if self.integers is None:
            return rows * columns
        return rows * self._word_blocks(part) * WORD_BLOCK_BYTES

    def _word_blocks(self, part: str) -> int:
        """Of integers, in a row."""
        assert self.integers is not None
        bits, _ = self.integers.of(part)
        return -(-self.parts[part][1] * bits // (WORD_BLOCK_BYTES * 8))

    def scale_shape(self, part: str) -> tuple[int, ...]:
        """Of 8-bit floats; of integers that of factors."""
        rows, columns = self.parts[part]
        if self.integers is not None:
            bits, group = self.integers.of(part)
            return self._word_blocks(part) * (WORD_BLOCK_BYTES * 8 // bits) // group, rows
        block = self.scale_block
        return (-(-rows // block), -(-columns // block)) if block else (rows,)

    @cached_property
    def numbers_size(self) -> int:
        """As `part_size`, of all parts."""
        return sum(self.part_size(part) for part in self.parts)

    @cached_property
    def scales_start(self) -> int:
        """The byte of a block at which the scales begin."""
        return -(-self.numbers_size // ALIGNED) * ALIGNED

    @cached_property
    def num_scales(self) -> int:
        return sum(math.prod(self.scale_shape(part)) for part in self.parts)

    @cached_property
    def length(self) -> int:
        """Of a block: numbers, or bytes."""
        if not self.is_bytes:
            return self.numel
        return -(-(self.scales_start + self.num_scales * SCALE_BYTES) // BLOCK_STEP) * BLOCK_STEP

    def num_bytes(self, itemsize: float) -> int:
        """Of a block. `itemsize`: of a number of the model's dtype."""
        return self.length if self.is_bytes else int(self.numel * itemsize)

    @cached_property
    def shared_numel(self) -> int:
        return sum(rows * columns for rows, columns in self.shared.values())


def round_svd_rank(svd_rank: int) -> int:
    return -(-svd_rank // SVD_RANK_STEP) * SVD_RANK_STEP
