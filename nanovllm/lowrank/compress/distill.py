"""From a model and its calibration to a folder of low-rank experts: layer by layer, resumable, atomic.

Each layer is fitted on what reaches it through the layers that are already compressed. A finished layer is written at
once to `<folder>.partial`; a run that was killed goes on after the last one, if model, calibration and options are the
same. The folder itself appears at the end, by a rename; the one before it is untouched until then.

In memory are one layer's experts and their factors; finished layers are on disk and come back for refinement alone,
which trains all of them at once. What it gives is written to a folder of its own inside: were it written over the
finished layers, a kill in the middle would leave new V beside old U, which the next run would take for its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress import layer as fitting
from nanovllm.lowrank.compress.calibrate import Calibration, check_enough, load_calibration
from nanovllm.lowrank.compress.evaluate import layer_errors
from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.layer import Fit
from nanovllm.lowrank.compress.options import DEFAULT_RANK, Options
from nanovllm.lowrank.compress.predict import (
    Ranks,
    describe_damage,
    equal_ranks,
    predict_losses,
    ranks_for_ratio,
    stored_ranks,
)
from nanovllm.lowrank.compress.refine import refine
from nanovllm.lowrank.compress.stream import Rows, Stream
from nanovllm.lowrank.compress.windows import Expert, WindowModel, open_windows
from nanovllm.lowrank.compress.writer import (
    STATE,
    Kind,
    check_room,
    output_folder,
    partial_of,
    remove_folder,
    replace_folder,
    save_file,
    writing_to,
)
from nanovllm.lowrank.folder import (
    DTYPES,
    FOLDER,
    FORMAT,
    METADATA,
    U_FILE,
    V_FOLDER,
    SvdMetadata,
    teacher_hash,
    write_metadata,
)

logger = logging.getLogger("nanovllm")
REFINED = "refined"
KIND = Kind(FORMAT, (METADATA, STATE), (U_FILE, V_FOLDER, REFINED, "U_layer_*", "layer_*.json"))
META = torch.device("meta")  # shapes without numbers


@dataclass
class DistillRun:
    """One run: what it reads, what it makes."""

    model: WindowModel
    calibration: Calibration | None
    options: Options
    ranks: Ranks
    folder: Path
    teacher: str
    done: dict[int, Factors] = field(default_factory=dict)  # on META: their numbers are on disk
    errors: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        own = self.model.config.dtype if self.model.config.dtype in DTYPES else "float32"
        return own if self.options.dtype == "auto" else self.options.dtype

    @property
    def partial(self) -> Path:
        return partial_of(self.folder)

    def state(self) -> dict[str, Any]:
        """All that a finished layer depends on. Refinement comes after the last one, and `ranks` has all of them."""
        others = {"refine_steps", "rank", "target_ratio"}
        options = {k: v for k, v in dataclasses.asdict(self.options).items() if k not in others}
        ranks = {str(layer): ranks for layer, ranks in self.ranks.items()}
        return {
            "format": FORMAT,
            "options": options,
            "ranks": ranks,
            "dtype": self.dtype,
            "teacher_hash": self.teacher,
            "calibration_hash": self.calibration and self.calibration.hash,
        }


def compress(
    model_path: Path,
    calib_path: Path | None,
    output_dir: Path | None,
    options: Options,
    device: str = "auto",
    announce: bool = True,
) -> SvdMetadata:
    """Make `output_dir` (default: svd_experts in the model's folder). `announce`: print first what to expect."""
    if output_dir is None and Path(model_path).is_file():
        raise ConfigError(f"--model-path {model_path}: is a file, and not a folder for {FOLDER}; give --output-dir")
    folder = output_folder("--output-dir", output_dir or Path(model_path) / FOLDER)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 has 10 bits: a Gram matrix of it has no small eigenvalues
    try:
        with open_windows(model_path, Device.choose(device), 512) as model, writing_to(folder, KIND):
            job = plan_job(model, calib_path, folder, options, announce)
            prepare(job)
            solve_layers(job)
            return finish(job, refine_layers(job) if options.refine_steps else job.partial)
    finally:
        torch.set_float32_matmul_precision(precision)


def plan_job(
    model: WindowModel, calib_path: Path | None, folder: Path, options: Options, announce: bool = True
) -> DistillRun:
    teacher = teacher_hash(model.checkpoint)
    calibration = None
    if options.method == "distilled":
        if calib_path is None:
            raise ConfigError("--calib-path: distillation needs one; make it with `nanovllm compress calibrate`")
        calibration = load_calibration(calib_path, teacher)
        check_enough(calibration.windows, model.config.hidden_size)
    elif options.refine_steps or options.target_ratio is not None or options.mode != "shared":
        raise ConfigError("PCA has no calibration: --refine-steps, --target-ratio and --mode private need distillation")
    if options.target_ratio is None:
        ranks = equal_ranks(model, options.rank or DEFAULT_RANK)  # a wrong rank is an error before hours of work
    if announce or options.target_ratio is not None:
        losses = predict_losses(model, calibration)
        if options.target_ratio is not None:
            ranks = ranks_for_ratio(model, losses, options)
    if announce:
        narrow = calibration is not None and calibration.warn(model.config.hidden_size)
        print(describe_damage(model, losses, ranks, options, narrow))
    return DistillRun(model, calibration, options, ranks, folder, teacher)


def prepare(job: DistillRun) -> None:
    """A partial folder of the same job is kept, any other is removed."""
    state, path = job.state(), job.partial / STATE
    try:
        same = json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(state))
    except (OSError, ValueError):
        same = False
    if not same:
        remove_folder(job.partial, KIND)
        job.partial.mkdir()
        path.write_text(json.dumps(state), encoding="utf-8")
    hidden, size, num = job.model.config.hidden_size, job.model.moe.intermediate_size, job.model.moe.num_experts
    values = sum(rank * (num * size + max(hidden, size)) for ranks in job.ranks.values() for rank in ranks.values())
    times = 2 if job.options.refine_steps else 1  # the closed form stays until the refined one is whole
    check_room(job.folder, times * values * getattr(torch, job.dtype).itemsize)


def solve_layers(job: DistillRun) -> None:
    stream = None
    if job.calibration is not None:
        stream = Stream(job.model, job.calibration.windows, job.options.chunk)
    bar = tqdm(range(job.model.num_layers), desc=f"{job.options.method} experts", unit="layer", disable=None)
    for layer in bar:
        factors = None
        rows = stream.enter(layer) if stream else None
        if job.model.is_sparse(layer):
            factors = read_layer(job, layer)
            if factors is None:
                write_layer(job, layer, solve_layer(job, layer, rows))
                factors = read_layer(job, layer)  # what a run that goes on computes with, to the last bit
                assert factors is not None
            else:
                logger.info("layer %d: kept from the run before", layer)
            job.done[layer] = factors.to(META)
        if stream:
            ours = factors.to(job.model.device.torch_device).to(torch.float32) if rows is not None else None
            stream.leave(layer, rows, ours)


def solve_layer(job: DistillRun, layer: int, rows: Rows | None) -> Factors:
    experts, options = job.model.experts(layer), job.options
    dtype = getattr(torch, job.dtype)
    if rows is None:
        [side] = options.sides
        return fitting.pca_layer(experts, sized(job, layer, side), side, dtype)
    how = Fit(options.mode, options.ridge, dtype, options.chunk, options.chunk_w2, options.pca_oversample)
    if options.mode == "private":
        factors = fitting.distil_layer(rows, experts, sized(job, layer, "input"), "input", how)
        job.errors[str(layer)] = fitting.held_out_errors(rows, experts, factors)
        return factors
    return best_side(job, layer, rows, experts, how)


def best_side(job: DistillRun, layer: int, rows: Rows, experts: list[Expert], how: Fit) -> Factors:
    """auto: both sides of w2 at equal bytes of V; the held-out rows decide."""
    front = fitting.fit_front(rows, experts, sized(job, layer, job.options.sides[0]), how)
    found = []
    for side in job.options.sides:
        factors = fitting.fit_w2(rows, experts, front, sized(job, layer, side)["w2"], side, how)
        found.append((fitting.held_out_errors(rows, experts, factors), factors))
    errors, factors = min(found, key=lambda pair: pair[0]["layer"] or 0.0)  # type: ignore[return-value]
    job.errors[str(layer)] = errors
    return factors


def sized(job: DistillRun, layer: int, side: str) -> dict[str, int]:
    return stored_ranks(job.model, job.ranks[layer], job.options.mode, side)


def refine_layers(job: DistillRun) -> Path:
    """Where the refined layers are. Their errors on held-out rows are measured anew: the closed form's say nothing of
    them any more."""
    assert job.calibration is not None
    layers = {}
    for layer in job.done:
        found = read_layer(job, layer)
        assert found is not None
        layers[layer] = found
    refine(job.model, layers, job.calibration.windows, job.options.refine_steps)
    folder = job.partial / REFINED
    shutil.rmtree(folder, ignore_errors=True)
    for layer, factors in layers.items():
        layers[layer] = factors.to(getattr(torch, job.dtype))
        layers[layer].write_experts(folder, layer)
        save_file(layers[layer].u_tensors(layer), str(u_layer_file(folder, layer)))
    job.errors |= layer_errors(job.model, job.calibration.windows, layers, job.options.chunk)
    return folder


# ---- files -----------------------------------------------------------------------------------------------------------


def u_layer_file(folder: Path, layer: int) -> Path:
    return folder / f"U_layer_{layer}.safetensors"


def done_file(folder: Path, layer: int) -> Path:
    return folder / f"layer_{layer}.json"


def write_layer(job: DistillRun, layer: int, factors: Factors) -> None:
    """The small JSON file comes last: a layer is finished when it is there."""
    done_file(job.partial, layer).unlink(missing_ok=True)  # of a layer that could not be read again
    factors.write_experts(job.partial, layer)
    save_file(factors.u_tensors(layer), str(u_layer_file(job.partial, layer)))
    facts = {"w2_mode": factors.w2_mode, "errors": job.errors.get(str(layer))}
    done_file(job.partial, layer).write_text(json.dumps(facts), encoding="utf-8")


def read_layer(job: DistillRun, layer: int) -> Factors | None:
    """None: not finished, or not whole any more."""
    empty = {w: torch.empty(job.model.moe.num_experts, 0, 0) for w in ("w1", "w2", "w3")}
    try:
        facts = json.loads(done_file(job.partial, layer).read_text(encoding="utf-8"))
        known = Factors(job.options.mode, facts["w2_mode"], {}, empty)
        found = Factors.read(job.partial, layer, known, load_file(str(u_layer_file(job.partial, layer))))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        logger.warning("layer %d of the run before cannot be read (%s); it is computed again", layer, error)
        return None
    if facts["errors"] is not None:
        job.errors[str(layer)] = facts["errors"]
    return found


def finish(job: DistillRun, whole: Path) -> SvdMetadata:
    """`whole`: the folder that has all layers, job.partial or one inside it."""
    u_tensors: dict[str, torch.Tensor] = {}
    for layer in job.done:
        u_tensors |= load_file(str(u_layer_file(whole, layer)))
    save_file(u_tensors, str(whole / U_FILE))
    model, moe = job.model, job.model.moe
    dense = 3 * model.config.hidden_size * moe.intermediate_size * moe.num_experts * len(model.layer_ids)
    metadata = SvdMetadata(
        method=job.options.method,
        mode=job.options.mode,
        dtype=job.dtype,
        layer_ids=model.layer_ids,
        num_experts=moe.num_experts,
        hidden_size=model.config.hidden_size,
        intermediate_size=moe.intermediate_size,
        ranks={layer: factors.ranks for layer, factors in job.done.items()},
        w2_modes={layer: factors.w2_mode for layer, factors in job.done.items()},
        ridge=job.options.ridge,
        teacher_hash=job.teacher,
        calibration_hash=job.calibration.hash if job.calibration else None,
        kept=sum(factors.num_values() for factors in job.done.values()) / dense,
        heldout_errors=job.errors,
        options=dataclasses.asdict(job.options),
    )
    write_metadata(whole, metadata)
    # What says that a layer is finished goes first: a kill here costs time, and leaves nothing that only looks whole.
    for path in (*sorted(whole.glob("layer_*.json")), *sorted(whole.glob("U_layer_*")), whole / STATE):
        path.unlink(missing_ok=True)
    replace_folder(whole, job.folder, KIND)
    remove_folder(job.partial, KIND)
    return metadata


class StoredFactors(Mapping[int, Factors]):
    """layer -> Factors in fp32, read when it is asked for and not kept."""

    def __init__(self, folder: Path, metadata: SvdMetadata) -> None:
        self.folder, self.metadata = folder, metadata

    def __getitem__(self, layer: int) -> Factors:
        if layer not in self.metadata.layer_ids:
            raise KeyError(layer)
        with safe_open(str(self.folder / U_FILE), "pt") as file:
            names = list(file.keys())
            u_tensors = {name: file.get_tensor(name) for name in names if name.startswith(f"layer_{layer}_")}
        return Factors.read(self.folder, layer, self.metadata, u_tensors).to(torch.float32)

    def __iter__(self) -> Iterator[int]:
        return iter(self.metadata.layer_ids)

    def __len__(self) -> int:
        return len(self.metadata.layer_ids)
