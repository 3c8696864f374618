"""What a rank will cost, before anything is written: curves of predicted error, ranks for a ratio of bytes, and words.

The curves come from the calibration's Gram matrices and the weights alone (solve.py: the dropped eigenvalues). They say
how well one matrix of one layer can be met on the inputs of the uncompressed model; errors of layers add up, so the
text suffers more than a single curve says. A perplexity is read off the points measured on tests/fixtures/tiny-mixtral
(`MEASURED`). For another small model that was too low at every rank: 1.2 times for a measured 1.33, 2.4 for 4.0, 10 for
19. On the fixture itself it is too high near full rank: 1.2 for 1.1, 1.13 for 1.03. So a range is given that holds all
of these: twice the logarithm, and half of it, less where the error is small, since losses begin with its square.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.lowrank.compress.calibrate import Calibration
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.solve import (
    Curve,
    allocate_ranks,
    pca_basis,
    private_rank,
    shares_of,
    top_directions,
    weight_gram,
    whitened_basis,
)
from nanovllm.lowrank.compress.windows import WindowModel
from nanovllm.lowrank.folder import MATRICES

Ranks = dict[int, dict[str, int]]  # layer -> matrix -> rank on the hidden side, see `stored_ranks`
Losses = dict[tuple[int, str], list[float]]  # (layer, matrix) -> predicted relative error, squared, by rank
WORDS = (  # perplexity by the model's -> the text: of what is predicted and of what is measured
    (1.1, "nearly the same"),
    (1.5, "a little worse"),
    (5.0, "clearly worse"),
    (math.inf, "unreadable"),
)
FAIR = 1.5  # what a better rank is searched for: a little worse

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


def w2_rank(rank: int, w2_mode: str, hidden: int, size: int) -> int:
    """U2 on the input side [I, r'] has V [r', H]: at equal bytes of V its rank is I / H times that of the output
    side."""
    return rank if w2_mode == "output" else max(1, min(size, rank * size // hidden))


def stored_ranks(model: WindowModel, ranks: dict[str, int], mode: str, side: str) -> dict[str, int]:
    """The ranks of a layer as they are stored, from those on the hidden side."""
    hidden, size = model.config.hidden_size, model.moe.intermediate_size
    if mode == "private":
        return {w: private_rank(rank, hidden, size, model.moe.num_experts) for w, rank in ranks.items()}
    return {**ranks, "w2": w2_rank(ranks["w2"], side, hidden, size)}


def values_of_a_rank(model: WindowModel, w: str, mode: str, side: str) -> int:
    """Numbers in V and U of one stored rank more."""
    hidden, size, num_experts = model.config.hidden_size, model.moe.intermediate_size, model.moe.num_experts
    rows, columns = (size, hidden) if w == "w2" and side == "input" else (hidden, size)
    return num_experts * columns + rows * (num_experts if mode == "private" else 1)


def kept_share(model: WindowModel, ranks: Ranks, options: Options) -> float:
    """Bytes of V and U by those of the experts. Where w2's side is still open, that of the larger one."""

    def values(of_layer: dict[str, int], side: str) -> int:
        stored = stored_ranks(model, of_layer, options.mode, side)
        return sum(rank * values_of_a_rank(model, w, options.mode, side) for w, rank in stored.items())

    total = sum(max(values(of_layer, side) for side in options.sides) for of_layer in ranks.values())
    return total / dense_values(model)


def dense_values(model: WindowModel) -> int:
    moe = model.moe
    return 3 * model.config.hidden_size * moe.intermediate_size * moe.num_experts * len(model.layer_ids)


# ---- ranks and errors ------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict_losses(model: WindowModel, calibration: Calibration | None) -> Losses:
    """By rank on the hidden side. Without a calibration those of PCA on inputs without any preferred direction, which
    is too dark."""
    device, hidden = model.device.torch_device, model.config.hidden_size
    losses: dict[tuple[int, str], torch.Tensor] = {}
    for layer in tqdm(model.layer_ids, desc="predicting", unit="layer", disable=None, leave=False):
        experts = model.experts(layer)
        equal = [1 / len(experts)] * len(experts)
        if calibration is None:
            for w in MATRICES:
                sides = [getattr(e, w) if w == "w2" else getattr(e, w).T for e in experts]
                losses[layer, w] = pca_basis(weight_gram(sides, equal), 1).losses()
            continue
        seen = calibration.layer(layer)
        grams = [g.to(device).double() for g in seen["gram"]]
        pooled = grams[0].clone()
        for g in grams[1:]:
            pooled += g
        for w in ("w1", "w3"):
            c = weight_gram([getattr(e, w).T for e in experts], shares_of(grams))
            losses[layer, w] = whitened_basis(pooled, c, 1).losses()
        values, _ = top_directions(seen["out_gram"].to(device).double())
        losses[layer, "w2"] = 1 - torch.cat([values.new_zeros(1), values.cumsum(0)]) / values.sum().clamp(min=1e-300)
    assert all(len(of) == hidden + 1 for of in losses.values())
    return {key: of.clamp(min=0).tolist() for key, of in losses.items()}


def equal_ranks(model: WindowModel, rank: int) -> Ranks:
    hidden = model.config.hidden_size
    if not 1 <= rank <= hidden:
        raise ConfigError(
            f"--rank {rank}: must be in [1, {hidden}], the hidden size; {max(1, hidden // 2)} keeps a little over half "
            "of the bytes"
        )
    return {layer: dict.fromkeys(MATRICES, rank) for layer in model.layer_ids}


def ranks_for_ratio(model: WindowModel, losses: Losses, options: Options) -> Ranks:
    """Ranks by layer and matrix that keep at most `target_ratio` of the experts' bytes with the least predicted
    error."""
    ratio, hidden, size = options.target_ratio, model.config.hidden_size, model.moe.intermediate_size
    assert ratio is not None
    if not 0 < ratio <= 1:
        raise ConfigError(f"--target-ratio {ratio}: must be in (0, 1], the share of the experts' bytes to keep")

    def cost(w: str) -> int:
        if options.mode == "private":  # solve.private_rank: what a shared U on the hidden side costs
            return values_of_a_rank(model, w, "shared", "output")
        widths = {"output": 1.0, "input": size / hidden if w == "w2" else 1.0}  # stored ranks of one on the hidden side
        return math.ceil(max(widths[side] * values_of_a_rank(model, w, "shared", side) for side in options.sides))

    curves = {key: Curve(of, cost(key[1])) for key, of in losses.items()}
    step = max(1, hidden // 64)
    found = allocate_ranks(curves, int(ratio * dense_values(model)), step)  # bytes per value cancel
    ranks = {layer: {w: found[layer, w] for w in MATRICES} for layer in model.layer_ids}
    if (least := kept_share(model, ranks, options)) > ratio:
        raise ConfigError(f"--target-ratio {ratio}: the smallest ranks keep {least:.1%} already; give more than that")
    return ranks


def predict_error(model: WindowModel, losses: Losses, ranks: Ranks) -> float:
    """Of a layer's output, mean over the layers."""
    total = 0.0
    for layer in model.layer_ids:
        fine = math.prod(1 - min(1.0, losses[layer, w][ranks[layer][w]]) for w in MATRICES)
        total += (1 - fine) ** 0.5
    return total / len(model.layer_ids)


def describe_damage(model: WindowModel, losses: Losses, ranks: Ranks, options: Options, narrow: bool = False) -> str:
    """One or two sentences for a person, with the remedy where it is bad. `narrow`: the calibration's text is too
    uniform to say anything of other text."""
    used = sorted({rank for of_layer in ranks.values() for rank in of_layer.values()})
    bound = "at most " if len(options.sides) > 1 else ""
    kept = kept_share(model, ranks, options)
    text = f"rank {used[0]}" if len(used) == 1 else f"ranks {used[0]} to {used[-1]}"
    text += f": {bound}{kept:.0%} of the experts' bytes kept, U included"
    if kept >= 1:
        text += ", which saves nothing"
    if narrow:
        return f"{text}; what becomes of the text cannot be predicted from this calibration"
    error = predict_error(model, losses, ranks)
    times = perplexity_range(error)
    text += (
        f"; predicted error of a layer's output {error:.2f}: {text_in_words(*times)} (perplexity "
        f"{describe_range(times)} the model's, going by two small ones)"
    )
    if times[1] <= FAIR:
        return text
    for rank in range(1, model.config.hidden_size + 1):
        better = equal_ranks(model, rank)
        times = perplexity_range(predict_error(model, losses, better))
        if times[1] > FAIR:
            continue
        if (kept := kept_share(model, better, options)) >= 1:
            break
        return (
            f"{text}; rank {rank} ({bound}{kept:.0%}) is the smallest with {text_in_words(*times)}: "
            f"{describe_range(times)}"
        )
    return f"{text}; no rank that saves bytes is predicted to keep the text, so measure with `report` before you use it"
