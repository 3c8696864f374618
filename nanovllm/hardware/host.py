"""The machine around the accelerator: its processor, and where this project keeps what it fetched or compiled."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path


def cpu_fact(name: str) -> str:
    """One line of Linux's description of the first core ("model name", "flags"); "" where there is none."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(name)), "")
    except OSError:
        return ""


def cpu_name() -> str:
    return cpu_fact("model name") or platform.processor() or platform.machine()


def cache_folder() -> Path:
    if own := os.environ.get("NANOVLLM_CACHE"):
        return Path(os.path.expanduser(own))
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(shared) / "nanovllm"


def is_in_memory(folder: Path) -> bool:
    """Whether Linux keeps the files of this folder in memory (/dev/shm, often /tmp); False where it does not say."""
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    path, kinds = folder.resolve(), {words[4]: words[words.index("-") + 1] for words in mounts if "-" in words}
    return next((kinds[str(p)] in ("tmpfs", "ramfs") for p in (path, *path.parents) if str(p) in kinds), False)


def wait_briefly() -> None:
    """Threads of OpenMP that wait for each other look 1,000 times, some microseconds, and then sleep. GNU's default is
    300,000 times; meanwhile the last of them may need the core. Beside busy processes a prompt took 3 to 20 times as
    long, alone it takes the same. OpenMP reads it when it is loaded, so this comes before `import torch`. The user's
    own setting stays."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


@functools.cache
def computing_process() -> int:
    """The process that was the first to make an engine here. A fork of it inherits this answer but not the threads of
    OpenMP, for which the first product in the child would wait for ever."""
    return os.getpid()


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say (it is not Linux)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
