"""`nanovllm compress report`: what each SVD rank costs and loses, measured; a table, a picture, JSON.

For every SVD rank the experts are compressed into a scratch folder (nothing is written beside the model), with PCA and
with distillation, and both are measured on text that no fit saw: KL to the teacher, perplexity, agreement. The error of
each expert's output is that on the calibration's held-out windows, with the predicted one beside it.

Tokens a second, of the model itself too, come from a short generation through the engine on this device: one sequence,
greedy, with the engine's default placement of experts, which is resident where all of them fit. The aims for offloaded
experts need a GPU (tests/gpu/check_low_rank.py). The engine looks for low-rank experts beside the model, so it gets a
folder of links to the model's files with these experts there, and nothing is written into the model's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.errors import ModelError, NanoVLLMError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress.calibrate import load_calibration
from nanovllm.lowrank.compress.distill import compress, stored_factors
from nanovllm.lowrank.compress.evaluate import Quality, layer_errors, measure
from nanovllm.lowrank.compress.model import open_windows
from nanovllm.lowrank.compress.options import Options, Swept
from nanovllm.lowrank.compress.predict import (
    equal_svd_ranks,
    perplexity_range,
    predict_error,
    predict_losses,
    text_in_words,
)
from nanovllm.lowrank.compress.text import WINDOW, evaluation_windows, low_rank_allowed, share_seen
from nanovllm.lowrank.folder import teacher_hash
from nanovllm.lowrank.format import FOLDER, SvdMetadata

logger = logging.getLogger("nanovllm")
KL, PERPLEXITY, SPEED = "KL to the teacher, nats a token", "perplexity", "tokens a second here"
LOGARITHMIC = (KL, PERPLEXITY)  # charts: PCA's would flatten the rest
LEAST_KL = 1e-3  # that is drawn: what rounding to bfloat16 alone gives
SEEN = 0.1  # of the text is also in the calibration: from here on the figures are too good
COLUMNS = ["method", "rank", "kept", "MB", "predicted error", "held-out error", "KL", "perplexity",
           "top-1", "router", "tok/s here", "s"]  # fmt: skip
SPEED_PROMPT, WARM_UP_TOKENS, SPEED_RUNS = 32, 8, 3


@dataclasses.dataclass(frozen=True)
class MeasuredSpeed:
    tokens_per_second: float  # the median of SPEED_RUNS generations
    num_tokens: int  # of each
    device: str
    dtype: str
    placement: str


@dataclasses.dataclass(frozen=True)
class Point:
    """One compression and its quality."""

    method: str
    svd_rank: int
    metadata: SvdMetadata
    predicted_error: float
    quality: Quality
    seconds: float
    speed: MeasuredSpeed | None = None

    def num_bytes(self, share: float) -> int:
        return round(share * self.metadata.num_dense_values * getattr(torch, self.metadata.dtype).itemsize)

    def cells(self) -> list[Any]:
        found = [of_layer.get("layer") for of_layer in self.metadata.heldout_errors.values()]
        errors, q = [error for error in found if error is not None], self.quality
        return [
            self.method,
            self.svd_rank,
            f"{self.metadata.kept:.1%}",
            f"{self.num_bytes(self.metadata.kept) / 1e6:.2f}",
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
            "rank": self.svd_rank,
            "kept": self.metadata.kept,
            "bytes": self.num_bytes(self.metadata.kept),
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
class Findings:
    points: list[Point]
    teacher_speed: MeasuredSpeed | None

    def rows(self) -> list[list[Any]]:
        """For a table with COLUMNS; the model itself comes first."""
        size, perplexity = self.points[0].num_bytes(1.0), self.points[0].quality.teacher_perplexity
        first = ["teacher", "", "100.0%", f"{size / 1e6:.2f}", "0.000", "0.000", "0.000", f"{perplexity:.1f}",
                 "100.0%", "100.0%", rate(self.teacher_speed), ""]  # fmt: skip
        return [first, *(point.cells() for point in self.points)]

    def record(self) -> dict[str, Any]:
        """`speed` names the device that it was measured on, and is of that device alone."""
        teacher = {
            "perplexity": self.points[0].quality.teacher_perplexity,
            "speed": self.teacher_speed and dataclasses.asdict(self.teacher_speed),
        }
        return {"teacher": teacher, "results": [point.record() for point in self.points]}

    def lines(self) -> dict[str, dict[str, dict[str, list[tuple[float, float]]]]]:
        """For bench.report.plot_lines."""
        units: dict[str, Callable[[Point], float | None]] = {
            KL: lambda p: max(LEAST_KL, p.quality.kl),
            PERPLEXITY: lambda p: p.quality.perplexity,
            SPEED: lambda p: p.speed.tokens_per_second if p.speed else None,
        }
        charts: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = {}
        for unit, of in units.items():
            series: dict[str, list[tuple[float, float]]] = {}
            for point in self.points:
                if (value := of(point)) is not None:
                    series.setdefault(point.method, []).append((100 * point.metadata.kept, value))
            if series:
                charts[unit] = {"one sequence" if unit == SPEED else "held-out text": series}
        return charts

    def summary(self) -> str:
        teacher = self.points[0].quality.teacher_perplexity
        parts = [f"the model itself has perplexity {teacher:.1f}"]
        for point in self.points:
            ratio, name = point.quality.perplexity / teacher, f"{point.method} rank {point.svd_rank}"
            parts.append(f"{name} ({point.metadata.kept:.0%}) {ratio:.2f} times that ({text_in_words(ratio)})")
        return "; ".join(parts)


def sweep(
    model_path: Path, calib_path: Path, text: Path, swept: Swept, options: Options, device: str, scratch: Path
) -> Findings:
    """PCA and distillation at every SVD rank, then the speed of each. `scratch`: for the stored factors."""
    points: list[Point] = []
    folders: list[Path | None] = [None]
    with open_windows(model_path, Device.choose(device)) as model:
        svd_ranks = swept.svd_ranks(model.config.hidden_size)
        equal = {svd_rank: equal_svd_ranks(model, svd_rank) for svd_rank in svd_ranks}  # refuses a wrong one at once
        window = min(WINDOW, model.config.max_position_embeddings)
        windows = evaluation_windows(model.checkpoint.load_tokenizer(), text, window=window)
        calibration = load_calibration(calib_path, teacher_hash(model.checkpoint))
        calibration.warn(model.config.hidden_size)
        if (seen := share_seen(windows, calibration.windows)) > SEEN:
            logger.warning(
                "--text %s: %.0f %% of it is in the calibration's text too, so the figures below are too good; measure "
                "on other text",
                *(text, 100 * seen),
            )
        losses = {"pca": predict_losses(model, None), "distilled": predict_losses(model, calibration)}
        both = list(itertools.product(svd_ranks, losses))
        for svd_rank, method in tqdm(both, desc="report", unit="point", disable=None):
            how = dataclasses.replace(options, method=method, rank=svd_rank, target_ratio=None)
            if method == "pca":
                how = dataclasses.replace(how, refine_steps=0)
            folder = scratch / f"{method}-{svd_rank}"
            folders.append(folder)
            started = time.perf_counter()
            calib = None if method == "pca" else calib_path
            metadata = compress(model_path, calib, folder, how, device, announce=False)
            seconds = time.perf_counter() - started
            factors = partial(stored_factors, folder, metadata, model.device.torch_device)
            if method == "pca":  # fitted to no rows, but there are some to measure it on
                errors = layer_errors(model, calibration.windows, factors, how.chunk)
                metadata = dataclasses.replace(metadata, heldout_errors=errors)
            error = predict_error(model, losses[method], equal[svd_rank])
            name = "refined" if how.refine_steps else method
            quality = measure(model, windows, factors)
            points.append(Point(name, svd_rank, metadata, error, quality, seconds))
        limit = model.config.max_position_embeddings
    del model
    Device.choose(device).release_cached()  # an engine takes the memory that is free
    prompt = windows.ids[0, : min(SPEED_PROMPT, limit // 2)].tolist()
    num_tokens = min(swept.speed_tokens, limit - len(prompt))
    bar = tqdm(folders, desc="tokens a second", unit="engine", disable=None)
    speeds = [measure_speed(model_path, folder, prompt, num_tokens, device) for folder in bar]
    return Findings([dataclasses.replace(p, speed=s) for p, s in zip(points, speeds[1:])], speeds[0])


# ---- tokens a second -------------------------------------------------------------------------------------------------


@contextmanager
def linked_model(model_path: Path, folder: Path | None) -> Iterator[Path]:
    """A folder of links to the model's files, with `folder` as its low-rank experts. None: the model itself."""
    if folder is None:
        with low_rank_allowed(False):
            yield model_path
        return
    if not model_path.is_dir():
        raise ModelError(f"{model_path}: a single file has no folder where the engine would find low-rank experts")
    with low_rank_allowed(True), tempfile.TemporaryDirectory(prefix="nanovllm-speed-") as links:
        for path in model_path.iterdir():
            if not path.name.startswith(FOLDER):
                os.symlink(path.resolve(), Path(links) / path.name)
        os.symlink(folder.resolve(), Path(links) / FOLDER)
        yield Path(links)


def measure_speed(
    model_path: Path, folder: Path | None, prompt: list[int], num_tokens: int, device: str
) -> MeasuredSpeed | None:
    """`folder`: low-rank experts; None: the model's own. An engine that cannot run costs its speed alone, not the other
    figures: the reason is printed."""
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

    if num_tokens < 1:
        return None
    length = len(prompt) + max(num_tokens, WARM_UP_TOKENS)
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": length, "enable_prefix_caching": False}
    try:
        with linked_model(model_path, folder) as path, LLM(str(path), device=device, **options) as llm:
            rates = []
            for count in (WARM_UP_TOKENS, *[num_tokens] * SPEED_RUNS):
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                started = time.perf_counter()
                llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
                rates.append(count / (time.perf_counter() - started))
            facts = llm.engine.describe()["runs_on"]
    except NanoVLLMError as error:
        print(f"tokens a second of {folder.name if folder else 'the model itself'}: not measured ({error})")
        return None
    placement = facts.get("experts", {}).get("placement", "resident")
    return MeasuredSpeed(statistics.median(rates[1:]), num_tokens, facts["device"], facts["dtype"], placement)
