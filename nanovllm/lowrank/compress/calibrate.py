"""Calibration: what the experts of a model really see, in a folder that others can be fitted and checked with.

    calibration.json         which model (teacher_hash), which text, how many rows each expert saw, a hash of it all
    windows.safetensors      the token windows themselves: distillation runs them again, through compressed layers
    layer_{l}.safetensors    gram [experts, H, H] and out_gram [H, H] (fp64 sums, stored in fp32; rows weighted by the
                             router), a reservoir of held-out rows [experts, cap, H] with their router weights, and
                             the effective rank of what all experts see together

Every tenth window is held out: its rows are in the reservoirs and in no Gram matrix.

A run that was killed leaves `<folder>.partial`. The same command takes its text up again, which the model may have
written for hours, and its finished layers; the teacher must still be run through these, but nothing is added up twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from nanovllm.errors import ConfigError, ModelError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress.solve import gram
from nanovllm.lowrank.compress.stream import Rows, Stream, held_out, parts_of, run_dense
from nanovllm.lowrank.compress.text import Windows, Writing, cut_prompts, generate, join, made_up_prompts, read_tokens
from nanovllm.lowrank.compress.windows import Expert, WindowModel, open_windows
from nanovllm.lowrank.compress.writer import (
    STATE,
    Kind,
    output_folder,
    partial_of,
    remove_folder,
    replace_folder,
    save_file,
    writing_to,
)
from nanovllm.lowrank.folder import teacher_hash

logger = logging.getLogger("nanovllm")
FORMAT, VERSION = "nanovllm-moe-calibration", 1
FACTS, WINDOWS = "calibration.json", "windows.safetensors"
KIND = Kind(FORMAT, (FACTS, STATE), ("windows.*", "layer_*"))
ROWS_AT_A_TIME = 8192
STRENGTH = 0.99  # of the inputs' squares, in as many directions as the effective rank says
NARROW = 0.25  # of the hidden size. On tiny-mixtral prose has 0.93 to 0.98, code 0.9, one sentence over and over 0.16


@dataclass(frozen=True)
class Source:
    """Where the text comes from. A text alone is run as it is; prompts make the model write, from pieces of the text if
    there is one."""

    text: Path | None = None
    num_prompts: int | None = None  # None: 200 without a text, none with one
    writing: Writing = field(default_factory=Writing)
    window: int = 512

    def windows(self, model_path: Path, tokenizer: Any, device: str) -> Windows:
        num_prompts = (0 if self.text else 200) if self.num_prompts is None else self.num_prompts
        parts = []
        tokens = read_tokens(tokenizer, self.text) if self.text else []
        if self.text:
            parts.append(Windows.pack([tokens], self.window))
        if num_prompts:
            prompts = cut_prompts(tokens, num_prompts) if self.text else made_up_prompts(num_prompts)
            parts.append(Windows.pack(generate(model_path, prompts, self.writing, device), self.window))
        windows = join(parts) if parts else Windows.pack([], self.window)
        if not len(windows):
            raise ConfigError("calibration: no text; give --text FILE or --num-prompts")
        return windows

    def facts(self) -> dict[str, Any]:
        """All that the windows depend on, besides the model."""
        found = {**asdict(self), "text": None}
        if self.text:
            with suppress(OSError):  # told when it is read
                found["text"] = hashlib.blake2b(Path(self.text).read_bytes(), digest_size=16).hexdigest()
        return found


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
        """Log what this calibration cannot know. True: its text is so uniform that nothing can be predicted from it."""
        counts = [count for of_layer in self.facts["counts"].values() for count in of_layer]
        few = [count for count in counts if count < hidden]
        if few:
            logger.warning(
                "calibration: %d of %d experts saw fewer rows than the hidden size of %d, %d of them none at all; they "
                "are compressed by their weights more than by their inputs: calibrate on more text, of more kinds",
                len(few),
                len(counts),
                hidden,
                few.count(0),
            )
        least = min(self.facts.get("effective_ranks", {}).values(), default=hidden)
        if least < NARROW * hidden:
            logger.warning(
                "calibration: the inputs of a layer have an effective rank of %d of %d; the text is too uniform, and "
                "says nothing about other text: calibrate on running text of many kinds",
                least,
                hidden,
            )
        return least < NARROW * hidden


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: missing or not whole ({error}); collect the calibration again") from None


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
    tensors = _load(path / WINDOWS)
    windows = Windows(tensors["ids"].long(), tensors["lens"].long())
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
    out, where = output_folder("--out", out), Device.choose(device)
    with open_windows(model_path, where, source.window) as model, writing_to(out, KIND):
        fitting = replace(source, window=min(source.window, model.config.max_position_embeddings))
        teacher = teacher_hash(model.checkpoint)
        partial = partial_of(out)

        def make_windows() -> Windows:
            found = fitting.windows(model_path, model.checkpoint.load_tokenizer(), device)
            check_enough(found, model.config.hidden_size)
            return found

        state = {"format": FORMAT, "teacher_hash": teacher, "cap_per_group": cap, "source": fitting.facts()}
        windows = prepare(partial, state, make_windows)
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
        for layer in tqdm(range(model.num_layers), desc="calibrating", unit="layer", disable=None):
            rows = stream.enter(layer)
            if rows is None:
                stream.leave(layer, None)
                continue
            experts = model.experts(layer)
            path = partial / f"layer_{layer}.safetensors"
            if not path.exists():
                save_whole(layer_statistics(model, rows, experts, cap), path)
            facts["effective_ranks"][layer] = int(_load(path)["effective_rank"])
            facts["counts"][layer] = rows.counts(model.moe.num_experts)
            stream.leave(layer, rows, run_dense(experts))
        (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (partial / STATE).unlink()
        replace_folder(partial, out, KIND)
        hidden = model.config.hidden_size
    found = load_calibration(out, teacher)
    found.warn(hidden)
    return found


def save_whole(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """There is no file of this name until it is whole."""
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, str(unfinished))
    unfinished.rename(path)


def prepare(partial: Path, state: dict[str, Any], make_windows: Callable[[], Windows]) -> Windows:
    """The text of a run of the same job that was killed, beside its finished layers; or a new one in an empty
    folder."""
    try:
        same = json.loads((partial / STATE).read_text(encoding="utf-8")) == json.loads(json.dumps(state))
    except (OSError, ValueError):
        same = False
    if same and (partial / WINDOWS).exists():
        tensors = _load(partial / WINDOWS)
        return Windows(tensors["ids"].long(), tensors["lens"].long())
    remove_folder(partial, KIND)
    windows = make_windows()
    partial.mkdir()
    (partial / STATE).write_text(json.dumps(state), encoding="utf-8")
    save_whole({"ids": windows.ids.int(), "lens": windows.lens.int()}, partial / WINDOWS)
    return windows


def check_enough(windows: Windows, hidden: int) -> None:
    """Fewer rows than directions say nothing about most of them."""
    used = int(windows.lens[~held_out(len(windows))].sum())
    if used < hidden:
        raise ConfigError(
            f"calibration: {used} tokens are too few for a hidden size of {hidden}; give a longer --text or more "
            "--num-prompts (some 50 times that many tokens are good)"
        )


@torch.no_grad()
def layer_statistics(model: WindowModel, rows: Rows, experts: list[Expert], cap: int) -> dict[str, torch.Tensor]:
    device, hidden = model.device.torch_device, model.config.hidden_size
    grams, kept, kept_weights = [], [], []
    generator = torch.Generator().manual_seed(0)
    for e in range(len(experts)):
        total = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
        for x, weights in parts_of(rows, e, ROWS_AT_A_TIME, device):
            gram(x * weights[:, None], total)
        grams.append(total.float().cpu())
        found, weights = rows.of(e, held=True)
        chosen = torch.randperm(len(found), generator=generator)[:cap]
        sample, sample_weights = torch.zeros(cap, hidden), torch.zeros(cap)
        sample[: len(chosen)], sample_weights[: len(chosen)] = rows.x[found[chosen]], weights[chosen]
        kept.append(sample)
        kept_weights.append(sample_weights)
    out_gram = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
    fitted = ~rows.held
    run = run_dense(experts)
    for part in zip(*(t[fitted].split(ROWS_AT_A_TIME) for t in (rows.x, rows.ids, rows.weights))):
        gram(run(*(t.to(device) for t in part)), out_gram)
    pooled = torch.stack(grams).sum(0, dtype=torch.float64).to(device)
    return {
        "gram": torch.stack(grams),
        "out_gram": out_gram.float().cpu(),
        "rows": torch.stack(kept),
        "row_weights": torch.stack(kept_weights),
        "effective_rank": effective_rank(pooled),
    }


def effective_rank(pooled: torch.Tensor) -> torch.Tensor:
    """The fewest directions that hold STRENGTH of all squares of the inputs. Where it is low, the dropped eigenvalues
    are small for any rank, whatever other text would need."""
    values = torch.linalg.eigvalsh(pooled).flip(0).clamp(min=0)
    return (values.cumsum(0) < STRENGTH * values.sum()).sum().cpu() + 1
