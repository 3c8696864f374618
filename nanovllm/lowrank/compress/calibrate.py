"""Calibration: the real inputs of a model's experts, in a folder that compressed experts are fitted and checked with.

    calibration.json         which model (teacher_hash), which text, how many rows each expert saw, a hash of it all
    windows.safetensors      the token windows themselves: distillation runs them again, through compressed layers
    layer_{l}.safetensors    gram [experts, H, H] and out_gram [H, H] (fp64 sums, stored in fp32; rows weighted by the
                             router), a reservoir of held-out rows [experts, cap, H] with their router weights, and
                             the effective rank of the inputs of all experts together

Every tenth window is held out: its rows are in the reservoirs and in no Gram matrix.

A run that was killed leaves `<folder>.partial`. The same command continues with its text, which the model may have
written for hours, and its finished layers; the teacher must still be run through these, but nothing is added up twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanovllm.errors import ConfigError, ModelError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress import writer
from nanovllm.lowrank.compress.model import Expert, WindowModel, open_windows, run_dense
from nanovllm.lowrank.compress.solve import gram, gram_of_size, pooled
from nanovllm.lowrank.compress.stream import Rows, Stream
from nanovllm.lowrank.compress.text import Source, Windows, held_out
from nanovllm.lowrank.compress.writer import STATE, save_file
from nanovllm.lowrank.folder import teacher_hash

logger = logging.getLogger("nanovllm")
FORMAT, VERSION = "nanovllm-moe-calibration", 1
FACTS, WINDOWS = "calibration.json", "windows.safetensors"
KIND = writer.Kind(FORMAT, (FACTS, STATE), ("windows.*", "layer_*"))
ROWS_AT_A_TIME = 8192
STRENGTH = 0.99  # of the inputs' squares is in as many directions as the effective rank
NARROW = 0.25  # of the hidden size. On tiny-mixtral prose has 0.93 to 0.98, code 0.9, one sentence over and over 0.16


@dataclass(frozen=True)
class Calibration:
    path: Path
    facts: dict[str, Any]
    windows: Windows

    @property
    def hash(self) -> str:
        return self.facts["hash"]

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        return _load(self.path / f"layer_{layer}.safetensors")

    def warn(self, hidden: int) -> bool:
        """Log what cannot be concluded from this calibration. True: its text is so uniform that nothing can be
        predicted."""
        counts = [count for of_layer in self.facts["counts"].values() for count in of_layer]
        few = [count for count in counts if count < hidden]
        if few:
            logger.warning(
                "calibration: %d of %d experts saw fewer rows than the hidden size of %d, %d of them none at all; they "
                "are compressed by their weights more than by their inputs: calibrate on more text, of more kinds",
                *(len(few), len(counts), hidden, few.count(0)),
            )
        least = min(self.facts.get("effective_ranks", {}).values(), default=hidden)
        if least < NARROW * hidden:
            logger.warning(
                "calibration: the inputs of a layer have an effective rank of %d of %d; the text is too uniform, and "
                "says nothing about other text: calibrate on running text of many kinds",
                *(least, hidden),
            )
        return least < NARROW * hidden


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: missing or not whole ({error}); collect the calibration again") from None


def _load_windows(folder: Path) -> Windows:
    tensors = _load(folder / WINDOWS)
    return Windows(tensors["ids"].long(), tensors["lens"].long())


def load_calibration(path: Path, teacher: str | None) -> Calibration:
    """`teacher`: the hash of the model it must belong to."""
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: no calibration ({error}); make one with `nanovllm compress calibrate`") from None
    if not isinstance(facts, dict) or (facts.get("format"), facts.get("version")) != (FORMAT, VERSION):
        raise ModelError(f"{path}: not a calibration of format {FORMAT} version {VERSION}; collect it again")
    if teacher is not None and facts.get("teacher_hash") != teacher:
        raise ModelError(f"{path}: was collected from another model ({facts.get('model')}); collect it from this one")
    windows = _load_windows(path)
    if facts.get("hash") != _hash(windows, facts["teacher_hash"], facts["cap_per_group"]):
        raise ModelError(f"{path}: {WINDOWS} was changed after it was collected; collect it again")
    return Calibration(path, facts, windows)


def _hash(windows: Windows, teacher: str, cap: int) -> str:
    digest = hashlib.blake2b(f"{FORMAT} {VERSION} {teacher} {cap}".encode(), digest_size=16)
    for tensor in (windows.ids, windows.lens):
        digest.update(str(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def collect(
    model_path: Path, out: Path, source: Source, cap: int = 1024, device: str = "auto", chunk: int = 16
) -> Calibration:
    """Run the teacher over the text and write the folder; an earlier one is replaced at the end."""
    out = writer.output_folder("--out", out)
    with open_windows(model_path, Device.choose(device), source.window) as model, writer.writing_to(out, KIND):
        source = replace(source, window=min(source.window, model.config.max_position_embeddings))
        teacher, partial, hidden = teacher_hash(model.checkpoint), writer.partial_of(out), model.config.hidden_size
        state = {"format": FORMAT, "teacher_hash": teacher, "cap_per_group": cap, "source": source.facts()}
        if writer.is_same_job(partial, state) and (partial / WINDOWS).exists():
            windows = _load_windows(partial)
        else:
            windows = source.windows(model_path, model.checkpoint.load_tokenizer(), device)
            check_enough(windows, hidden)
            writer.start_over(partial, KIND, state)
            save_file({"ids": windows.ids.int(), "lens": windows.lens.int()}, partial / WINDOWS)
        facts: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": str(model_path),
            "teacher_hash": teacher,
            "hash": _hash(windows, teacher, cap),
            "num_windows": len(windows),
            "window": windows.ids.shape[1],
            "num_tokens": windows.num_tokens,
            "cap_per_group": cap,
            "layer_ids": list(model.layer_ids),
            "text": source.text and str(source.text),
            "counts": {},
            "effective_ranks": {},
        }
        stream = Stream(model, windows, chunk)
        for layer, rows in stream.sparse_layers("calibrating"):
            experts = model.experts(layer)
            path = partial / f"layer_{layer}.safetensors"
            if not path.exists():
                save_file(layer_statistics(model, rows, experts, cap), path)
            facts["effective_ranks"][layer] = int(_load(path)["effective_rank"])
            facts["counts"][layer] = rows.counts(model.moe.num_experts)
            stream.add(rows, run_dense(experts))
        (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (partial / STATE).unlink()
        writer.replace_folder(partial, out, KIND)
    found = load_calibration(out, teacher)
    found.warn(hidden)
    return found


def check_enough(windows: Windows, hidden: int) -> None:
    """Fewer rows than directions: most directions would have no data."""
    used = int(windows.lens[~held_out(len(windows))].sum())
    if used < hidden:
        raise ConfigError(
            f"calibration: {used} tokens are too few for a hidden size of {hidden}; give a longer --text or more "
            "--num-prompts (some 50 times that many tokens are good)"
        )


@torch.no_grad()
def layer_statistics(model: WindowModel, rows: Rows, experts: list[Expert], cap: int) -> dict[str, torch.Tensor]:
    device, hidden = model.device.torch_device, model.config.hidden_size
    grams, out_gram = [], gram_of_size(hidden, device)
    kept, kept_weights = torch.zeros(len(experts), cap, hidden), torch.zeros(len(experts), cap)
    generator, run = torch.Generator().manual_seed(0), run_dense(experts)
    for e in range(len(experts)):
        total = gram_of_size(hidden, device)
        for x, weights in rows.batches_of(e, ROWS_AT_A_TIME, device):
            gram(x * weights[:, None], total)
        grams.append(total.float().cpu())
        found, weights = rows.of(e, held=True)
        chosen = torch.randperm(len(found), generator=generator)[:cap]
        kept[e, : len(chosen)], kept_weights[e, : len(chosen)] = rows.x[found[chosen]], weights[chosen]
    for batch in rows.batches(ROWS_AT_A_TIME, device, held=False):
        gram(run(*batch), out_gram)
    return {
        "gram": torch.stack(grams),
        "out_gram": out_gram.float().cpu(),
        "rows": kept,
        "row_weights": kept_weights,
        "effective_rank": effective_rank(pooled(g.double() for g in grams).to(device)),
    }


def effective_rank(total: torch.Tensor) -> torch.Tensor:
    """The fewest directions that hold STRENGTH of all squares of the inputs. Where it is low, the dropped eigenvalues
    are small for any SVD rank, whatever other text would need."""
    values = torch.linalg.eigvalsh(total).flip(0).clamp(min=0)
    return (values.cumsum(0) < STRENGTH * values.sum()).sum().cpu() + 1
