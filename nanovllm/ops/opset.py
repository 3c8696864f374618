"""Ops: the operators a model is built from, chosen once per engine: Triton kernels on a GPU, C or PyTorch on a CPU.

All sets have the same signatures, so the code of a layer does not depend on its set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.ops import activation, linear, mla, moe, norm, qk_norm_rope, rotary

GEMV_ROWS, FUSED_ROWS, FUSED_HIDDEN = 2, 8, 2048  # see Ops.fuses_few


@dataclass(frozen=True)
class Ops:
    name: str
    linear: Callable[..., torch.Tensor]
    embed: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    qk_norm_rope: Callable[..., torch.Tensor]
    gemv: Any  # None without Triton. A linear map of 1 to 8 rows, fused with the norm, gate or sum around it
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # this and the next two: ops/moe.py
    expert_pairs: Callable[..., torch.Tensor]
    sum_pairs: Callable[..., torch.Tensor]
    latent_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # ops/mla.py
    gathers_rope: bool  # cosines and sines are gathered once a step for all layers, not by each layer's kernel
    faster: Any = None  # (x, weight, bias, gated) -> the product for the two below; None: `linear` is as fast
    quantised: str = ""  # the instructions of products with quantised weights; empty: there are none
    kernels: Any = None  # the NativeOps whose methods these are

    def linear_parts(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `linear`; or in parts, [parts, rows, size] in float32, which add_rms_norm and qk_norm_rope add up in their
        order as they read them."""
        found = None if self.faster is None else self.faster(x, weight, bias, False)
        return self.linear(x, weight, bias) if found is None else found

    def gated_linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate) * up, of a weight that has gate and up below each other."""
        found = None if self.faster is None else self.faster(x, weight, bias, True)
        return self.silu_mul(self.linear(x, weight, bias)) if found is None else found

    def normed_linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """As `linear`; where a layer of such weights computes norms inside its products, by such a one, and the norm is
        undone: for the check at the start (layers/parted.py)."""
        if not self._fuses(x, {kind_of(weight)}):
            return self.linear(x, weight)
        size = x.float().pow(2).mean(1, keepdim=True).sqrt()
        return self.gemv(x, weight, None, norm=(x.new_ones(x.shape[1]), 0.0)) * size

    def fuses_few(self, x: torch.Tensor, attention: Any, mlp: Any) -> bool:
        """Whether four products with norm, gate and sums inside are fastest for a layer of these tokens [tokens,
        hidden]. Measured on an H200, the four of a layer at one row: 18.8 us fused against 20.7 apart at hidden 1024,
        but 111 against 101 at hidden 4096, where the matrix products take long enough to hide the norms (a whole step:
        4.33 ms against 4.06). Not so with integers, whose products are preceded by a launch that rounds x: it computes
        the norm as well. A file may have fewer bits for some matrices of a layer only."""
        if self.gemv is None:
            return False
        return self._fuses(x, {kind_of(part.weight) for part in (attention.qkv, attention.out, mlp.gate_up, mlp.down)})

    def _fuses(self, x: torch.Tensor, kinds: set[str]) -> bool:
        rows, hidden = x.shape
        if self.gemv is None or x.dtype == torch.float32:
            return False
        if rows > GEMV_ROWS:
            return rows <= FUSED_ROWS and hidden <= FUSED_HIDDEN and kinds == {""} and x.dtype == torch.bfloat16
        return hidden <= FUSED_HIDDEN or kinds == {"integers"}

    def rope_inputs(self, table: torch.Tensor, positions: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
        return (rotary.gather_angles(table, positions), None) if self.gathers_rope else (table, positions)


def kind_of(weight: Any) -> str:
    """Of a weight in fewer bits; empty: it is an ordinary one."""
    return "" if isinstance(weight, torch.Tensor) or weight.plain is not None else weight.kind


PLAIN = Ops(
    name="torch",
    linear=linear.linear,
    embed=F.embedding,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    silu_mul=activation.silu_mul,
    qk_norm_rope=qk_norm_rope.qk_norm_rope,
    gemv=None,
    route=moe.route,
    expert_pairs=moe.expert_pairs,
    sum_pairs=moe.sum_pairs,
    latent_rope=mla.latent_rope,
    gathers_rope=True,
)


def triton_ops() -> Ops:
    """Raises ImportError where triton is not installed."""
    from nanovllm.ops.triton import activation as t_activation
    from nanovllm.ops.triton import few_rows as t_few
    from nanovllm.ops.triton import fp8 as t_fp8
    from nanovllm.ops.triton import gemv as t_gemv
    from nanovllm.ops.triton import integers as t_integers
    from nanovllm.ops.triton import matmul as t_matmul
    from nanovllm.ops.triton import mla_rope, moe_experts, moe_route
    from nanovllm.ops.triton import norm as t_norm
    from nanovllm.ops.triton import qk_norm_rope as t_rope

    products = {"fp8": t_fp8.scaled_linear, "integers": t_integers.integer_linear}
    in_parts: dict[str, Any] = {"fp8": t_fp8.linear_in_parts, "integers": t_integers.linear_in_parts}
    fused: dict[str, Any] = {"fp8": t_gemv.gemv, "integers": t_integers.integer_gemv}

    def few_rows_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, torch.Tensor):  # a PartedWeight
            if weight.plain is None:
                return products[weight.kind](x, weight, bias)
            weight = weight.plain
        if x.dtype != torch.float32 and t_gemv.prefers_gemv(len(x), *weight.shape):
            return t_gemv.gemv(x, weight, bias)
        if x.dtype == torch.bfloat16 and t_few.prefers_few_rows(len(x), *weight.shape):
            return t_few.few_rows_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def faster(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, gated: bool) -> torch.Tensor | None:
        plain = weight if isinstance(weight, torch.Tensor) else weight.plain
        if plain is not None:
            launch = t_matmul.launch_for(x, plain, gated)
            return None if launch is None else t_matmul.matmul(x, plain, launch, bias, gated)
        parts = in_parts[weight.kind](x, weight, bias)
        return t_activation.silu_mul(parts, like=x) if gated and parts is not None else parts

    def fused_gemv(x: torch.Tensor, weight: Any, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(weight, torch.Tensor) or weight.plain is not None:
            product = t_gemv.gemv if len(x) <= GEMV_ROWS else t_few.few_rows_linear
            return product(x, getattr(weight, "plain", weight), *args, **options)
        return fused[weight.kind](x, weight, *args, **options)

    return Ops(
        name="triton",
        linear=few_rows_linear,
        embed=F.embedding,
        rms_norm=t_norm.rms_norm,
        add_rms_norm=t_norm.add_rms_norm,
        silu_mul=t_activation.silu_mul,
        qk_norm_rope=t_rope.qk_norm_rope,
        gemv=fused_gemv,
        route=moe_route.route,
        expert_pairs=moe_experts.expert_pairs,
        sum_pairs=moe_route.sum_pairs,
        latent_rope=mla_rope.latent_rope,
        gathers_rope=False,
        faster=faster,
    )


def native_ops() -> Ops:
    """C kernels for fp32 on a CPU. Raises ImportError where they cannot be compiled."""
    from nanovllm.ops.native.ops import NativeOps

    kernels = NativeOps()
    return replace(
        PLAIN,
        name="native",
        linear=kernels.linear,
        embed=kernels.embed,
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        silu_mul=kernels.silu_mul,
        qk_norm_rope=kernels.qk_norm_rope,
        expert_pairs=partial(moe.expert_pairs, product=kernels.linear),
        gathers_rope=False,
        quantised=kernels.quant_variant,
        kernels=kernels,
    )


def choose_ops(on_gpu: bool, dtype: torch.dtype) -> Ops:
    """Kernels where they can be had (Triton on a GPU, C on a CPU), else plain PyTorch, which runs anywhere."""
    with contextlib.suppress(ImportError):
        if on_gpu:
            return triton_ops()
        if dtype == torch.float32:
            return native_ops()
    return PLAIN
