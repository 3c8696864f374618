"""From a model, and a calibration of it, to a folder of low-rank experts: layer by layer, resumable, atomic.

Each layer is fitted on the inputs that reach it through the layers that are already compressed. A finished layer is
written at once to `<folder>.partial`; a run that was killed continues after the last one, if model, calibration and
options are the same. The folder itself appears at the end, by a rename; the one before it is untouched until then.

In memory are one layer's experts and their factors; finished layers are on disk and come back for refinement alone,
which trains all of them at once. Its result is written to a folder of its own inside: written over the finished layers,
a kill in the middle would leave new V beside old U, which the next run would take for its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress import predict, writer
from nanovllm.lowrank.compress.calibrate import Calibration, check_enough, load_calibration
from nanovllm.lowrank.compress.evaluate import layer_errors
from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.layer import LayerFit, held_out_errors, pca_layer
from nanovllm.lowrank.compress.model import WindowModel, open_windows
from nanovllm.lowrank.compress.options import DEFAULT_SVD_RANK, Options
from nanovllm.lowrank.compress.refine import refine
from nanovllm.lowrank.compress.stream import Rows, Stream
from nanovllm.lowrank.compress.writer import STATE, save_file
from nanovllm.lowrank.folder import teacher_hash, write_metadata
from nanovllm.lowrank.format import DTYPES, FOLDER, FORMAT, METADATA, U_FILE, V_FOLDER, SvdMetadata

logger = logging.getLogger("nanovllm")
REFINED = "refined"
KIND = writer.Kind(
    FORMAT, (METADATA, STATE), (f"{Path(U_FILE).stem}.*", V_FOLDER, REFINED, "U_layer_*", "layer_*.json")
)
META = torch.device("meta")  # shapes without numbers


@dataclass
class DistillRun:
    """One run: what it reads, what it makes."""

    model: WindowModel
    calibration: Calibration | None
    options: Options
    svd_ranks: predict.SvdRanks
    folder: Path
    teacher: str
    done: dict[int, Factors] = field(default_factory=dict)  # on META: their numbers are on disk
    errors: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype_name(self) -> str:
        own = self.model.config.dtype if self.model.config.dtype in DTYPES else "float32"
        return own if self.options.dtype == "auto" else self.options.dtype

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def partial(self) -> Path:
        return writer.partial_of(self.folder)

    def state(self) -> dict[str, Any]:
        """All that a finished layer depends on. Refinement comes after the last one; `ranks` has what rank and
        target_ratio led to."""
        others = {"refine_steps", "rank", "target_ratio"}
        return {
            "format": FORMAT,
            "options": {k: v for k, v in dataclasses.asdict(self.options).items() if k not in others},
            "ranks": {str(layer): svd_ranks for layer, svd_ranks in self.svd_ranks.items()},
            "dtype": self.dtype_name,
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
    folder = writer.output_folder("--output-dir", output_dir or Path(model_path) / FOLDER)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 has 10 bits: a Gram matrix of it has no small eigenvalues
    try:
        with open_windows(model_path, Device.choose(device)) as model, writer.writing_to(folder, KIND):
            job = prepare_job(model, calib_path, folder, options, announce)
            times = 2 if options.refine_steps else 1  # the closed form stays until the refined one is whole
            values = predict.kept_share(model, job.svd_ranks, options) * model.num_expert_values
            writer.check_room(folder, int(times * values * job.dtype.itemsize))
            if not writer.is_same_job(job.partial, job.state()):
                writer.start_over(job.partial, KIND, job.state())
            solve_layers(job)
            return finish(job, refine_layers(job) if options.refine_steps else job.partial)
    finally:
        torch.set_float32_matmul_precision(precision)


def prepare_job(
    model: WindowModel, calib_path: Path | None, folder: Path, options: Options, announce: bool = True
) -> DistillRun:
    teacher = teacher_hash(model.checkpoint)
    if forms := {*model.checkpoint.packed_forms().values(), *model.checkpoint.quantised_types().values()}:
        text = "the file's weights are quantised (%s): shares are of numbers, and factors take 16 or 32 bits each"
        logger.warning(
            text + ", so they may need more memory than before; compress the 16-bit files", ", ".join(sorted(forms))
        )
    calibration = None
    if options.method == "distilled":
        if calib_path is None:
            raise ConfigError("--calib-path: distillation needs one; make it with `nanovllm compress calibrate`")
        calibration = load_calibration(calib_path, teacher)
        check_enough(calibration.windows, model.config.hidden_size)
    elif options.refine_steps or options.target_ratio is not None:
        raise ConfigError("PCA has no calibration: --refine-steps and --target-ratio need distillation")
    if options.target_ratio is None:  # a wrong rank is an error before hours of work
        svd_ranks = predict.equal_svd_ranks(model, options.rank or DEFAULT_SVD_RANK)
    if announce or options.target_ratio is not None:
        losses = predict.predict_losses(model, calibration)
        if options.target_ratio is not None:
            svd_ranks = predict.svd_ranks_for_ratio(model, losses, options)
    if announce:
        narrow = calibration is not None and calibration.warn(model.config.hidden_size)
        print(predict.describe_damage(model, losses, svd_ranks, options, narrow))
    return DistillRun(model, calibration, options, svd_ranks, folder, teacher)


def solve_layers(job: DistillRun) -> None:
    desc = f"{job.options.method} experts"
    if job.calibration is None:
        for layer in tqdm(job.model.layer_ids, desc=desc, unit="layer", disable=None, leave=False):
            finished_layer(job, layer, None)
        return
    stream = Stream(job.model, job.calibration.windows, job.options.chunk)
    for layer, rows in stream.sparse_layers(desc):
        factors = finished_layer(job, layer, rows)
        stream.add(rows, factors.to(job.model.device.torch_device, torch.float32))


def finished_layer(job: DistillRun, layer: int, rows: Rows | None) -> Factors:
    """As it is on disk, so that a run that was killed and one that was not compute with equal numbers."""
    factors = read_layer(job, layer)
    if factors is None:
        write_layer(job, layer, solve_layer(job, layer, rows))
        factors = read_layer(job, layer)
        assert factors is not None
    else:
        logger.info("layer %d: kept from the run before", layer)
    job.done[layer] = factors.to(META)
    return factors


def solve_layer(job: DistillRun, layer: int, rows: Rows | None) -> Factors:
    """Both sides of w2 at equal bytes of V, if the options leave it open; the held-out rows decide."""
    experts = job.model.experts(layer)
    sized = {side: predict.stored_svd_ranks(job.model, job.svd_ranks[layer], side) for side in job.options.sides}
    if rows is None:
        [(side, svd_ranks)] = sized.items()
        return pca_layer(experts, svd_ranks, side, job.dtype)
    fit = LayerFit(rows, experts, job.options, job.dtype)
    front = fit.front(job.svd_ranks[layer])
    found = []
    for side, svd_ranks in sized.items():
        factors = fit.with_w2(front, svd_ranks["w2"], side)
        found.append((held_out_errors(rows, experts, factors), factors))
    job.errors[str(layer)], factors = min(found, key=lambda pair: pair[0]["layer"] or 0.0)
    return factors


def refine_layers(job: DistillRun) -> Path:
    """The folder of the refined layers. Their errors on held-out rows are measured anew: those of the closed form are
    of other factors."""
    assert job.calibration is not None
    layers = {layer: found for layer in job.done if (found := read_layer(job, layer))}
    refine(job.model, layers, job.calibration.windows, job.options.refine_steps)
    folder = job.partial / REFINED
    shutil.rmtree(folder, ignore_errors=True)
    for layer, factors in layers.items():
        rounded = factors.to(dtype=job.dtype)
        rounded.write(folder, layer, u_layer_file(folder, layer))
        layers[layer] = rounded.to(dtype=torch.float32)
    job.errors |= layer_errors(job.model, job.calibration.windows, layers.__getitem__, job.options.chunk)
    return folder


# ---- files -----------------------------------------------------------------------------------------------------------


def u_layer_file(folder: Path, layer: int) -> Path:
    return folder / f"U_layer_{layer}.safetensors"


def done_file(folder: Path, layer: int) -> Path:
    return folder / f"layer_{layer}.json"


def write_layer(job: DistillRun, layer: int, factors: Factors) -> None:
    """The small JSON file comes last: a layer is finished when it is there."""
    done_file(job.partial, layer).unlink(missing_ok=True)  # of a layer that could not be read again
    factors.write(job.partial, layer, u_layer_file(job.partial, layer))
    facts = {"w2_mode": factors.w2_mode, "errors": job.errors.get(str(layer))}
    done_file(job.partial, layer).write_text(json.dumps(facts), encoding="utf-8")


def read_layer(job: DistillRun, layer: int) -> Factors | None:
    """None: not finished, or not whole any more."""
    try:
        facts = json.loads(done_file(job.partial, layer).read_text(encoding="utf-8"))
        u_path, num_experts = u_layer_file(job.partial, layer), job.model.moe.num_experts
        found = Factors.read(job.partial, layer, u_path, num_experts, facts["w2_mode"])
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
    save_file(u_tensors, whole / U_FILE)
    model, moe = job.model, job.model.moe
    metadata = SvdMetadata(
        method=job.options.method,
        dtype=job.dtype_name,
        layer_ids=model.layer_ids,
        num_experts=moe.num_experts,
        hidden_size=model.config.hidden_size,
        intermediate_size=moe.intermediate_size,
        svd_ranks={layer: factors.svd_ranks for layer, factors in job.done.items()},
        w2_modes={layer: factors.w2_mode for layer, factors in job.done.items()},
        ridge=job.options.ridge,
        teacher_hash=job.teacher,
        calibration_hash=job.calibration.hash if job.calibration else None,
        kept=sum(t.numel() for factors in job.done.values() for t in factors.tensors()) / model.num_expert_values,
        heldout_errors=job.errors,
        options=dataclasses.asdict(job.options),
    )
    write_metadata(whole, metadata)
    # The marks of finished layers go first: a kill here costs time, and leaves nothing that only looks whole.
    for path in (*sorted(whole.glob("layer_*.json")), *sorted(whole.glob("U_layer_*")), whole / STATE):
        path.unlink(missing_ok=True)
    writer.replace_folder(whole, job.folder, KIND)
    writer.remove_folder(job.partial, KIND)
    return metadata


def stored_factors(folder: Path, metadata: SvdMetadata, device: torch.device, layer: int) -> Factors:
    """A layer of a finished folder, in fp32 on the device."""
    facts = (folder / U_FILE, metadata.num_experts, metadata.w2_modes[layer])
    return Factors.read(folder, layer, *facts).to(device, torch.float32)
