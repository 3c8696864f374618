"""Loading weights, with a proof: every part of every parameter is filled exactly once, and nothing is left over.

The proof needs names and shapes only, so a model that does not fit its config.json is refused before the first byte
is read. Then one tensor is read, copied into its place and dropped before the next: loading needs the model plus one
tensor. A parameter that no tensor filled would hold whatever was in memory: that is an error with its name, as is a
tensor that no parameter wants.

What is not a parameter of the model, such as experts that live in host memory, is given as `places`, by the name the
parameter would have: filled alike, proved alike.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from nanovllm.errors import ModelError
from nanovllm.hardware.parallel import Shard
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.rules import Rule, find_destination

logger = logging.getLogger("nanovllm")
COMPARED_ROWS = 4096  # at once
DUMMY_RANGE = 1e-3  # uniform in +-1e-3, as vLLM's dummy loader draws, so that figures compare


@dataclass(frozen=True)
class ShardPlace:
    """Filled with a part of a tensor: only that part is read."""

    target: torch.Tensor
    shard: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = list(self.target.shape)
        shape[self.shard.dim] = self.shard.total
        return tuple(shape)


@dataclass(frozen=True)
class OnDisk:
    """A tensor that stays in its file: that it is there in this shape is proved, then its owner is told its name.
    `copy`: a place that is filled with it all the same, and may hold something else later."""

    shape: tuple[int, ...]
    remember: Callable[[str], None]
    copy: torch.Tensor | ShardPlace | None = None


@dataclass(frozen=True)
class Elsewhere:
    """A tensor of another rank: that the checkpoint has it in this shape is proved, it is not read."""

    shape: tuple[int, ...]


Place = torch.Tensor | OnDisk | ShardPlace | Elsewhere
Places = Mapping[str, Mapping[str, Place]]  # parameter -> part -> where it goes; '' is the part of what is not stacked


def load_dummy(model: nn.Module, seed: int, places: Places | None = None) -> None:
    """Weights of the right shapes and no meaning, for speed tests of models that cannot be downloaded. A part's
    values depend on its name and the seed, not on where it lives: a model gives the same text however it is placed."""
    device = next(model.parameters()).device  # drawing 45 GB of experts on the host would take minutes
    generator = torch.Generator(device)
    for target, parts in _all_places(model, places).items():
        for part, place in parts.items():
            if isinstance(place, Elsewhere):
                continue
            if isinstance(place, OnDisk):
                raise ModelError(
                    f"load_format='dummy': {target}[{part}] is to stay on disk, but dummy weights have no "
                    "files; raise expert_host_gb"
                )
            digest = hashlib.blake2b(f"{seed}/{target}/{part}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            if isinstance(place, ShardPlace):  # drawn whole, so that the ranks have pieces of one model
                whole = torch.empty(place.shape, dtype=place.target.dtype, device=device)
                whole.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
                place.target.copy_(whole.narrow(place.shard.dim, place.shard.start, place.shard.length))
                continue
            drawn = place if place.device == device else torch.empty_like(place, device=device)
            drawn.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
            if drawn is not place:
                place.copy_(drawn)


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...], places: Places | None = None
) -> None:
    found, tied = _prove_complete(model, checkpoint, rules, _all_places(model, places))
    for name, place in tqdm(found.items(), desc="loading weights", unit="tensor", disable=None, leave=False):
        if isinstance(place, OnDisk):
            place.remember(name)
            place = place.copy
        if isinstance(place, ShardPlace):
            place.target.copy_(checkpoint.read_piece(name, place.shard.dim, place.shard.start, place.shard.length))
        elif isinstance(place, torch.Tensor):
            place.copy_(checkpoint.read(name))
    for name, parameter in tied.items():
        if _differs(model, checkpoint, name, parameter):
            logger.warning(
                "%s: %s differs from the embedding, but config.json ties the two: the embedding is used for both. To "
                "use the file's head, set tie_word_embeddings to false in config.json",
                checkpoint.path,
                name,
            )


def _differs(model: nn.Module, checkpoint: Checkpoint, name: str, parameter: str) -> bool:
    """Whether a tensor, or this rank's rows of it, differs from the parameter that it is tied to; in pieces, so that
    neither the host nor the device needs room for a second head."""
    shards: dict[str, Shard] = getattr(model.get_submodule(parameter.rpartition(".")[0]), "shards", {})
    place = as_place(model.get_parameter(parameter).data, shards.get(""))
    if tuple(checkpoint.shape(name)) != tuple(place.shape):
        return True
    target, start = (place.target, place.shard.start) if isinstance(place, ShardPlace) else (place, 0)
    return any(
        not torch.equal(checkpoint.read_piece(name, 0, start + at, len(rows)).to(rows), rows)
        for at, rows in zip(range(0, len(target), COMPARED_ROWS), target.split(COMPARED_ROWS))
    )


def check_weights(model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...]) -> None:
    """The proof alone: names and shapes. The model may be built without memory (on torch's meta device)."""
    _prove_complete(model, checkpoint, rules, _all_places(model, None))


def _all_places(model: nn.Module, places: Places | None) -> dict[str, Mapping[str, Place]]:
    """The model's own parameters, cut into the parts their layers say (`Linear.parts`), and the given places."""
    found: dict[str, dict[str, Place]] = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        rows: dict[str, int] = getattr(owner, "parts", {"": len(parameter)})
        shards: dict[str, Shard] = getattr(owner, "shards", {})
        pieces = dict(zip(rows, parameter.data.split(list(rows.values()))))
        absent: dict[str, tuple[int, ...]] = getattr(owner, "elsewhere", {})
        found[name] = {part: as_place(piece, shards.get(part)) for part, piece in pieces.items()}
        found[name].update((part, Elsewhere(shape)) for part, shape in absent.items())
    assert not found.keys() & (places or {}).keys()
    return {**found, **(places or {})}


def as_place(target: torch.Tensor, shard: Shard | None) -> torch.Tensor | ShardPlace:
    """A place for the shard of a tensor. A bias has no columns to split; padding (of a vocabulary) is zero."""
    if shard is None or shard.dim >= target.dim() or shard.length == shard.total == target.shape[shard.dim]:
        return target
    target.narrow(shard.dim, shard.length, target.shape[shard.dim] - shard.length).zero_()
    return ShardPlace(target.narrow(shard.dim, 0, shard.length), shard)


def _prove_complete(
    model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...], places: dict[str, Mapping[str, Place]]
) -> tuple[dict[str, Place], dict[str, str]]:
    """Tensor name -> the place it fills; and, of tensors that are not loaded, -> the tied parameter it would fill."""
    names = checkpoint.names()
    if not names:
        raise ModelError(f"{checkpoint.path}: no *.safetensors beside config.json (load_format='dummy' needs none)")
    # Another name of a parameter that is loaded elsewhere (a head tied to the embedding).
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - places.keys()
    found: dict[str, Place] = {}
    copies: dict[str, str] = {}
    filled: set[tuple[str, str]] = set()
    unused: list[str] = []
    for name in names:
        destination = find_destination(rules, name)
        if destination and destination.parameter in tied:
            copies[name] = destination.parameter
            continue
        if destination and destination.parameter is None:
            continue
        if destination is None or destination.part not in places.get(destination.parameter, {}):
            unused.append(name)
            continue
        target = (destination.parameter, destination.part)
        if target in filled:
            raise ModelError(f"{checkpoint.path}: {name!r} fills {_spell(*target)} twice")
        filled.add(target)
        found[name] = places[target[0]][target[1]]
        _check_shape(checkpoint, name, found[name])
    missing = [_spell(name, part) for name, parts in places.items() for part in parts if (name, part) not in filled]
    _refuse(checkpoint, missing, unused)
    return found, copies


def _spell(name: str, part: str) -> str:
    return f"{name}[{part}]" if part else name


def _check_shape(checkpoint: Checkpoint, name: str, place: Place) -> None:
    shape, wanted = tuple(checkpoint.shape(name)), tuple(place.shape)
    if shape != wanted:
        raise ModelError(f"{checkpoint.path}: {name!r} has shape {shape}, config.json implies {wanted}")


def _refuse(checkpoint: Checkpoint, missing: list[str], unused: list[str]) -> None:
    problems = []
    for what, names in (("not found in the checkpoint", missing), ("in the checkpoint but not in the model", unused)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            problems.append(f"{len(names)} {what}: {', '.join(names[:8])}{more}")
    if problems:
        raise ModelError(f"{checkpoint.path}: weights do not fit config.json. " + "; ".join(problems))
