"""`nanovllm compress report`: what each rank costs and loses, measured; a table, a picture, JSON.

For every rank the experts are compressed into a scratch folder (nothing is written beside the model), with PCA and with
distillation, and both are measured on text that no fit saw: KL to the teacher, perplexity, agreement. The error of each
expert's output is that on the calibration's held-out windows, with the predicted one beside it. Tokens a second come
from a short generation through the engine on this device (speed.py), of the model itself too.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.errors import NanoVLLMError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress.calibrate import load_calibration
from nanovllm.lowrank.compress.distill import StoredFactors, compress
from nanovllm.lowrank.compress.evaluate import Quality, evaluation_windows, layer_errors, measure, share_seen
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.predict import (
    equal_ranks,
    perplexity_range,
    predict_error,
    predict_losses,
    text_in_words,
)
from nanovllm.lowrank.compress.speed import PROMPT_TOKENS, MeasuredSpeed, measure_speed
from nanovllm.lowrank.compress.windows import open_windows
from nanovllm.lowrank.folder import SvdMetadata, teacher_hash

logger = logging.getLogger("nanovllm")
KL, PERPLEXITY = "KL to the teacher, nats a token", "perplexity"
LOGARITHMIC = (KL, PERPLEXITY)  # charts: PCA's would flatten the rest
LEAST_KL = 1e-3  # that is drawn: what rounding to bfloat16 alone gives
SEEN = 0.1  # share of the text that is also in the calibration, from which on the figures are flattered
COLUMNS = ["method", "rank", "kept", "MB", "predicted error", "held-out error", "KL", "perplexity",
           "top-1", "router", "tok/s here", "s"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """One compression and its quality."""

    method: str
    rank: int
    metadata: SvdMetadata
    predicted_error: float
    quality: Quality
    seconds: float
    speed: MeasuredSpeed | None = None

    @property
    def layer_errors(self) -> list[float]:
        found = [of_layer.get("layer") for of_layer in self.metadata.heldout_errors.values()]
        return [error for error in found if error is not None]

    def num_bytes(self) -> int:
        facts = self.metadata
        return round(facts.kept * dense_values(facts) * getattr(torch, facts.dtype).itemsize)

    def cells(self) -> list[Any]:
        errors, q = self.layer_errors, self.quality
        return [
            self.method,
            self.rank,
            f"{self.metadata.kept:.1%}",
            f"{self.num_bytes() / 1e6:.2f}",
            f"{self.predicted_error:.3f}",
            f"{sum(errors) / len(errors):.3f}" if errors else "",
            f"{q.kl:.3f}",
            f"{q.perplexity:.1f}",
            f"{q.top1:.1%}",
            f"{q.router:.1%}",
            rate(self.speed),
            f"{self.seconds:.0f}",
        ]

    def record(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "rank": self.rank,
            "kept": self.metadata.kept,
            "bytes": self.num_bytes(),
            "predicted_error": self.predicted_error,
            "predicted_perplexity_times": [t if t < math.inf else None for t in perplexity_range(self.predicted_error)],
            "heldout_errors": self.metadata.heldout_errors,
            "w2_modes": {str(k): v for k, v in self.metadata.w2_modes.items()},
            **dataclasses.asdict(self.quality),
            "seconds": self.seconds,
            "speed": self.speed and dataclasses.asdict(self.speed),
        }


def rate(speed: MeasuredSpeed | None) -> str:
    return "" if speed is None else f"{speed.tokens_per_second:,.1f}"


@dataclasses.dataclass(frozen=True)
class RankSweep:
    """What is swept."""

    text: Path  # that nothing was fitted to
    ranks: Sequence[int]
    options: Options
    device: str
    speed_tokens: int = 64  # generated while the clock runs; 0: no speed


@dataclasses.dataclass(frozen=True)
class Findings:
    points: list[Point]
    teacher_speed: MeasuredSpeed | None

    def rows(self) -> list[list[Any]]:
        """For a table with COLUMNS; the model itself comes first."""
        q, facts = self.points[0].quality, self.points[0].metadata
        size = f"{dense_values(facts) * getattr(torch, facts.dtype).itemsize / 1e6:.2f}"
        first = ["teacher", "", "100.0%", size, "0.000", "0.000", "0.000", f"{q.teacher_perplexity:.1f}",
                 "100.0%", "100.0%", rate(self.teacher_speed), ""]  # fmt: skip
        return [first, *(point.cells() for point in self.points)]

    def record(self) -> dict[str, Any]:
        """`speed` says where it was measured; it is of that device alone."""
        teacher = {
            "perplexity": self.points[0].quality.teacher_perplexity,
            "speed": self.teacher_speed and dataclasses.asdict(self.teacher_speed),
        }
        return {"teacher": teacher, "results": [point.record() for point in self.points]}


def dense_values(facts: SvdMetadata) -> int:
    """Of all experts as the model has them."""
    return 3 * facts.hidden_size * facts.intermediate_size * facts.num_experts * len(facts.layer_ids)


def sweep(model_path: Path, calib_path: Path, plan: RankSweep, scratch: Path) -> Findings:
    """PCA and distillation at every rank, then the speed of each. `scratch`: where factors go through, as stored."""
    points, prompt, limit = measure_points(model_path, calib_path, plan, scratch)
    Device.choose(plan.device).release_cached()  # an engine takes what is free: the model above is gone by now
    num_tokens = min(plan.speed_tokens, limit - len(prompt))
    folders = [None, *(scratch / f"{'pca' if p.method == 'pca' else 'distilled'}-{p.rank}" for p in points)]
    bar = tqdm(folders, desc="tokens a second", unit="engine", disable=None)
    speeds = [speed_or_none(model_path, folder, prompt, num_tokens, plan.device) for folder in bar]
    return Findings([dataclasses.replace(p, speed=s) for p, s in zip(points, speeds[1:])], speeds[0])


def measure_points(
    model_path: Path, calib_path: Path, plan: RankSweep, scratch: Path
) -> tuple[list[Point], list[int], int]:
    """(points without speeds, the beginning of the text, the longest sequence the model takes)."""
    points = []
    with open_windows(model_path, Device.choose(plan.device), 512) as model:
        for rank in plan.ranks:
            equal_ranks(model, rank)  # a wrong one is told before the first is computed
        windows = evaluation_windows(model.checkpoint.load_tokenizer(), plan.text)
        calibration = load_calibration(calib_path, teacher_hash(model.checkpoint))
        calibration.warn(model.config.hidden_size)
        if (seen := share_seen(windows, calibration.windows)) > SEEN:
            logger.warning(
                "--text %s: %.0f %% of it is in the calibration's text too, so the figures below are too "
                "good; measure on other text",
                plan.text,
                100 * seen,
            )
        losses = {"pca": predict_losses(model, None), "distilled": predict_losses(model, calibration)}
        sweep = list(itertools.product(plan.ranks, ("pca", "distilled")))
        for rank, method in tqdm(sweep, desc="report", unit="point", disable=None):
            how = dataclasses.replace(plan.options, method=method, rank=rank, target_ratio=None)
            if method == "pca":
                how = dataclasses.replace(how, refine_steps=0, mode="shared")
            folder = scratch / f"{method}-{rank}"
            started = time.perf_counter()
            calib = None if method == "pca" else calib_path
            metadata = compress(model_path, calib, folder, how, plan.device, announce=False)
            seconds = time.perf_counter() - started
            factors = StoredFactors(folder, metadata)
            if method == "pca":  # fitted to no rows, but there are some to measure it on
                errors = layer_errors(model, calibration.windows, factors, how.chunk)
                metadata = dataclasses.replace(metadata, heldout_errors=errors)
            error = predict_error(model, losses[method], equal_ranks(model, rank))
            name = "refined" if how.refine_steps else method
            points.append(Point(name, rank, metadata, error, measure(model, windows, factors), seconds))
        limit = model.config.max_position_embeddings
    return points, windows.ids[0, : min(PROMPT_TOKENS, limit // 2)].tolist(), limit


def speed_or_none(
    model_path: Path, folder: Path | None, prompt: list[int], num_tokens: int, device: str
) -> MeasuredSpeed | None:
    """What was measured so far is worth more than a speed: an engine that cannot run it is told, not raised."""
    if num_tokens < 1:
        return None
    try:
        return measure_speed(model_path, folder, prompt, num_tokens, device)
    except NanoVLLMError as error:
        print(f"tokens a second of {folder.name if folder else 'the model itself'}: not measured ({error})")
        return None


def lines(points: Sequence[Point]) -> dict[str, dict[str, dict[str, list[tuple[float, float]]]]]:
    """For bench.report.plot_lines."""
    charts: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for unit, of in (
        (KL, lambda p: max(LEAST_KL, p.quality.kl)),
        (PERPLEXITY, lambda p: p.quality.perplexity),
        ("tokens a second here", lambda p: p.speed and p.speed.tokens_per_second),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            if (value := of(point)) is not None:
                series.setdefault(point.method, []).append((100 * point.metadata.kept, value))
        if series:
            charts[unit] = {"one sequence" if unit.startswith("tokens") else "held-out text": series}
    return charts


def summary(points: Sequence[Point]) -> str:
    """In words, from what was measured."""
    if not points:
        return ""
    teacher = points[0].quality.teacher_perplexity
    parts = [f"the model itself has perplexity {teacher:.1f}"]
    for point in points:
        ratio = point.quality.perplexity / teacher
        parts.append(
            f"{point.method} rank {point.rank} ({point.metadata.kept:.0%}) {ratio:.2f} times that "
            f"({text_in_words(ratio)})"
        )
    return "; ".join(parts)
