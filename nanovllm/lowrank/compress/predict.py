"""The cost of an SVD rank, before anything is written: curves of predicted error, SVD ranks for a share of the bytes,
and a sentence for the user.

The curves come from the calibration's Gram matrices and the weights alone (solve.py: the dropped eigenvalues). Each is
the error of one matrix of one layer on the inputs of the uncompressed model; errors of layers add up, so the text
suffers more than a single curve shows. A perplexity is read off the points measured on tests/fixtures/tiny-mixtral
(`MEASURED`). For another small model that was too low at every SVD rank: 1.2 times for a measured 1.33, 2.4 for 4.0, 10
for 19. On the fixture itself it is too high near full rank: 1.2 for 1.1, 1.13 for 1.03. So a range is given that holds
all of these: twice the logarithm, and half of it, less where the error is small, since losses begin with its square.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.lowrank.compress.calibrate import Calibration
from nanovllm.lowrank.compress.model import WindowModel
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.solve import (
    Curve,
    allocate_svd_ranks,
    pca_basis,
    pooled,
    shares_of,
    weight_gram,
    whitened_basis,
)
from nanovllm.lowrank.format import MATRICES

SvdRanks = dict[int, dict[str, int]]  # layer -> matrix -> SVD rank on the hidden side, see `stored_svd_ranks`
Losses = dict[tuple[int, str], list[float]]  # (layer, matrix) -> predicted relative error, squared, by SVD rank
WORDS = (  # most perplexity, times the model's -> the text; for predicted and for measured ones
    (1.1, "nearly the same"),
    (1.5, "a little worse"),
    (5.0, "clearly worse"),
    (math.inf, "unreadable"),
)
FAIR = 1.5  # most, of a better SVD rank that is proposed: a little worse

MEASURED = (  # predicted error -> perplexity by the teacher's: docs/low-rank-experts.md, chapter 9, PCA and closed form
    (0.0, 1.0),
    (0.414, 1.32),
    (0.586, 1.88),
    (0.658, 2.96),
    (0.829, 9.6),
    (0.864, 11.3),
    (0.964, 56.5),
)


def perplexity_range(error: float) -> tuple[float, float]:
    """(least, most) times the model's. Between the points on a straight line, of the logarithm."""
    for (left, low), (right, high) in pairwise(MEASURED):
        if error <= right:
            part = (error - left) / (right - left)
            middle = (1 - part) * math.log(low) + part * math.log(high)
            return math.exp(middle / 2 * min(1.0, error / MEASURED[1][0])), math.exp(middle * 2)
    return MEASURED[-1][1] ** 0.5, math.inf


def describe_range(times: tuple[float, float]) -> str:
    low, high = (f"{value:.1f}" if value < 10 else f"{value:,.0f}" for value in times)
    return f"more than {low} times" if times[1] == math.inf else f"{low} to {high} times"


def text_in_words(low: float, high: float | None = None) -> str:
    """`high`: where there is a range."""
    worst, best = (next(word for limit, word in WORDS if times <= limit) for times in (high or low, low))
    return f"{worst} text" if worst == best else f"{best} to {worst} text"


# ---- sizes -----------------------------------------------------------------------------------------------------------


def w2_svd_rank(svd_rank: int, w2_mode: str, hidden: int, size: int) -> int:
    """U2 on the input side [I, r'] has V [r', H]: at equal bytes of V its SVD rank is I / H times that of the output
    side."""
    return svd_rank if w2_mode == "output" else max(1, min(size, svd_rank * size // hidden))


def stored_svd_ranks(model: WindowModel, svd_ranks: dict[str, int], side: str) -> dict[str, int]:
    """Those of a layer as they are stored, from those on the hidden side."""
    w2 = w2_svd_rank(svd_ranks["w2"], side, model.config.hidden_size, model.moe.intermediate_size)
    return {**svd_ranks, "w2": w2}


def values_per_svd_rank(model: WindowModel, w: str, side: str) -> int:
    """Numbers in V and U of one stored SVD rank more."""
    hidden, size = model.config.hidden_size, model.moe.intermediate_size
    rows, columns = (size, hidden) if w == "w2" and side == "input" else (hidden, size)
    return model.moe.num_experts * columns + rows


def kept_share(model: WindowModel, svd_ranks: SvdRanks, options: Options) -> float:
    """Bytes of V and U by those of the experts. Where w2's side is still open, that of the larger one."""

    def values(of_layer: dict[str, int], side: str) -> int:
        stored = stored_svd_ranks(model, of_layer, side)
        return sum(svd_rank * values_per_svd_rank(model, w, side) for w, svd_rank in stored.items())

    total = sum(max(values(of_layer, side) for side in options.sides) for of_layer in svd_ranks.values())
    return total / model.num_expert_values


# ---- SVD ranks and errors --------------------------------------------------------------------------------------------


@torch.no_grad()
def predict_losses(model: WindowModel, calibration: Calibration | None) -> Losses:
    """By SVD rank on the hidden side. Without a calibration those of PCA on inputs without any preferred direction,
    which are too high."""
    device, losses = model.device.torch_device, Losses()
    for layer in tqdm(model.layer_ids, desc="predicting", unit="layer", disable=None, leave=False):
        experts = model.experts(layer)
        sides = {w: [getattr(e, w) if w == "w2" else getattr(e, w).T for e in experts] for w in MATRICES}
        if calibration is None:
            bases = {w: pca_basis(weight_gram(sides[w], [1 / len(experts)] * len(experts)), 1) for w in MATRICES}
        else:
            seen = calibration.layer(layer)
            grams = [g.to(device).double() for g in seen["gram"]]
            total, shares = pooled(grams), shares_of([float(g.trace()) for g in grams])
            bases = {w: whitened_basis(total, weight_gram(sides[w], shares), 1) for w in ("w1", "w3")}
            bases["w2"] = pca_basis(seen["out_gram"].to(device).double(), 1)
        losses |= {(layer, w): basis.losses().tolist() for w, basis in bases.items()}
    assert all(len(of) == model.config.hidden_size + 1 for of in losses.values())
    return losses


def equal_svd_ranks(model: WindowModel, svd_rank: int) -> SvdRanks:
    hidden = model.config.hidden_size
    if not 1 <= svd_rank <= hidden:
        raise ConfigError(
            f"--rank {svd_rank}: must be in [1, {hidden}], the hidden size; {max(1, hidden // 2)} keeps a little over "
            "half of the bytes"
        )
    return {layer: dict.fromkeys(MATRICES, svd_rank) for layer in model.layer_ids}


def svd_ranks_for_ratio(model: WindowModel, losses: Losses, options: Options) -> SvdRanks:
    """By layer and matrix, with the least predicted error of those that keep at most `target_ratio` of the experts'
    bytes."""
    ratio, hidden, size = options.target_ratio, model.config.hidden_size, model.moe.intermediate_size
    assert ratio is not None

    def cost(w: str) -> int:
        stored = {"output": 1.0, "input": size / hidden if w == "w2" else 1.0}  # for one on the hidden side
        return math.ceil(max(stored[side] * values_per_svd_rank(model, w, side) for side in options.sides))

    curves = {key: Curve(of, cost(key[1])) for key, of in losses.items()}
    found = allocate_svd_ranks(curves, int(ratio * model.num_expert_values), max(1, hidden // 64))
    svd_ranks = {layer: {w: found[layer, w] for w in MATRICES} for layer in model.layer_ids}
    if (least := kept_share(model, svd_ranks, options)) > ratio:
        raise ConfigError(f"--target-ratio {ratio}: the smallest ranks keep {least:.1%} already; give more than that")
    return svd_ranks


def predict_error(model: WindowModel, losses: Losses, svd_ranks: SvdRanks) -> float:
    """Of a layer's output, mean over the layers."""
    total = 0.0
    for layer in model.layer_ids:
        fine = math.prod(1 - min(1.0, losses[layer, w][svd_ranks[layer][w]]) for w in MATRICES)
        total += (1 - fine) ** 0.5
    return total / len(model.layer_ids)


def describe_damage(
    model: WindowModel, losses: Losses, svd_ranks: SvdRanks, options: Options, narrow: bool = False
) -> str:
    """One or two sentences for the user, with the remedy where the text will be bad. `narrow`: the calibration's text
    is too uniform for a prediction."""
    used = sorted({svd_rank for of_layer in svd_ranks.values() for svd_rank in of_layer.values()})
    bound = "at most " if len(options.sides) > 1 else ""
    kept = kept_share(model, svd_ranks, options)
    text = f"rank {used[0]}" if len(used) == 1 else f"ranks {used[0]} to {used[-1]}"
    text += f": {bound}{kept:.0%} of the experts' bytes kept, U included"
    if kept >= 1:
        text += ", which saves nothing"
    if narrow:
        return f"{text}; what becomes of the text cannot be predicted from this calibration"
    error = predict_error(model, losses, svd_ranks)
    times = perplexity_range(error)
    text += (
        f"; predicted error of a layer's output {error:.2f}: {text_in_words(*times)} (perplexity "
        f"{describe_range(times)} the model's, going by two small ones)"
    )
    if times[1] <= FAIR:
        return text
    for svd_rank in range(1, model.config.hidden_size + 1):
        better = equal_svd_ranks(model, svd_rank)
        times = perplexity_range(predict_error(model, losses, better))
        if times[1] > FAIR:
            continue
        if (kept := kept_share(model, better, options)) >= 1:
            break
        return (
            f"{text}; rank {svd_rank} ({bound}{kept:.0%}) is the smallest with {text_in_words(*times)}: "
            f"{describe_range(times)}"
        )
    return f"{text}; no rank that saves bytes is predicted to keep the text, so measure with `report` before you use it"
