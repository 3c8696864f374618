"""Quality, measured: perplexity, KL to the teacher, and how often both agree, on text that no fit saw; and the error of
every expert and layer on the calibration's held-out windows.

The student is computed in plain torch from the stored factors (in fp32), independent of the engine's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.layer import held_out_errors
from nanovllm.lowrank.compress.model import WindowModel
from nanovllm.lowrank.compress.stream import ExpertsOf, Stream, final_states
from nanovllm.lowrank.compress.text import Windows, held_out


@dataclass(frozen=True)
class Quality:
    num_tokens: int
    teacher_perplexity: float
    perplexity: float
    kl: float  # nats a token, of the student's distribution from the teacher's
    top1: float  # how often both put the same token first
    router: float  # share of the teacher's chosen experts that the student's router chooses too


@torch.no_grad()
def layer_errors(
    model: WindowModel, windows: Windows, factors: Callable[[int], Factors], chunk: int
) -> dict[str, dict[str, Any]]:
    """layer -> error of it and of each of its experts (layer.py:held_out_errors), on the held-out ones of `windows`.
    The inputs of a layer come through the low-rank layers before it, as they do when the closed form is fitted."""
    spare, found = windows[held_out(len(windows))], {}
    if len(spare):
        stream = Stream(model, spare, chunk)
        for layer, rows in stream.sparse_layers("held-out rows"):
            rows = replace(rows, held=torch.ones_like(rows.held))
            ours = factors(layer)
            found[str(layer)] = held_out_errors(rows, model.experts(layer), ours)
            stream.add(rows, ours)
    return found


@torch.no_grad()
def measure(model: WindowModel, windows: Windows, student: ExpertsOf, chunk: int = 4) -> Quality:
    device = model.device.torch_device
    states, routes = zip(*(final_states(model, windows, experts, chunk) for experts in (model.dense_experts, student)))
    same = torch.cat([(wanted[:, :, None] == found[:, None]).any(-1) for wanted, found in zip(*routes)])
    kl = top1 = nll = teacher_nll = num_scored = 0.0
    for i in range(0, len(windows), chunk):
        part = windows[i : i + chunk]
        real = part.real().to(device)
        t, s = (
            model.logits(of[i : i + chunk].to(device).flatten(0, 1)).log_softmax(-1).unflatten(0, real.shape)
            for of in states
        )
        kl += float((t.exp() * (t - s)).sum(-1)[real].double().sum())
        top1 += int((t.argmax(-1) == s.argmax(-1))[real].sum())
        targets, scored = part.ids[:, 1:, None].to(device), real[:, 1:]
        nll -= float(s[:, :-1].gather(2, targets)[..., 0][scored].double().sum())
        teacher_nll -= float(t[:, :-1].gather(2, targets)[..., 0][scored].double().sum())
        num_scored += int(scored.sum())
    count = windows.num_tokens
    perplexities = (math.exp(teacher_nll / num_scored), math.exp(min(700, nll / num_scored)))
    return Quality(count, *perplexities, kl / count, top1 / count, float(same.double().mean()))
