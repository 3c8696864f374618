"""Loading weights, with a proof: every part of every parameter is filled exactly once, and nothing is left over.

The proof needs names and shapes only, so a model that does not fit its config.json is refused before the first byte
is read. Then one tensor is read, copied to its target and dropped before the next: loading needs the memory of the
model plus one tensor. A parameter that no tensor filled would hold whatever was in memory: that is an error with its
name, as is a tensor that no parameter takes.

What is not a parameter of the model, such as experts that live in host memory, is given as `targets`, by the name that
the parameter would have: filled alike, proved alike.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from tqdm import tqdm

from nanovllm.errors import ModelError
from nanovllm.hardware.parallel import Shard
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.rules import Rule, find_destination

logger = logging.getLogger("nanovllm")
COMPARED_ROWS = 4096  # at once
DUMMY_RANGE = 1e-3  # uniform in +-1e-3, as vLLM's dummy loader draws, so that figures compare


@dataclass(frozen=True)
class ShardTarget:
    """Memory that is filled with a slice of a tensor: only that slice is read."""

    memory: torch.Tensor
    shard: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = list(self.memory.shape)
        shape[self.shard.dim] = self.shard.total
        return tuple(shape)


@dataclass(frozen=True)
class OnDisk:
    """A tensor that stays in its file: that it is there in this shape is proved, then `remember` gets its name.
    `copy`: memory that is filled with it all the same, and may hold something else later."""

    shape: tuple[int, ...]
    remember: Callable[[str], None]
    copy: torch.Tensor | ShardTarget | PackedTarget | None = None


@dataclass(frozen=True)
class Elsewhere:
    """A tensor of another rank: that the checkpoint has it in this shape is proved, it is not read."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class PackedTarget:
    """A matrix that is kept in another form (layers/packed.py). `take` gets the tensor's name and its numbers, or this
    rank's part of them: as blocks of the file if `as_stored` is set and the file has them so, else as floats."""

    shape: tuple[int, ...]  # of the whole tensor
    shard: Shard | None
    as_stored: bool
    take: Callable[[str, torch.Tensor | StoredBlocks], None]

    def fill(self, name: str, checkpoint: Checkpoint) -> None:
        stored = checkpoint.read_blocks(name) if self.as_stored else None
        stored = stored.cut(self.shard) if stored is not None and self.shard is not None else stored
        if stored is not None:
            self.take(name, stored)
        elif self.shard is None:
            self.take(name, checkpoint.read(name))
        else:
            self.take(name, checkpoint.read_slice(name, self.shard.dim, self.shard.start, self.shard.length))


LoadTarget = torch.Tensor | OnDisk | ShardTarget | PackedTarget | Elsewhere
LoadTargets = Mapping[str, Mapping[str, LoadTarget]]  # parameter -> part ('' where it is not stacked) -> target


def load_dummy(model: nn.Module, seed: int, targets: LoadTargets | None = None) -> None:
    """Weights of the right shapes and no meaning, for speed tests of models that cannot be downloaded. A part's values
    depend on its name and the seed, not on its target: a model gives the same text however its experts are placed."""
    device = next(model.parameters()).device  # drawing 45 GB of experts on the host would take minutes
    generator = torch.Generator(device)
    for name, parts in _all_targets(model, targets).items():
        for part, target in parts.items():
            if isinstance(target, Elsewhere):
                continue
            if isinstance(target, OnDisk):
                raise ModelError(
                    f"load_format='dummy': {name}[{part}] is to stay on disk, but dummy weights have no "
                    "files; raise expert_host_gb"
                )
            digest = hashlib.blake2b(f"{seed}/{name}/{part}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            if isinstance(target, (ShardTarget, PackedTarget)):  # drawn whole: the ranks have slices of one model
                dtype = torch.float32 if isinstance(target, PackedTarget) else target.memory.dtype
                shard, whole = target.shard, torch.empty(target.shape, dtype=dtype, device=device)
                whole.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
                own = whole if shard is None else whole.narrow(shard.dim, shard.start, shard.length)
                target.take(name, own) if isinstance(target, PackedTarget) else target.memory.copy_(own)
                continue
            drawn = target if target.device == device else torch.empty_like(target, device=device)
            drawn.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
            if drawn is not target:
                target.copy_(drawn)


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...], targets: LoadTargets | None = None
) -> None:
    found, tied = _prove_complete(model, checkpoint, rules, _all_targets(model, targets))
    for name, target in tqdm(found.items(), desc="loading weights", unit="tensor", disable=None, leave=False):
        memory = target
        if isinstance(target, OnDisk):
            target.remember(name)
            memory = target.copy
        if isinstance(memory, ShardTarget):
            memory.memory.copy_(checkpoint.read_slice(name, memory.shard.dim, memory.shard.start, memory.shard.length))
        elif isinstance(memory, PackedTarget):
            memory.fill(name, checkpoint)
        elif isinstance(memory, torch.Tensor):
            memory.copy_(checkpoint.read(name))
    for name, other in tied.items():
        if _differ(checkpoint, name, other, getattr(found[other], "shard", None)):
            logger.warning(
                "%s: %s differs from the embedding, but config.json ties the two: the embedding is used for both. To "
                "use the file's head, set tie_word_embeddings to false in config.json",
                checkpoint.path,
                name,
            )


def _differ(checkpoint: Checkpoint, name: str, other: str, shard: Shard | None) -> bool:
    """Whether two tensors, or this rank's rows of them, differ; some rows at a time, so that no room for both is
    needed."""
    shape = tuple(checkpoint.shape(name))
    if shape != tuple(checkpoint.shape(other)):
        return True
    first, stop = (0, shape[0]) if shard is None else (shard.start, shard.start + shard.length)
    for start in range(first, stop, COMPARED_ROWS):
        piece = (0, start, min(COMPARED_ROWS, stop - start))
        rows = checkpoint.read_slice(other, *piece)
        if not torch.equal(checkpoint.read_slice(name, *piece).to(rows), rows):
            return True
    return False


def check_weights(model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...]) -> None:
    """The proof alone: names and shapes. The model may be built without memory (on torch's meta device)."""
    _prove_complete(model, checkpoint, rules, _all_targets(model, None))


def _all_targets(model: nn.Module, targets: LoadTargets | None) -> dict[str, Mapping[str, LoadTarget]]:
    """The model's own parameters, cut into the parts of their layers (`Linear.parts`), and the given targets."""
    found: dict[str, dict[str, LoadTarget]] = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        num_rows: dict[str, int] = getattr(owner, "parts", {"": len(parameter)})
        shards: dict[str, Shard] = getattr(owner, "shards", {})
        absent: dict[str, tuple[int, ...]] = getattr(owner, "elsewhere", {})
        parts = zip(num_rows, parameter.data.split(list(num_rows.values())))
        found[name] = {part: as_target(memory, shards.get(part)) for part, memory in parts}
        found[name].update((part, Elsewhere(shape)) for part, shape in absent.items())
    assert not found.keys() & (targets or {}).keys()
    return {**found, **(targets or {})}


def as_target(memory: torch.Tensor, shard: Shard | None) -> torch.Tensor | ShardTarget:
    """For the shard of a tensor. A bias has no columns to split; padding (of a vocabulary) is zero."""
    if shard is None or shard.dim >= memory.dim() or shard.length == shard.total == memory.shape[shard.dim]:
        return memory
    memory.narrow(shard.dim, shard.length, memory.shape[shard.dim] - shard.length).zero_()
    return ShardTarget(memory.narrow(shard.dim, 0, shard.length), shard)


def matrix_targets(
    layer: nn.Module,
    parts: Mapping[str, int],
    columns: int,
    make: Callable[[str, tuple[int, ...], Shard | None], LoadTarget],
) -> dict[str, LoadTarget]:
    """Of a weight that is no parameter (layers/packed.py, layers/scaled.py), by part. `make` gets the part, the shape
    of the checkpoint's tensor and which piece of it is this rank's."""
    shards: dict[str, Shard] = getattr(layer, "shards", {})
    absent: dict[str, tuple[int, ...]] = getattr(layer, "elsewhere", {})
    found: dict[str, LoadTarget] = {part: Elsewhere(shape) for part, shape in absent.items()}
    for part, rows in parts.items():
        shard, shape = shards.get(part), [rows, columns]
        if shard is not None:
            shape[shard.dim] = shard.total
        found[part] = make(part, tuple(shape), shard)
    return found


def _prove_complete(
    model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...], targets: Mapping[str, Mapping[str, LoadTarget]]
) -> tuple[dict[str, LoadTarget], dict[str, str]]:
    """Tensor name -> the target it fills; and, of tensors that are not loaded, -> the one that fills what they are tied
    to."""
    names = checkpoint.names()
    if not names:
        raise ModelError(f"{checkpoint.path}: no *.safetensors beside config.json (load_format='dummy' needs none)")
    tied = _tied_names(model, targets.keys())
    found: dict[str, LoadTarget] = {}
    copies: dict[str, str] = {}
    filled: dict[tuple[str, str], str] = {}
    unused: list[str] = []
    for name in names:
        destination = find_destination(rules, name)
        parameter, part = (destination.parameter, destination.part) if destination else ("", "")
        if parameter is None:
            continue
        if parameter in tied:
            copies[name] = parameter
        elif part not in targets.get(parameter, {}):
            unused.append(name)
        elif (parameter, part) in filled:
            raise ModelError(f"{checkpoint.path}: {name!r} fills {_spell(parameter, part)} twice")
        else:
            filled[parameter, part] = name
            target = found[name] = targets[parameter][part]
            shape, wanted = tuple(checkpoint.shape(name)), tuple(target.shape)
            if shape != wanted:
                raise ModelError(f"{checkpoint.path}: {name!r} has shape {shape}, config.json implies {wanted}")
    missing = [_spell(name, part) for name, parts in targets.items() for part in parts if (name, part) not in filled]
    unused = _without_zero_biases(checkpoint, unused)
    problems = []
    for what, those in (("not found in the checkpoint", missing), ("in the checkpoint but not in the model", unused)):
        if those:
            more = f" and {len(those) - 8} more" if len(those) > 8 else ""
            problems.append(f"{len(those)} {what}: {', '.join(those[:8])}{more}")
    if problems:
        raise ModelError(f"{checkpoint.path}: weights do not fit config.json. " + "; ".join(problems))
    return found, {name: filled[tied[parameter], ""] for name, parameter in copies.items()}


def _without_zero_biases(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    """AutoGPTQ gives each layer that it quantises a bias, of zeros where the model has none: it changes nothing."""
    packed = checkpoint.packed_forms() if names else {}
    biases = (name for name in names if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in packed)
    zeros = {name for name in biases if not checkpoint.read(name).any()}
    return [name for name in names if name not in zeros]


def _tied_names(model: nn.Module, loaded: Collection[str]) -> dict[str, str]:
    """Another name of a weight that is loaded under its first one (a head tied to the embedding) -> the first. A weight
    is a parameter, or a module in the place of one (layers/packed.py)."""
    weights = chain(model.named_parameters(remove_duplicate=False), model.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(weight), name) for name, weight in weights}
    return {name: other for name, other in names.items() if name not in loaded and other in loaded}


def _spell(name: str, part: str) -> str:
    return f"{name}[{part}]" if part else name
