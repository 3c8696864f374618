"""What a format changes in what a model says: perplexity, KL divergence from the unquantised model, and how often both
put the same token first, on windows of a text.

The model is the engine's own Transformer in float32 with plain operators, without engine and cache
(lowrank/compress/model.py says why). A format rounds the matrices that the engine would quantise: projections of
attention and MLP, and experts. Embedding, head, norms and routers stay. As the head stays, final hidden states are
enough to keep of the unquantised model: its logits are computed from them again.

Of quantised files (GGUF, FP8, AWQ, ...) the expanded weights are the unquantised model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from nanovllm.attention.latent import LatentBackend
from nanovllm.bench.quality_formats import FORMATS, NONE, TriedFormat
from nanovllm.bench.report import Columns, print_rows
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.lowrank.compress.model import WITH_GRADIENTS, Held, WholeWindows, hold_keys
from nanovllm.lowrank.compress.text import Windows, evaluation_windows
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.ops.moe import expert_pairs
from nanovllm.runner.step import unstored_step
from nanovllm.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm.weights.loader import load_weights
from nanovllm.weights.resolve import resolve_model

CHUNK_TOKENS = 1024  # computed at once; their logits take 200 MB with 50,000 words


@dataclass(frozen=True)
class RoundedMatrix:
    parts: dict[str, int]  # rows of each matrix of the checkpoint
    used: nn.Parameter  # what products read
    given: list[torch.Tensor] = field(default_factory=list)  # the parts as loaded, on the host


@dataclass(frozen=True)
class RecordingBuild(Build):
    """Notes the matrices that the engine would keep quantised: of those, `matrix` is asked with `packs` and without
    `fine`. They are ordinary parameters here."""

    matrices: list[RoundedMatrix] = field(default_factory=list)

    def matrix(self, parts: dict[str, int], columns: int, fine: bool = False) -> Any:
        found = self.parameter(sum(parts.values()), columns)
        if self.packs and not fine:
            self.matrices.append(RoundedMatrix(parts, found))
        return found


class RoundedModel:
    """A model whose matrices are rounded anew for each format. It has them twice: as loaded, and as rounded."""

    def __init__(self, checkpoint: Checkpoint, device: Device, window: int) -> None:
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        if window > config.max_position_embeddings:
            raise ConfigError(f"--window {window}: {checkpoint.path} has {config.max_position_embeddings} positions")
        self._form, self._is_latent = TriedFormat(), config.mla is not None
        product, where = self._product, device.torch_device
        ops = replace(WITH_GRADIENTS, linear=product, qk_norm_rope=self._hold_keys)
        ops = replace(ops, expert_pairs=partial(expert_pairs, product=product))
        build = RecordingBuild(torch.float32, where, ops, Parallel(), packs=True)
        parts = Parts(build, LatentBackend() if self._is_latent else WholeWindows(), window)
        self._model, self._device = find_family(config)(config, parts).eval(), where
        load_weights(self._model, checkpoint, self._model.rules)
        self._matrices = build.matrices
        self._rounded = {m.used.untyped_storage().data_ptr() for m in self._matrices}
        for matrix in self._matrices:
            matrix.given.extend(part.cpu().clone() for part in matrix.used.split(list(matrix.parts.values())))

    @property
    def num_weights(self) -> int:
        return sum(matrix.used.numel() for matrix in self._matrices)

    def rejects(self, form: TriedFormat) -> bool:
        """Latent attention (DeepSeek) caches no keys and values."""
        return form.cache is not None and self._is_latent

    def use(self, form: TriedFormat) -> int | None:
        """Rounds all matrices. Returns the bits that they take, None where they stay as they are."""
        self._form, bits = form, 0
        for matrix in self._matrices:
            for used, given in zip(matrix.used.split(list(matrix.parts.values())), matrix.given):
                rounded, size = form.weight(given) if form.weight else (given, 0)
                used.copy_(rounded)
                bits += size
        return bits or None

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [windows, length] -> final hidden states [windows * length, hidden]."""
        step = unstored_step([ids.shape[1]] * len(ids), ids.shape[1], 1, self._device)
        step = replace(step, token_ids=ids.flatten().to(self._device))
        caches: Any = [tuple(Held(spec) for _ in spec.cache_shapes) for spec in self._model.specs]
        return self._model(step, caches)

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        return self._model.logits(states).log_softmax(-1)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Experts are views of a stack, so the memory says whether a weight is one of the matrices: routers and the
        head are not."""
        if self._form.inputs is not None and weight.untyped_storage().data_ptr() in self._rounded:
            x = self._form.inputs(x)
        return F.linear(x, weight, bias)

    def _hold_keys(self, *inputs: Any) -> torch.Tensor:
        queries, (keys, values) = hold_keys(*inputs), inputs[5:7]
        if self._form.cache is not None:
            keys.tensor, values.tensor = self._form.cache(keys.tensor, values.tensor)
        return queries


@contextmanager
def opened(model: str | None, text: Path, window: int, max_tokens: int, device: Device) -> Iterator[Any]:
    """(RoundedModel, Windows)"""
    checkpoint = open_checkpoint(resolve_model(model))
    try:
        windows = evaluation_windows(checkpoint.load_tokenizer(), text, max_tokens, window)
        yield RoundedModel(checkpoint, device, window), windows
    finally:
        checkpoint.close()


@torch.no_grad()
def measure(model: RoundedModel, windows: Windows, formats: dict[str, TriedFormat]) -> list[dict[str, Any]]:
    """One row a format; ratios are to the first of them, which is the unquantised model (`find_formats`)."""
    if rejected := [name for name, form in formats.items() if model.rejects(form)]:
        raise ConfigError(f"--formats {rejected[0]!r}: this model caches no keys and values; leave it out")
    chunks = windows.ids.split(max(1, CHUNK_TOKENS // windows.ids.shape[1]))
    model.use(FORMATS[NONE])
    teacher = [model.states(ids) for ids in chunks]
    rows: list[dict[str, Any]] = []
    for name, form in tqdm(formats.items(), desc="formats", unit="format", disable=None, leave=False):
        bits = model.use(form)
        parts = [compare(model, ids, states) for ids, states in zip(chunks, teacher)]
        nll, kl, same = (torch.cat(found) for found in zip(*parts))
        perplexity = math.exp(min(700.0, float(nll.mean())))
        rows.append(
            {
                "format": name,
                "bits_per_weight": bits and bits / model.num_weights,
                "perplexity": perplexity,
                "perplexity_ratio": perplexity / rows[0]["perplexity"] if rows else 1.0,
                "mean_kl": max(0.0, float(kl.mean())),
                "max_kl": max(0.0, float(kl.max())),
                "top1": float(same.mean()),
            }
        )
    return rows


def compare(model: RoundedModel, ids: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each token: its negative log-likelihood (but for the first of a window), KL(teacher | model) in nats, and
    whether the likeliest next token is the same."""
    t, s = model.log_probs(teacher), model.log_probs(model.states(ids))
    kl = (t.exp() * (t - s)).sum(-1, dtype=torch.float64)
    same = (t.argmax(-1) == s.argmax(-1)).double()
    told, targets = s.unflatten(0, ids.shape)[:, :-1], ids[:, 1:, None].to(s.device)
    return -told.gather(2, targets).flatten().double(), kl, same


def print_quality(rows: list[dict[str, Any]], title: str) -> None:
    columns: Columns = [
        ("format", "format"),
        ("bits a weight", "bits_per_weight", "{:.2f}"),
        ("perplexity", "perplexity", "{:.3f}"),
        ("ratio", "perplexity_ratio", "{:.4f}"),
        ("mean KL", "mean_kl", "{:.6f}"),
        ("largest KL", "max_kl", "{:.4f}"),
        ("same token first", "top1", "{:.1%}"),
    ]
    print_rows(title, rows, columns)
