"""Packages that a backend may use but that need not be installed.

`load(name)` gives the module, or the reason why there is none. It imports the package: one that was compiled for
another version of torch is found by name and then fails on its first symbol.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from nanovllm.attention.base import AttentionSpec
from nanovllm.hardware.device import Device


def needs_ampere_in_16_bits(spec: AttentionSpec, device: Device) -> str | None:
    """A limit that the libraries' current kernels share: why they cannot serve, or None."""
    if not device.is_gpu or device.capability is None:
        return "needs a GPU"
    if device.capability < (8, 0):
        major, minor = device.capability
        return f"needs compute capability 8.0 (Ampere) or newer, this card has {major}.{minor}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
    return None


def load(name: str) -> ModuleType | str:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, package):
            return f"{package} is not installed"
        return f"{package} is installed but cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"{package} is installed but cannot be imported: {error}"


def major_version(module: ModuleType) -> int:
    first = str(getattr(module, "__version__", "")).partition(".")[0]
    return int(first) if first.isdigit() else 0
