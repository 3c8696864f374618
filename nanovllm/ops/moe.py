"""Mixture of experts: which experts a token takes, what they give, and their sum. Triton twins: `ops/triton/moe_*.py`.

`route(logits [T, E], top_k, renormalise, scale, num_groups, top_groups, bias)` -> ids int32 [T, k], weights float32
[T, k]. Without bias: softmax over all experts in fp32, the k largest, equal ones by lower id; divided by their sum if
renormalise, multiplied by scale. They are chosen by logit, which orders them as the probability does but is exact:
implementations whose exp differs in the last bit choose the same experts. With bias (fp32 [E]): the score is the
sigmoid of the logit; experts are chosen by score + bias, their weights are the scores without it.
Groups: only experts of the best top_groups of num_groups groups of neighbours are chosen. A group is as good as its
best expert, with bias as the sum of its best two. What is excluded counts as -inf, not as 0: score + bias may be
negative.

`expert_pairs(x [T, H], gate_up [S, 2I, H], down [S, H, I], buffers int32 [T, k], weights [T, k])` -> [T, k, H]:

    out[t, j] = weights[t, j] * down[s] @ (silu(gate_up[s, :I] @ x[t]) * (gate_up[s, I:] @ x[t])),   s = buffers[t, j].

Low-rank experts (weights/expert_form.py) are the same with other sizes and two additions:

    x [T, 2K] where gate_up is [S, 2I, K]    gate reads the first half of a row, up the second
    between [R, I], down [S, H, R]           silu(gate) * up is multiplied by `between`, the same for all, before down

Experts in 8-bit floats: gate_up and down are `ops/fp8.py:ScaledStack`, of matrices of these shapes. The result is that
of the expanded numbers, q * scale; what kernels add is not rounding the expanded number to x.dtype. Experts in
integers are `ops/integers.py:IntegerStack` likewise; kernels round x to 16-bit integers for a token or two, as other
products do.

`buffers` holds numbers of expert buffers; a row whose number is -1 is left as it was (`out` is given then). Rows of out
have as many numbers as down has outputs. S is the number of buffers, which need not be the number of experts: gate_up
and down may be views of one pool of memory, with any stride between its buffers. Sums are fp32; the SiLU product is
rounded to x.dtype, as are its product with `between` and out.

Several passes give the bits of one. Experts that do not fit a card are computed in turns: each pass gets the same x and
weights and a `buffers` with only some experts' pairs, the others -1. A result row depends on x[t], on its expert's
weights, on weights[t, j], on T and on which pairs share its expert; never on the pairs of other experts. Callers
therefore keep all pairs of an expert in one pass. Here it holds because every expert is a matrix product of its own,
over rows that begin on a cache line (a BLAS may choose other kernels by the number of rows, and by alignment).

`sum_pairs(pairs [T, k, H], more [T, H])` -> [T, H]: added in fp32 in the order of k, rounded once; then `more`, if any.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanovllm.ops.activation import silu_mul
from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.integers import IntegerStack
from nanovllm.ops.linear import linear

LINE_BYTES = 64
Stack = torch.Tensor | ScaledStack | IntegerStack


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    keys = logits if bias is None else scores + bias
    if top_groups < num_groups:
        keys = _best_groups(keys, num_groups, top_groups, num_best=1 if bias is None else 2)
    ids = _largest(keys, top_k)
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return ids.int(), weights if scale == 1.0 else weights * scale


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :count]  # topk promises no order of equals


def _best_groups(keys: torch.Tensor, num_groups: int, top_groups: int, num_best: int) -> torch.Tensor:
    """`keys` with -inf for experts of all but the best groups."""
    grouped = keys.unflatten(1, (num_groups, -1))
    chosen = _largest(grouped.topk(num_best, dim=-1).values.sum(-1), top_groups)
    excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=keys.device).scatter(1, chosen, False)
    return grouped.masked_fill(excluded[..., None], float("-inf")).flatten(1)


def expert_pairs(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    buffers: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    between: torch.Tensor | None = None,
    product: Callable[..., torch.Tensor] = linear,
) -> torch.Tensor:
    (num_tokens, top_k), out_size = buffers.shape, down.shape[1]
    out = x.new_empty(num_tokens, top_k, out_size) if out is None else out
    rows = out.view(-1, out_size)
    order = buffers.flatten().sort(stable=True).indices  # pairs by buffer, those without one first
    counts = torch.bincount(buffers.flatten() + 1, minlength=gate_up.shape[0] + 1).tolist()
    order, counts = order[counts[0] :], counts[1:]
    if len(order) == 0:
        return out
    is_split = x.shape[1] != gate_up.shape[2]
    is_plain = not is_split and between is None and product is linear and _uses_grouped_mm(x, gate_up.shape[1] // 2)
    if is_plain and isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        ends = torch.tensor(counts).cumsum(0).int().to(x.device)
        active = silu_mul(F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends))
        found = F.grouped_mm(active, down.transpose(1, 2), offs=ends)
        rows[order] = _weighted(found, weights, order)
        return out
    for buffer, pairs in enumerate(order.split(counts)):
        if len(pairs):
            tokens, first = pairs // top_k, _matrix(gate_up, buffer, x.dtype)
            both = _split_linear(x, tokens, first, product) if is_split else product(x[tokens], first)
            active = silu_mul(both)
            active = active if between is None else linear(active, between)
            rows[pairs] = _weighted(product(active, _matrix(down, buffer, x.dtype)), weights, pairs)
    return out


def _matrix(stack: Stack, buffer: int, dtype: torch.dtype) -> torch.Tensor:
    return stack.expanded(buffer, dtype) if isinstance(stack, (ScaledStack, IntegerStack)) else stack[buffer]


def _split_linear(
    x: torch.Tensor, tokens: torch.Tensor, gate_up: torch.Tensor, product: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Each half is gathered into memory of its own: see the cache lines above."""
    size = gate_up.shape[1]
    assert x.shape[1] == 2 * size
    halves = x[:, :size][tokens], x[:, size:][tokens]
    return torch.cat([product(half, weight) for half, weight in zip(halves, gate_up.chunk(2))], 1)


def _weighted(found: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """In 16 bits `found` was already rounded once by the product; the kernels weight the fp32 sum itself."""
    return (found.float() * weights.flatten()[pairs, None].float()).to(found.dtype)


def _uses_grouped_mm(x: torch.Tensor, size: int) -> bool:
    """fp32 on a CPU takes `linear` expert by expert: faster for 4 to 48 rows, and the same product elsewhere."""
    if x.is_cpu and x.dtype == torch.float32:
        return False
    whole_lines = all(n * x.element_size() % LINE_BYTES == 0 for n in (x.shape[1], size))
    return whole_lines and _has_grouped_mm(x.device, x.dtype)


@functools.cache
def _has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Tried with one small call: its devices and dtypes grew from release to release."""
    x, ends = torch.zeros(16, 32, dtype=dtype, device=device), torch.tensor([0, 16], dtype=torch.int32, device=device)
    try:
        F.grouped_mm(x, torch.zeros(2, 32, 32, dtype=dtype, device=device).transpose(1, 2), offs=ends)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def sum_pairs(pairs: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
    total = pairs[:, 0].float()
    for j in range(1, pairs.shape[1]):
        total = total + pairs[:, j]
    total = total.to(pairs.dtype)
    return total if more is None else total + more
