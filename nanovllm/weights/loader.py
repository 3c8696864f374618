"""Loading weights, with a proof: every part of every parameter is filled exactly once, and nothing is left over.

One tensor is read, copied into its place and dropped before the next, so loading needs the model plus one tensor.
A parameter that no tensor filled would hold whatever was in memory: that is an error with its name, as is a tensor that
no parameter wants.
"""

from __future__ import annotations

import torch
from torch import nn
from tqdm import tqdm

from nanovllm.errors import ModelError
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.rules import Rule, find_destination

DUMMY_RANGE = 1e-3  # uniform in +-1e-3, as vLLM's dummy loader draws, so that figures compare


def load_dummy(model: nn.Module, seed: int) -> None:
    """Weights of the right shapes and no meaning, for speed tests of models that cannot be downloaded."""
    for index, (_, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed((seed + index) & (2**63 - 1))
        parameter.data.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)


def load_weights(model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...]) -> None:
    names = checkpoint.names()
    if not names:
        raise ModelError(f"{checkpoint.path}: no *.safetensors beside config.json (load_format='dummy' needs none)")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = _expected_parts(model)
    tied = {name for name in parameters if name not in expected}  # another name of a parameter loaded elsewhere
    filled: set[tuple[str, str]] = set()
    unused: list[str] = []
    for name in tqdm(names, desc="loading weights", unit="tensor", disable=None, leave=False):
        destination = find_destination(rules, name)
        if destination is None or (destination.parameter and destination.parameter not in parameters):
            unused.append(name)
            continue
        target, part = destination.parameter, destination.part
        if target is None or target in tied:
            continue
        if (target, part) in filled:
            raise ModelError(f"{checkpoint.path}: {name!r} fills {target} twice")
        if part not in expected[target]:
            unused.append(name)
            continue
        _copy(checkpoint, name, parameters[target], expected[target][part])
        filled.add((target, part))
    _prove_complete(checkpoint, expected, filled, unused)


def _expected_parts(model: nn.Module) -> dict[str, dict[str, tuple[int, int]]]:
    """parameter -> part -> (first row, number of rows); a parameter that is not stacked has the single part ''."""
    expected: dict[str, dict[str, tuple[int, int]]] = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        rows: dict[str, int] = getattr(owner, "parts", {"": len(parameter)})
        starts, start = {}, 0
        for part, count in rows.items():
            starts[part] = (start, count)
            start += count
        assert start == len(parameter), name
        expected[name] = starts
    return expected


def _copy(checkpoint: Checkpoint, name: str, parameter: torch.Tensor, rows: tuple[int, int]) -> None:
    target = parameter.data[rows[0] : rows[0] + rows[1]]
    shape = checkpoint.shape(name)
    if tuple(shape) != tuple(target.shape):
        wanted = tuple(target.shape)
        raise ModelError(f"{checkpoint.path}: {name!r} has shape {tuple(shape)}, config.json implies {wanted}")
    target.copy_(checkpoint.read(name))


def _prove_complete(
    checkpoint: Checkpoint,
    expected: dict[str, dict[str, tuple[int, int]]],
    filled: set[tuple[str, str]],
    unused: list[str],
) -> None:
    missing = [f"{name}[{part}]" if part else name for name, parts in expected.items() for part in parts
               if (name, part) not in filled]  # fmt: skip
    problems = []
    for what, names in (("not found in the checkpoint", missing), ("in the checkpoint but not in the model", unused)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            problems.append(f"{len(names)} {what}: {', '.join(names[:8])}{more}")
    if problems:
        raise ModelError(f"{checkpoint.path}: weights do not fit config.json. " + "; ".join(problems))
