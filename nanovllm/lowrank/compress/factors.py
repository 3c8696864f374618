"""Factors: the low-rank experts of one layer, as tensors that compute, and as files (lowrank/folder.py).

x U is computed once a token, never once an expert; on the output side of w2 the experts of a token are added in r
dimensions and U2 is applied once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from nanovllm.lowrank.compress.writer import save_file
from nanovllm.lowrank.folder import MATRICES, SvdMetadata, u_key, v_file, v_key


@dataclass
class Factors:
    mode: str  # shared | private
    w2_mode: str  # input | output
    u: dict[str, torch.Tensor]  # shared: [n, r]; private: [experts, n, r]
    v: dict[str, torch.Tensor]  # [experts, r, d]

    @property
    def ranks(self) -> dict[str, int]:
        return {w: self.v[w].shape[1] for w in MATRICES}

    @property
    def num_experts(self) -> int:
        return len(self.v["w1"])

    def tensors(self) -> list[torch.Tensor]:
        return [*self.u.values(), *self.v.values()]

    def num_values(self) -> int:
        return sum(t.numel() for t in self.tensors())

    def to(self, *where: torch.device | torch.dtype) -> Factors:
        def moved(side: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {w: t.to(*where) for w, t in side.items()}

        return Factors(self.mode, self.w2_mode, moved(self.u), moved(self.v))

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden], ids and weights [rows, top_k] -> [rows, hidden], differentiable."""
        shared = self.mode == "shared"
        z1, z3 = (x @ self.u["w1"], x @ self.u["w3"]) if shared else (x, x)  # [rows, r]
        sum_in_rank = shared and self.w2_mode == "output"
        total = x.new_zeros(len(x), self.ranks["w2"] if sum_in_rank else x.shape[1])
        for e in range(self.num_experts):
            rows, place = (ids == e).nonzero(as_tuple=True)
            if len(rows):
                y = self._down(e, self.active(e, z1[rows], z3[rows])) * weights[rows, place, None]
                total = total.index_add(0, rows, y)
        return total @ self.u["w2"].T if sum_in_rank else total

    def active(self, e: int, z1: torch.Tensor, z3: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of expert e, from x U (shared) or from x (private)."""
        if self.mode == "private":
            z1, z3 = z1 @ self.u["w1"][e], z3 @ self.u["w3"][e]
        return F.silu(z1 @ self.v["w1"][e]) * (z3 @ self.v["w3"][e])

    def _down(self, e: int, a: torch.Tensor) -> torch.Tensor:
        """Shared output side: still in r dimensions."""
        v = self.v["w2"][e]
        if self.mode == "private":
            u = self.u["w2"][e]
            return (a @ u) @ v if self.w2_mode == "input" else (a @ v.T) @ u.T
        return (a @ self.u["w2"]) @ v if self.w2_mode == "input" else a @ v.T

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        """What expert e gives for all rows, unweighted."""
        z1, z3 = (x @ self.u["w1"], x @ self.u["w3"]) if self.mode == "shared" else (x, x)
        y = self._down(e, self.active(e, z1, z3))
        return y @ self.u["w2"].T if self.mode == "shared" and self.w2_mode == "output" else y

    # ---- files ---------------------------------------------------------------------------------------------------

    def u_tensors(self, layer: int) -> dict[str, torch.Tensor]:
        if self.mode == "shared":
            return {u_key(layer, w): self.u[w].contiguous().cpu() for w in MATRICES}
        return {u_key(layer, w, e): self.u[w][e].contiguous().cpu() for w in MATRICES for e in range(self.num_experts)}

    def write_experts(self, folder: Path, layer: int) -> None:
        for e in range(self.num_experts):
            path = v_file(folder, layer, e)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({v_key(w): self.v[w][e].contiguous().cpu() for w in MATRICES}, str(path))

    @classmethod
    def read(
        cls, folder: Path, layer: int, facts: SvdMetadata | Factors, u_tensors: Mapping[str, torch.Tensor]
    ) -> Factors:
        """`facts`: whatever knows mode, number of experts and side of w2."""
        w2_mode = facts.w2_mode if isinstance(facts, Factors) else facts.w2_modes[layer]
        experts = [load_file(str(v_file(folder, layer, e))) for e in range(facts.num_experts)]
        v = {w: torch.stack([expert[v_key(w)] for expert in experts]) for w in MATRICES}
        if facts.mode == "shared":
            u = {w: u_tensors[u_key(layer, w)] for w in MATRICES}
        else:
            u = {w: torch.stack([u_tensors[u_key(layer, w, e)] for e in range(facts.num_experts)]) for w in MATRICES}
        return cls(facts.mode, w2_mode, u, v)
