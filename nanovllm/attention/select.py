"""Choosing an attention backend: the first in order that does not refuse, and why the others did.

`attention_backend_info` gives the same without an engine, `print_attention_backend_info` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.attention.base import AttentionSpec, Backend, CacheSpec, LatentSpec
from nanovllm.attention.flash1_backend import Flash1Backend
from nanovllm.attention.flash_backend import FlashBackend
from nanovllm.attention.flashinfer_backend import FlashInferBackend
from nanovllm.attention.latent import LatentBackend, TritonLatentBackend
from nanovllm.attention.native_backend import NativeBackend
from nanovllm.attention.sdpa import SdpaBackend, SdpaMathBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device

# Best first.
BACKENDS: tuple[Backend, ...] = (
    TritonBackend(),
    FlashBackend(),
    FlashInferBackend(),
    Flash1Backend(),
    NativeBackend(),
    SdpaBackend(),
    SdpaMathBackend(),
    TritonLatentBackend(),
    LatentBackend(),
)
BLOCK_SIZE_FOR_ALL = 256  # every backend can read blocks of so many slots


@dataclass(frozen=True)
class BackendChoice:
    backend: Backend
    reasons: dict[str, str]  # every backend's name -> "chosen", why it was refused, or that another came first


def select_backend(wanted: str, specs: Sequence[CacheSpec], device: Device, block_size: int) -> BackendChoice:
    """An explicit choice that cannot serve is an error with the reason, never a silent replacement."""
    names = [backend.name for backend in BACKENDS]
    if wanted != "auto" and wanted not in names:
        raise ConfigError(f"attn_backend={wanted!r}: must be auto or one of {', '.join(names)}")
    chosen: Backend | None = None
    reasons: dict[str, str] = {}
    for backend in BACKENDS:
        refusal = next((reason for spec in specs if (reason := _refusal(backend, spec, device, block_size))), None)
        if refusal:
            reasons[backend.name] = f"refused: {refusal}"
        elif chosen is None and wanted in ("auto", backend.name):
            chosen = backend
            reasons[backend.name] = "chosen" if wanted == "auto" else "chosen: asked for"
        else:
            reasons[backend.name] = "available"
    if chosen is None:
        raise ConfigError(f"attn_backend={wanted!r} cannot be used here: {reasons.get(wanted, reasons)}")
    return BackendChoice(chosen, reasons)


def _refusal(backend: Backend, spec: CacheSpec, device: Device, block_size: int) -> str | None:
    if isinstance(spec, LatentSpec) != isinstance(backend, LatentBackend):
        return f"computes {'no' if isinstance(spec, LatentSpec) else 'only'} latent attention (DeepSeek)"
    if isinstance(spec, AttentionSpec) and spec.kv_dtype not in (None, spec.dtype, *backend.kv_dtypes):
        return "reads a KV cache of the model's dtype"
    return backend.rejects(spec, device, block_size)


def attention_backend_info(device: Device | None = None) -> dict[str, Any]:
    """What this machine offers a common model: 16 heads of 128 over 8 KV heads, in the dtype that suits the device."""
    device = device or Device.choose("auto")
    spec = AttentionSpec(16, 8, 128, device.resolve_dtype("auto", "bfloat16"))
    return {
        "gpu": device.name if device.is_gpu else None,
        "device": device.name,
        "compute_capability": None if device.capability is None else "{}.{}".format(*device.capability),
        "architecture": device.architecture,
        "head_dim": spec.head_dim,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "backends": select_backend("auto", [spec], device, BLOCK_SIZE_FOR_ALL).reasons,
    }


def print_attention_backend_info(device: Device | None = None) -> None:
    info = attention_backend_info(device)
    print(f"GPU:                 {info['gpu'] or 'none; ' + info['device']}")
    print(f"compute capability:  {info['compute_capability'] or 'none'}")
    print(f"architecture:        {info['architecture']}")
    print(f"attention backends, best first (head_dim {info['head_dim']}, {info['dtype']}):")
    for name, reason in info["backends"].items():
        print(f"  {name:<11} {reason}")
