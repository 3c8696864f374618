"""Compiling kernels.c on first use, for the processor it runs on, and keeping the result.

No compiler, no cache folder, a failing compilation: each is a reason (a string), never an error, because the plain
operators do the same work. The library is named after everything that went into it and moved into place whole, so two
processes at once, a killed one, or a home folder shared by different machines do no harm.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime must be loaded first: the library shares its threads)

from nanovllm.hardware.host import cache_folder, cpu_fact

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
)
# With OpenMP, but not linked to a runtime of its own: torch's is already in the process, and two pools of threads
# spinning on the same cores are slower than one thread. If that does not load, without OpenMP.
# quant.c: every product and sum of floats is rounded by itself, in the order in which it is written.
EXACT_FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
VARIANTS = (("-fopenmp",), ())
TIMEOUT_SECONDS = 120


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none. Computed once a process."""
    if os.environ.get("NANOVLLM_NATIVE", "1") == "0":
        return "turned off by NANOVLLM_NATIVE=0"
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler (cc, gcc or clang) on PATH"
    reason = ""
    for extra in VARIANTS:
        try:
            return ctypes.CDLL(str(_compile(compiler, extra)))
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{type(error).__name__}: {error}"
    return f"compiling failed: {reason}"


def _compile(compiler: str, extra: tuple[str, ...]) -> Path:
    facts = [SOURCE.read_text(), *FLAGS, *extra, _run([compiler, "--version"]), platform.machine()]
    facts += [cpu_fact("model name"), cpu_fact("flags")]  # what -march=native depends on
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    folder = cache_folder() / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"kernels-{name}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        compiled, linked = Path(work, "kernels.o"), Path(work, "kernels.so")
        _run([compiler, *FLAGS, *extra, "-c", str(SOURCE), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
        os.replace(linked, target)
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:1])}: {done.stderr.strip()[-300:]}")
    return done.stdout
