"""Compiling the C files of this folder on first use, for the processor it runs on, and keeping the result.

No compiler, no cache folder, a failing compilation: each is a reason (a string), never an error, because the plain
operators do the same work. The library is named after everything that went into it and moved into place whole, so two
processes at once, a killed one, or a home folder shared by different machines do no harm.
"""

from __future__ import annotations

import ctypes
import errno
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

# C11 by name: later standards, which newer compilers take by default, have more names in their headers.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
EXACT_FLAGS = (
    *FLAGS,
    "-ffp-contract=off",
)  # every product and sum of floats is rounded by itself, in the written order
FAST_FLAGS = (*FLAGS, "-fno-signed-zeros", "-fassociative-math")
HEADERS = ("exp.h", "half.h", "share.h")
SOURCES = {"kernels.c": FAST_FLAGS, "linear.c": FAST_FLAGS, "quant.c": EXACT_FLAGS, "sampling.c": EXACT_FLAGS}
SOURCES |= {"share.c": EXACT_FLAGS, "tape.c": EXACT_FLAGS}
MACHINE = "-march=native"
# With OpenMP, but not linked to a runtime of its own: torch's is already in the process, and two pools of threads
# spinning on the same cores are slower than one thread. If that does not load, without OpenMP.
VARIANTS = (("-fopenmp",), ())
TIMEOUT_SECONDS = 120
INSTALL = "install a C compiler (Debian and Ubuntu: apt install gcc; macOS: xcode-select --install)"


class CannotWrite(Exception):
    pass


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none, with the remedy. Computed once a process."""
    if os.environ.get("NANOVLLM_NATIVE", "1") == "0":
        return "turned off by NANOVLLM_NATIVE=0; leave that out"
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return f"no C compiler (cc, gcc or clang) on PATH; {INSTALL}"
    reason = ""
    for extra in VARIANTS:
        try:
            return _load(compiler, extra)
        except CannotWrite as error:
            reason = f"{error}; set NANOVLLM_CACHE to a folder that can"
        except (OSError, subprocess.SubprocessError) as error:
            remedy = f"set CC to a compiler that works, or {INSTALL}"
            if os.strerror(errno.ENOSPC) in str(error):  # as the compiler says it, too
                remedy = f"make room in {cache_folder()}, or set NANOVLLM_CACHE to a folder elsewhere"
            reason = f"{type(error).__name__}: {error}; {remedy}"
    return f"compiling failed: {reason}"


def _load(compiler: str, extra: tuple[str, ...]) -> ctypes.CDLL:
    path = _compile(compiler, extra)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if any(word in str(error) for word in ("ymbol", "cannot open shared object")):  # what OpenMP needs is not here
            raise
        path.unlink(missing_ok=True)  # a damaged file
        return ctypes.CDLL(str(_compile(compiler, extra)))


def _compile(compiler: str, extra: tuple[str, ...]) -> Path:
    here = Path(__file__).parent
    facts = [(here / header).read_text() for header in HEADERS]
    facts += [MACHINE, *extra, _run([compiler, "--version"]), platform.machine()]
    for source, flags in SOURCES.items():
        facts += [(here / source).read_text(), *flags]
    facts += [cpu_fact("model name"), cpu_fact("flags")]  # what -march=native depends on
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    target = cache_folder() / "native" / f"kernels-{name}.so"
    if target.exists():  # in a folder that need not be writable any more
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise CannotWrite(f"{target.parent} cannot be written ({error})") from error
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        linked, objects = Path(work, "kernels.so"), [str(Path(work, source + ".o")) for source in SOURCES]
        for (source, flags), compiled in zip(SOURCES.items(), objects):
            _run([compiler, *flags, MACHINE, *extra, "-c", str(here / source), "-o", compiled])
        _run([compiler, "-shared", *objects, "-o", str(linked), "-lm"])
        os.replace(linked, target)
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        errors = [line for line in said if "error" in line] or said[-3:]
        raise OSError(f"{command[0]}: {' '.join(errors[:1] or ['it failed without a word'])[:300]}")
    return done.stdout
