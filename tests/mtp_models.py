"""Tiny DeepSeek-V3 models with a layer for multi-token prediction (MTP), and what that layer guesses by its formulas.

transformers does not load the layer, so its weights are written beside the others, and the reference runs a model of
transformers with that one layer over whole texts: no cache, no ring, no steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import SCALE, TinyModel, edit_config, load_hf

NEAR_TIE = 1e-3  # logits that differ by less may stand either way


def add_mtp_layer(source: Path, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """A copy of a tiny V3 that has the layer, drawn as widely as the others. Returns all weights."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    last, new = f"model.layers.{count - 1}.", f"model.layers.{count}."
    hidden = weights["model.norm.weight"].shape[0]
    shapes = {new + name.removeprefix(last): w.shape for name, w in weights.items() if name.startswith(last)}
    shapes |= {f"{new}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{new}eh_proj.weight"] = (hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape, generator=generator) * SCALE + ("norm" in name)
    weights[f"{new}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{new}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    edit_config(folder, num_nextn_predict_layers=1)
    return weights


def add_knowing_layer(source: Path, folder: Path) -> None:
    """Both write what follows the newest token alone, in the same way: each guess is right, at any temperature."""
    weights = add_mtp_layer(source, folder)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        if name.endswith(("enorm.weight", "model.norm.weight", "shared_head.norm.weight")):
            weight.fill_(1.0)
        if name.endswith("eh_proj.weight"):
            hidden = len(weight)
            weight.copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1))
    save_file(weights, folder / "model.safetensors")


class MtpReference:
    def __init__(self, model: TinyModel, folder: Path) -> None:
        """`model`: what `folder` was made of."""
        import transformers

        self._large = load_hf(model.path)
        config = transformers.AutoConfig.from_pretrained(model.path)
        at = f"model.layers.{config.num_hidden_layers}."
        weights = load_file(folder / "model.safetensors")
        config.num_hidden_layers, config.first_k_dense_replace = 1, 0
        config._attn_implementation = "eager"
        self._layer: Any = transformers.DeepseekV3Model(config).eval()
        if hasattr(self._layer, "set_experts_implementation"):
            self._layer.set_experts_implementation("eager")
        found: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            if name.startswith(at):
                found[name.removeprefix(at)] = weight
        self._own = {name: found.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
        self._load(found)
        self._eps = config.rms_norm_eps

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        """Of the decoder layer; transformers stacks experts."""
        layer = self._layer.layers[0]
        wanted = dict(layer.state_dict())
        count = len([name for name in weights if name.endswith("gate_proj.weight") and ".experts." in name])
        for name, tensor in wanted.items():
            if name.endswith("experts.gate_up_proj"):
                gates, ups = (
                    [weights[f"mlp.experts.{e}.{p}_proj.weight"] for e in range(count)] for p in ("gate", "up")
                )
                tensor.copy_(torch.stack([torch.cat(pair) for pair in zip(gates, ups)]))
            elif name.endswith("experts.down_proj"):
                tensor.copy_(torch.stack([weights[f"mlp.experts.{e}.down_proj.weight"] for e in range(count)]))
            else:
                tensor.copy_(weights[name])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._own[name]

    def _inputs(self, tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        embedded = self._large.model.embed_tokens.weight[tokens]
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(before, "hnorm")), dim=-1)
        return both @ self._own["eh_proj"].T

    @torch.no_grad()
    def check(self, text: list[int], guesses: list[int], allowed: list[int] | None = None) -> None:
        """That these are its greedy guesses at what follows the text, among the allowed tokens."""
        hidden = self._large.model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        rows = self._inputs(text, torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1])))
        for guess in guesses:
            own = self._through(rows)
            logits = self._large.lm_head(self._norm(own[-1], "shared_head.norm"))
            best = (logits if allowed is None else logits[allowed]).max()
            assert logits[guess] > best - NEAR_TIE, f"{guess} of {guesses} after {len(text)} tokens"
            assert allowed is None or guess in allowed
            rows = torch.cat((rows, self._inputs([guess], own[-1:])))

    def _through(self, rows: torch.Tensor) -> torch.Tensor:
        """The decoder layer over the rows: its sums, before any norm."""
        kept: list[torch.Tensor] = []

        def keep(module: Any, args: Any, out: Any) -> None:
            kept.append(out[0] if isinstance(out, tuple) else out)

        hook = self._layer.layers[0].register_forward_hook(keep)
        self._layer(inputs_embeds=rows[None], use_cache=False)
        hook.remove()
        return kept[0].reshape(len(rows), -1)
