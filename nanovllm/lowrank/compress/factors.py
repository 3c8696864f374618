"""Factors: U and V of the low-rank experts of one layer, as tensors that compute, and as files (lowrank/format.py).

x U is computed once a token, never once an expert; on the output side of w2 the experts of a token are added in r
dimensions and U2 is applied once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from nanovllm.lowrank.compress.writer import save_file
from nanovllm.lowrank.format import MATRICES, u_key, v_file, v_key

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Factors:
    w2_mode: str  # input | output
    u: dict[str, torch.Tensor]  # matrix -> [n, r]
    v: dict[str, torch.Tensor]  # matrix -> [experts, r, d]

    @property
    def svd_ranks(self) -> dict[str, int]:
        return {w: self.v[w].shape[1] for w in MATRICES}

    @property
    def num_experts(self) -> int:
        return len(self.v["w1"])

    def tensors(self) -> list[torch.Tensor]:
        return [*self.u.values(), *self.v.values()]

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Factors:
        def moved(side: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {w: t.to(device=device, dtype=dtype) for w, t in side.items()}

        return Factors(self.w2_mode, moved(self.u), moved(self.v))

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden], ids and weights [rows, top_k] -> [rows, hidden], differentiable."""
        z1, z3 = self.project(x)
        total = x.new_zeros(len(x), self.svd_ranks["w2"] if self.w2_mode == "output" else x.shape[1])
        for e in range(self.num_experts):
            rows, choice = (ids == e).nonzero(as_tuple=True)
            if len(rows):
                y = self._down(e, self.active(e, (z1[rows], z3[rows]))) * weights[rows, choice, None]
                total = total.index_add(0, rows, y)
        return self._project_back(total)

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        """The output of expert e for all rows, unweighted."""
        return self._project_back(self._down(e, self.active(e, self.project(x))))

    def project(self, x: torch.Tensor) -> Pair:
        return x @ self.u["w1"], x @ self.u["w3"]

    def active(self, e: int, z: Pair) -> torch.Tensor:
        """silu(gate) * up of expert e, from (x U1, x U3)."""
        return F.silu(z[0] @ self.v["w1"][e]) * (z[1] @ self.v["w3"][e])

    def _down(self, e: int, a: torch.Tensor) -> torch.Tensor:
        """Output side: in r dimensions, `_project_back` follows."""
        v = self.v["w2"][e]
        return (a @ self.u["w2"]) @ v if self.w2_mode == "input" else a @ v.T

    def _project_back(self, y: torch.Tensor) -> torch.Tensor:
        return y @ self.u["w2"].T if self.w2_mode == "output" else y

    # ---- files ---------------------------------------------------------------------------------------------------

    def write(self, folder: Path, layer: int, u_path: Path) -> None:
        """V of each expert in its file in `folder`, U of this layer in `u_path`."""
        for e in range(self.num_experts):
            path = v_file(folder, layer, e)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({v_key(w): self.v[w][e].contiguous().cpu() for w in MATRICES}, path)
        save_file({u_key(layer, w): self.u[w].contiguous().cpu() for w in MATRICES}, u_path)

    @classmethod
    def read(cls, folder: Path, layer: int, u_path: Path, num_experts: int, w2_mode: str) -> Factors:
        """What `write` wrote. `u_path` may hold U of other layers too."""
        experts = [load_file(str(v_file(folder, layer, e))) for e in range(num_experts)]
        v = {w: torch.stack([expert[v_key(w)] for expert in experts]) for w in MATRICES}
        with safe_open(str(u_path), "pt") as file:
            return cls(w2_mode, {w: file.get_tensor(u_key(layer, w)) for w in MATRICES}, v)
