"""C files compiled for several kinds of processors, as programs that read stdin and write stdout."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from nanovllm.hardware.host import cpu_fact
from nanovllm.ops.native import build

X86 = {"plain C": "x86-64", "AVX2": "x86-64-v3", "AVX-512 VNNI": "cascadelake", "AVX-VNNI": "alderlake"}
ARM = {"NEON": "armv8-a", "NEON with dot product": "armv8.2-a+dotprod"}
VARIANTS = {"this machine": "native", **X86, **ARM}


def compiled(harness: str, variant: str, folder: Path) -> list[str]:
    """The command that runs a C file of this folder; skips where the compiler or the processor is not there."""
    compiler = shutil.which("aarch64-linux-gnu-gcc" if variant in ARM else "cc")
    if compiler is None:
        pytest.skip(f"no compiler for {variant}")
    target = _compile(compiler, harness, VARIANTS[variant], folder)
    if variant in ARM:
        emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        if emulator is None:
            pytest.skip("no qemu-aarch64: cross-compiled only")
        return [emulator, target]
    needed = {"AVX2": "avx2 f16c fma", "AVX-512 VNNI": "avx512_vnni avx512vl avx512bw", "AVX-VNNI": "avx_vnni"}
    if not set(needed.get(variant, "").split()) <= set(cpu_fact("flags").split()):
        pytest.skip(f"this processor has no {variant}: compiled only")
    return [target]


@functools.cache
def _compile(compiler: str, harness: str, machine: str, folder: Path) -> str:
    source, target = Path(__file__).with_name(harness), str(folder / f"{harness}-{machine}")
    flags = [*build.EXACT_FLAGS, "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-march={machine}"]
    command = [compiler, *flags, "-static", str(source), "-o", target, "-lm"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return target
