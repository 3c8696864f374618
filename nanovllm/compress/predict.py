"""What a rank will cost, before anything is written: curves of predicted error, ranks for a ratio of bytes, and words.

The curves come from the calibration's Gram matrices and the weights alone (solve.py: the dropped eigenvalues). They say
how well one matrix of one layer can be met on the inputs of the uncompressed model; errors of layers add up, so the
text suffers more than a single curve says. The words and the perplexity are set by the few points measured on
tests/fixtures/tiny-mixtral (`MEASURED`): a hint, no promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from tqdm import tqdm

from nanovllm.compress.calibrate import Calibration
from nanovllm.compress.solve import (
    Curve,
    allocate_ranks,
    pca_basis,
    shares_of,
    top_directions,
    weight_gram,
    whitened_basis,
)
from nanovllm.compress.windows import WindowModel
from nanovllm.errors import ConfigError

Ranks = dict[int, dict[str, int]]  # layer -> matrix -> rank. w2's is that of its output side, see `w2_rank`
HARM = (  # predicted error of a layer's output -> what to expect
    (0.10, "nearly the same text"),
    (0.30, "a little worse text"),
    (0.55, "clearly worse text, still readable"),
    (float("inf"), "expect unreadable text"),
)

MEASURED = (  # predicted error -> perplexity by the teacher's: docs/low-rank-experts.md, chapter 9, PCA and closed form
    (0.0, 1.0), (0.414, 1.32), (0.586, 1.88), (0.658, 2.96), (0.829, 9.6), (0.864, 11.3), (0.964, 56.5),
)  # fmt: skip


def perplexity_times(error: float) -> str:
    """Between the points on a straight line, of the logarithm."""
    for (left, low), (right, high) in pairwise(MEASURED):
        if error <= right:
            part = (error - left) / (right - left)
            return f"about {math.exp((1 - part) * math.log(low) + part * math.log(high)):.1f} times"
    return f"over {MEASURED[-1][1]:.0f} times"


def w2_rank(rank: int, w2_mode: str, hidden: int, size: int) -> int:
    """U2 on the input side [I, r'] has V [r', H]: at equal bytes of V its rank is I / H times that of the output
    side."""
    return rank if w2_mode == "output" else max(1, min(size, round(rank * size / hidden)))


@torch.no_grad()
def predict_curves(model: WindowModel, calibration: Calibration | None) -> dict[tuple[int, str], Curve]:
    """(layer, matrix) -> predicted relative error, squared, by rank on the hidden side. Without a calibration that of
    PCA on inputs without any preferred direction, which is too dark."""
    device, hidden, size = model.device.torch_device, model.config.hidden_size, model.moe.intermediate_size
    curves = {}
    for layer in tqdm(model.layer_ids, desc="predicting", unit="layer", disable=None, leave=False):
        experts = model.experts(layer)
        equal = [1 / len(experts)] * len(experts)
        if calibration is None:
            for w in ("w1", "w3", "w2"):
                sides = [getattr(e, w) if w == "w2" else getattr(e, w).T for e in experts]
                curves[layer, w] = _curve(pca_basis(weight_gram(sides, equal), 1).losses(), len(experts), size)
            continue
        seen = calibration.layer(layer)
        grams = [g.to(device).double() for g in seen["gram"]]
        pooled = grams[0].clone()
        for g in grams[1:]:
            pooled += g
        for w in ("w1", "w3"):
            c = weight_gram([getattr(e, w).T for e in experts], shares_of(grams))
            curves[layer, w] = _curve(whitened_basis(pooled, c, 1).losses(), len(experts), size)
        values, _ = top_directions(seen["out_gram"].to(device).double())
        losses = 1 - torch.cat([values.new_zeros(1), values.cumsum(0)]) / values.sum().clamp(min=1e-300)
        curves[layer, "w2"] = _curve(losses, len(experts), size)
    assert all(len(curve.losses) == hidden + 1 for curve in curves.values())
    return curves


def _curve(losses: torch.Tensor, num_experts: int, size: int) -> Curve:
    return Curve(losses.clamp(min=0).tolist(), num_experts * size)


def equal_ranks(model: WindowModel, rank: int) -> Ranks:
    hidden = model.config.hidden_size
    if not 1 <= rank <= hidden:
        raise ConfigError(
            f"--rank {rank}: must be in [1, {hidden}], the hidden size; {max(1, hidden // 2)} keeps half of the bytes"
        )
    return {layer: {"w1": rank, "w2": rank, "w3": rank} for layer in model.layer_ids}


def ranks_for_ratio(model: WindowModel, curves: dict[tuple[int, str], Curve], ratio: float) -> Ranks:
    """Ranks by layer and matrix that keep `ratio` of the experts' bytes (of V) with the least predicted error."""
    if not 0 < ratio <= 1:
        raise ConfigError(f"--target-ratio {ratio}: must be in (0, 1], the share of the experts' bytes to keep")
    hidden, size, moe = model.config.hidden_size, model.moe.intermediate_size, model.moe
    dense = 3 * hidden * size * moe.num_experts * len(model.layer_ids)
    step = max(1, hidden // 64)
    found = allocate_ranks(curves, int(ratio * dense), step)  # bytes per value cancel
    return {layer: {w: found[layer, w] for w in ("w1", "w2", "w3")} for layer in model.layer_ids}


@dataclass(frozen=True)
class Damage:
    kept: float  # of V
    error: float  # predicted, of a layer's output, mean over the layers
    words: str


def predict_damage(model: WindowModel, curves: dict[tuple[int, str], Curve], ranks: Ranks) -> Damage:
    hidden = model.config.hidden_size
    total = kept = 0.0
    for layer in model.layer_ids:
        fine = 1.0
        for w in ("w1", "w2", "w3"):
            rank = ranks[layer][w]
            fine *= 1 - min(1.0, curves[layer, w].losses[rank])
            kept += rank / hidden / 3 / len(model.layer_ids)
        total += (1 - fine) ** 0.5
    error = total / len(model.layer_ids)
    return Damage(kept, error, next(words for limit, words in HARM if error <= limit))


def describe_damage(model: WindowModel, curves: dict[tuple[int, str], Curve], ranks: Ranks) -> str:
    """One or two sentences for a person, with the remedy where it is bad."""
    damage = predict_damage(model, curves, ranks)
    largest = max(rank for of_layer in ranks.values() for rank in of_layer.values())
    text = (f"rank {largest} keeps {damage.kept:.0%} of the experts' bytes; predicted error of a layer's output "
            f"{damage.error:.2f}: {damage.words} (perplexity {perplexity_times(damage.error)} the "
            "model's, going by a small one)")  # fmt: skip
    if damage.error > HARM[1][0]:
        hidden = model.config.hidden_size
        for rank in range(1, hidden + 1):
            better = predict_damage(model, curves, equal_ranks(model, rank))
            if better.error <= HARM[1][0]:
                text += (f"; rank {rank} ({better.kept:.0%}) is the smallest with {better.error:.2f}, {better.words}: "
                         f"it keeps perplexity within {perplexity_times(better.error)}")  # fmt: skip
                break
    return text
