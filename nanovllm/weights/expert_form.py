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

SVD ranks are rounded up to SVD_RANK_STEP with zeros, and K is the larger of two: rows of 16-bit numbers then begin at
multiples of 16 bytes, which a GPU loads at once, and layers of similar SVD ranks share compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

SVD_RANK_STEP = 8
GATE, UP, DOWN = "gate", "up", "down"


@dataclass(frozen=True)
class ExpertForm:
    hidden: int
    intermediate: int
    columns: int  # K: numbers that gate and up read
    svd_rank2: int = 0  # 0: dense
    side: str = ""  # of w2: "input", "output"

    @classmethod
    def dense(cls, hidden: int, intermediate: int) -> ExpertForm:
        return cls(hidden, intermediate, hidden)

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
        return replace(self, intermediate=self.intermediate // num_ranks)

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

    @cached_property
    def shared_numel(self) -> int:
        return sum(rows * columns for rows, columns in self.shared.values())


def round_svd_rank(svd_rank: int) -> int:
    return -(-svd_rank // SVD_RANK_STEP) * SVD_RANK_STEP
