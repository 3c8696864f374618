"""The model over windows of text: a Transformer without engine and cache, one layer at a time, with gradients if
wanted.

Compression needs another run of a model than serving: every window is whole, nothing is cached or warmed up, the
experts of a layer are used one by one, and refinement needs gradients, which the engine's in-place operators do not
have. So this file builds the engine's own Transformer (same families, same weights, same loader with its proof) from
operators that autograd can differentiate, and leaves the experts on disk until a layer of them is read. In memory are
the model without experts, and one layer of them.

    h = model.embed(ids)                        # [windows, length] -> [windows * length, hidden]
    for layer in range(model.num_layers):
        x, h = model.attend(layer, h, length)   # the MLP's input, and the residual stream
        h = h + (experts of x, or model.dense_mlp(layer, x))
    logits = model.logits(h)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.latent import LatentBackend
from nanovllm.errors import ModelError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.lowrank.compress.text import WINDOW
from nanovllm.lowrank.format import MATRICES
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import DecoderLayer, Parts
from nanovllm.moe.layer import MoeLayer
from nanovllm.ops.mla import rotate_latent
from nanovllm.ops.opset import PLAIN
from nanovllm.ops.rotary import Angles, rotate
from nanovllm.runner.step import unstored_step
from nanovllm.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm.weights.loader import LoadTargets, OnDisk, load_weights

RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (x, ids, weights) -> y, all by row


class Held:
    """The keys or values of one call, in place of the engine's paged cache."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.tensor = torch.empty(0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def hold_keys(qkv: torch.Tensor, norms: Any, eps: float, angles: Angles, *rest: Any) -> torch.Tensor:
    """ops/qk_norm_rope.py, with keys and values kept as they are instead of stored in blocks."""
    _positions, keys, values, _slots, num_q_heads = rest
    spec = keys.spec
    parts = (num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = qkv.view(len(qkv), -1, spec.head_dim).split(parts, dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    keys.tensor, values.tensor = rotate(k, angles), v
    return rotate(q, angles)


def turn_latent(q_pe: torch.Tensor, kv: torch.Tensor, weight: torch.Tensor, eps: float, *rest: Any) -> Any:
    """ops/mla.py's latent_rope without a cache: LatentBackend attends to the latents of the call themselves."""
    angles, positions, _cache, _slots, interleaved = rest
    return rotate_latent(q_pe, kv, rms_norm(kv[:, : len(weight)], weight, eps), angles, positions, interleaved)


class WholeWindows:
    """Attention of windows of one length, each seeing itself only. Text shorter than the window is padded on the right,
    where no real token sees it."""

    name = "windows"
    graph_safe = False

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        return None

    def attend(
        self, q: torch.Tensor, keys: Held, values: Held, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        length = batch.on_host.query_lens[0]
        q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, keys.tensor, values.tensor))
        mask = None
        if spec.window is not None:
            positions = torch.arange(length, device=q.device)
            distance = positions[:, None] - positions
            mask = (distance >= 0) & (distance < spec.window)
        grouped = spec.num_heads != spec.num_kv_heads
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1)


WITH_GRADIENTS = replace(
    PLAIN,
    name="windows",
    linear=F.linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    qk_norm_rope=hold_keys,
    latent_rope=turn_latent,
)


@dataclass(frozen=True)
class Expert:
    """The three matrices as stored in the checkpoint: y = w2 (silu(w1 x) * (w3 x))."""

    w1: torch.Tensor  # [intermediate, hidden]
    w2: torch.Tensor  # [hidden, intermediate]
    w3: torch.Tensor  # [intermediate, hidden]

    def active(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ self.w1.T) * (x @ self.w3.T)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.active(x) @ self.w2.T


def run_dense(experts: list[Expert]) -> RunExperts:
    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for e, expert in enumerate(experts):
            rows, choice = (ids == e).nonzero(as_tuple=True)
            if len(rows):
                total = total.index_add(0, rows, expert(x[rows]) * weights[rows, choice, None])
        return total

    return run


class OnDiskExperts:
    """In a MoeLayer, in place of experts that stay in the checkpoint."""

    graph_safe = False

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("experts on disk are read, not called")


class WindowModel:
    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: Device, max_len: int) -> None:
        if config.moe is None:
            raise ModelError(f"{checkpoint.path}: {config.architecture} has no experts to compress; give a MoE model")
        self.checkpoint, self.config, self.device, self.moe = checkpoint, config, device, config.moe
        self.layer_ids = tuple(i for i, sparse in enumerate(config.moe.layers) if sparse)
        self._names: dict[tuple[int, int, str], str] = {}  # (layer, expert, matrix) -> tensor of the checkpoint
        build = Build(torch.float32, device.torch_device, WITH_GRADIENTS, Parallel())
        backend = WholeWindows() if config.mla is None else LatentBackend()
        parts = Parts(build, backend, max_len, lambda *_: OnDiskExperts())
        self.model = find_family(config)(config, parts).eval()
        load_weights(self.model, checkpoint, self.model.rules, self._targets())

    def _targets(self) -> LoadTargets:
        hidden, size = self.config.hidden_size, self.moe.intermediate_size
        targets: dict[str, dict[str, OnDisk]] = {}
        for layer, e in itertools.product(self.layer_ids, range(self.moe.num_experts)):
            for stacked, part, matrix, shape in (
                ("gate_up", f"{e}.gate", "w1", (size, hidden)),
                ("gate_up", f"{e}.up", "w3", (size, hidden)),
                ("down", f"{e}", "w2", (hidden, size)),
            ):
                remember = partial(self._names.__setitem__, (layer, e, matrix))
                parameter = f"layers.{layer}.mlp.experts.{stacked}.weight"
                targets.setdefault(parameter, {})[part] = OnDisk(shape, remember)
        return targets

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def is_sparse(self, layer: int) -> bool:
        return layer in self.layer_ids

    @property
    def num_expert_values(self) -> int:
        """Numbers in all experts."""
        moe = self.moe
        return 3 * self.config.hidden_size * moe.intermediate_size * moe.num_experts * len(self.layer_ids)

    def experts(self, layer: int) -> list[Expert]:
        """Read from the checkpoint now; nothing is kept."""

        def read(e: int, matrix: str) -> torch.Tensor:
            return self.checkpoint.read(self._names[layer, e, matrix]).to(self.device.torch_device).float()

        return [Expert(**{w: read(e, w) for w in MATRICES}) for e in range(self.moe.num_experts)]

    def dense_experts(self, layer: int) -> RunExperts:
        return run_dense(self.experts(layer))

    def _decoder(self, layer: int) -> DecoderLayer:
        found = self.model.layers[layer]
        assert isinstance(found, DecoderLayer)
        return found

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(ids.flatten().to(self.device.torch_device))

    def attend(self, layer: int, h: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """h: the residual stream [windows * length, hidden] -> (input of the layer's MLP or experts, the stream after
        attention and after the experts that every token takes)."""
        step = unstored_step([length] * (len(h) // length), length, 1, h.device)
        spec, decoder = self.model.specs[layer], self._decoder(layer)
        held = tuple(Held(spec) for _ in spec.cache_shapes)
        x, h = decoder.attend(h, None, self.model.rope(step), step, held)  # type: ignore[arg-type]
        return x, decoder.mlp.add_shared(h, x) if self.is_sparse(layer) else h

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(expert ids, weights), [rows, top_k] each."""
        sparse = self._decoder(layer).mlp
        assert isinstance(sparse, MoeLayer)
        return sparse.route(x)

    def dense_mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._decoder(layer).mlp(x)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self.model.logits(self.model.norm(h, None)[0])


@contextmanager
def open_windows(model_path: str | Path, device: Device, max_len: int = WINDOW) -> Iterator[WindowModel]:
    checkpoint = open_checkpoint(Path(model_path))
    try:
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        yield WindowModel(checkpoint, config, device, min(max_len, config.max_position_embeddings))
    finally:
        checkpoint.close()
