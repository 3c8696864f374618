"""Choosing an attention backend: ask each in order, take the first that does not refuse, remember why others did."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.attention.native_backend import NativeBackend
from nanovllm.attention.sdpa import SdpaBackend, SdpaMathBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device

# Best first.
BACKENDS: tuple[AttentionBackend, ...] = (TritonBackend(), NativeBackend(), SdpaBackend(), SdpaMathBackend())


@dataclass(frozen=True)
class Selection:
    backend: AttentionBackend
    reasons: dict[str, str]  # every backend's name -> "chosen", why it was refused, or that another came first


def select_backend(wanted: str, specs: list[AttentionSpec], device: Device) -> Selection:
    """An explicit choice that cannot serve is an error with the reason, never a silent replacement."""
    names = [backend.name for backend in BACKENDS]
    if wanted != "auto" and wanted not in names:
        raise ConfigError(f"attn_backend={wanted!r}: must be auto or one of {', '.join(names)}")
    chosen: AttentionBackend | None = None
    reasons: dict[str, str] = {}
    for backend in BACKENDS:
        refusal = next((reason for spec in specs if (reason := backend.rejects(spec, device))), None)
        if refusal:
            reasons[backend.name] = f"refused: {refusal}"
        elif chosen is None and wanted in ("auto", backend.name):
            chosen = backend
            reasons[backend.name] = "chosen" if wanted == "auto" else "chosen: asked for"
        else:
            reasons[backend.name] = "available"
    if chosen is None:
        raise ConfigError(f"attn_backend={wanted!r} cannot be used here: {reasons.get(wanted, reasons)}")
    return Selection(chosen, reasons)
