"""`nanovllm compress report`: what each rank costs and loses, measured; a table, a picture, JSON.

For every rank the experts are compressed in memory (nothing is written beside the model), with PCA and with
distillation, and both are measured on text that no fit saw: KL to the teacher, perplexity, agreement, error of each
expert's output, and the predicted error beside the measured one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm.compress.calibrate import load_calibration
from nanovllm.compress.distill import compress, load_factors
from nanovllm.compress.evaluate import Quality, evaluation_windows, measure
from nanovllm.compress.options import Options
from nanovllm.compress.predict import equal_ranks, predict_curves, predict_damage
from nanovllm.compress.windows import open_windows
from nanovllm.hardware.device import Device
from nanovllm.weights.svd_folder import SvdMetadata, open_svd_folder, teacher_hash

COLUMNS = ["method", "rank", "kept (V)", "kept (V + U)", "MB", "predicted error", "held-out error", "KL", "perplexity",
           "top-1", "router", "s"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """One compression and its quality."""

    method: str
    rank: int
    metadata: SvdMetadata
    predicted_error: float
    quality: Quality
    seconds: float

    @property
    def layer_errors(self) -> list[float]:
        found = [of_layer.get("layer") for of_layer in self.metadata.heldout_errors.values()]
        return [error for error in found if error is not None]

    def num_bytes(self) -> int:
        facts = self.metadata
        dense = 3 * facts.hidden_size * facts.intermediate_size * facts.num_experts * len(facts.layer_ids)
        return round(facts.kept_with_u * dense * getattr(torch, facts.dtype).itemsize)

    def cells(self) -> list[Any]:
        errors, q = self.layer_errors, self.quality
        return [
            self.method, self.rank, f"{self.metadata.kept:.1%}", f"{self.metadata.kept_with_u:.1%}",
            f"{self.num_bytes() / 1e6:.2f}", f"{self.predicted_error:.3f}",
            f"{sum(errors) / len(errors):.3f}" if errors else "", f"{q.kl:.3f}", f"{q.perplexity:.1f}",
            f"{q.top1:.1%}", f"{q.router:.1%}", f"{self.seconds:.0f}",
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        return {
            "method": self.method, "rank": self.rank, "kept": self.metadata.kept,
            "kept_with_u": self.metadata.kept_with_u, "bytes": self.num_bytes(),
            "predicted_error": self.predicted_error, "heldout_errors": self.metadata.heldout_errors,
            "w2_modes": {str(k): v for k, v in self.metadata.w2_modes.items()},
            **dataclasses.asdict(self.quality), "seconds": self.seconds,
        }  # fmt: skip


def sweep(
    model_path: Path, calib_path: Path, text: Path, ranks: Sequence[int], settings: tuple[Options, str, Path]
) -> list[Point]:
    """PCA and distillation at every rank. settings: (options, device, a folder that factors go through, as stored)."""
    options, device, scratch = settings
    points = []
    with open_windows(model_path, Device.choose(device), 512) as model:
        for rank in ranks:
            equal_ranks(model, rank)  # a wrong one is told before the first is computed
        windows = evaluation_windows(model.checkpoint.load_tokenizer(), text)
        calibration = load_calibration(calib_path, teacher_hash(model.checkpoint))
        curves = {"pca": predict_curves(model, None), "distilled": predict_curves(model, calibration)}
        jobs = [(rank, method) for rank in ranks for method in ("pca", "distilled")]
        for rank, method in jobs:
            how = dataclasses.replace(options, method=method, rank=rank, target_ratio=None)
            if method == "pca":
                how = dataclasses.replace(how, refine_steps=0, mode="shared")
            started = time.perf_counter()
            metadata = compress(model_path, None if method == "pca" else calib_path, scratch / f"{method}-{rank}", how,
                                device)  # fmt: skip
            seconds = time.perf_counter() - started
            quality = measure(model, windows, load_factors(scratch / f"{method}-{rank}", metadata))
            error = predict_damage(model, curves[method], equal_ranks(model, rank)).error
            name = "refined" if how.refine_steps else method
            points.append(Point(name, rank, metadata, error, quality, seconds))
    return points


def measure_folder(model_path: Path, folder: Path, text: Path, device: str) -> tuple[SvdMetadata, Quality]:
    """An existing folder, as it is."""
    with open_windows(model_path, Device.choose(device), 512) as model:
        metadata = open_svd_folder(folder, teacher_hash(model.checkpoint))
        windows = evaluation_windows(model.checkpoint.load_tokenizer(), text)
        return metadata, measure(model, windows, load_factors(folder, metadata))


def lines(points: Sequence[Point]) -> dict[str, dict[str, dict[str, list[tuple[float, float]]]]]:
    """For bench.report.plot_lines."""
    charts: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for unit, of in (("KL to the teacher, nats a token", lambda p: p.quality.kl),
                     ("perplexity", lambda p: p.quality.perplexity)):  # fmt: skip
        series: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            series.setdefault(point.method, []).append((100 * point.metadata.kept, of(point)))
        charts[unit] = {"held-out text": series}
    return charts


def summary(points: Sequence[Point]) -> str:
    """In words, from what was measured."""
    if not points:
        return ""
    teacher = points[0].quality.teacher_perplexity
    parts = [f"the model itself has perplexity {teacher:.1f}"]
    for point in points:
        ratio = point.quality.perplexity / teacher
        word = "unreadable" if ratio > 5 else "clearly worse" if ratio > 1.5 else "close" if ratio > 1.1 else "the same"
        parts.append(f"{point.method} rank {point.rank} ({point.metadata.kept:.0%}) {ratio:.2f} times that ({word})")
    return "; ".join(parts)
