"""Quality, measured: perplexity, KL to the teacher, and how often both agree, on text that no fit saw; and the error of
every expert and layer on the calibration's held-out windows.

The student is computed in plain torch from the stored factors (in fp32), independent of the engine's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.errors import ConfigError
from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.layer import held_out_errors
from nanovllm.lowrank.compress.refine import Teacher, final_states
from nanovllm.lowrank.compress.stream import RunExperts, Stream, held_out
from nanovllm.lowrank.compress.text import WINDOW, Windows, read_tokens
from nanovllm.lowrank.compress.windows import WindowModel

EVAL_TOKENS = 10_240
PIECE = 16  # tokens: so many in a row are a quotation, not chance


@dataclass(frozen=True)
class Quality:
    num_tokens: int
    teacher_perplexity: float
    perplexity: float
    kl: float  # nats a token, of the student's distribution from the teacher's
    top1: float  # how often both put the same token first
    router: float  # share of the teacher's chosen experts that the student's router chooses too


def evaluation_windows(tokenizer: Any, text: Path, max_tokens: int = EVAL_TOKENS, window: int = WINDOW) -> Windows:
    """The first `max_tokens` tokens, in whole windows."""
    tokens = read_tokens(tokenizer, text)[:max_tokens]
    whole = len(tokens) // window * window
    if not whole:
        raise ConfigError(f"--text {text}: {len(tokens)} tokens, fewer than one window of {window}; give a longer text")
    return Windows.pack([tokens[:whole]], window)


def share_seen(windows: Windows, calibration: Windows) -> float:
    """Of the pieces of PIECE tokens that `windows` is cut into, the part that stands somewhere in the calibration."""
    pieces = {tuple(ids[i : i + PIECE]) for ids in windows.ids.tolist() for i in range(0, len(ids) - PIECE + 1, PIECE)}
    found = set()
    for ids, length in zip(calibration.ids.tolist(), calibration.lens.tolist()):
        found |= pieces.intersection(zip(*(ids[i : length - PIECE + 1 + i] for i in range(PIECE))))
    return len(found) / len(pieces)


class Student(Teacher):
    """layer -> run: low-rank experts where there are any, the teacher's elsewhere; a layer at a time."""

    def __init__(self, model: WindowModel, layers: Mapping[int, Factors]) -> None:
        super().__init__(model)
        self.layers = layers

    def __missing__(self, layer: int) -> RunExperts:
        if layer not in self.layers:
            return super().__missing__(layer)
        return self.layers[layer].to(self.model.device.torch_device).to(torch.float32)


@torch.no_grad()
def layer_errors(
    model: WindowModel, windows: Windows, layers: Mapping[int, Factors], chunk: int
) -> dict[str, dict[str, object]]:
    """layer -> error of it and of each of its experts (layer.py:held_out_errors), on the held-out ones of `windows`:
    what reaches a layer comes through the low-rank layers before it, as it does when the closed form is fitted."""
    spare = windows[held_out(len(windows))]
    if not len(spare):
        return {}
    stream, student = Stream(model, spare, chunk), Student(model, layers)
    found = {}
    for layer in tqdm(range(model.num_layers), desc="held-out rows", unit="layer", disable=None, leave=False):
        rows = stream.enter(layer)
        if rows is None:
            stream.leave(layer, None)
            continue
        rows = replace(rows, held=torch.ones_like(rows.held))
        ours = student[layer]
        if isinstance(ours, Factors):
            found[str(layer)] = held_out_errors(rows, model.experts(layer), ours)
        stream.leave(layer, rows, ours)
    return found


@torch.no_grad()
def measure(model: WindowModel, windows: Windows, layers: Mapping[int, Factors], chunk: int = 4) -> Quality:
    """`layers` may name some layers only; the others are the teacher's."""
    device = model.device.torch_device
    student = Student(model, layers)
    runs = [final_states(model, windows, experts, chunk) for experts in (Teacher(model), student)]
    sums = dict.fromkeys(("kl", "top1", "router", "num_routed", "nll", "teacher_nll", "num_scored"), 0.0)
    for i in range(len(runs[0][0])):
        part = windows[i * chunk : (i + 1) * chunk]
        real = part.real().to(device)
        t, s = (model.logits(states[i].to(device)).log_softmax(-1).unflatten(0, real.shape) for states, _ in runs)
        sums["kl"] += float((t.exp() * (t - s)).sum(-1)[real].double().sum())
        sums["top1"] += int((t.argmax(-1) == s.argmax(-1))[real].sum())
        for wanted, found in zip(runs[0][1][i], runs[1][1][i]):
            same = (wanted[:, :, None] == found[:, None, :]).any(-1)[real.flatten().cpu()]
            sums["router"] += int(same.sum())
            sums["num_routed"] += same.numel()
        targets, scored = part.ids[:, 1:, None].to(device), real[:, 1:]
        sums["nll"] -= float(s[:, :-1].gather(2, targets)[..., 0][scored].double().sum())
        sums["teacher_nll"] -= float(t[:, :-1].gather(2, targets)[..., 0][scored].double().sum())
        sums["num_scored"] += int(scored.sum())
    count = windows.num_tokens
    return Quality(
        count,
        math.exp(sums["teacher_nll"] / sums["num_scored"]),
        math.exp(min(700, sums["nll"] / sums["num_scored"])),
        sums["kl"] / count,
        sums["top1"] / count,
        sums["router"] / max(1, sums["num_routed"]),
    )
