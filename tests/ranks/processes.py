"""What a process holds: children, open files, threads, ports, memory. Read from /proc: Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def children(parent: int | None = None) -> set[int]:
    """Processes that this one started and that still run."""
    parent, found = parent or os.getpid(), set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def descendants(of: int | None = None) -> set[int]:
    """Children, their children and so on; with the process itself."""
    found = newest = {of or os.getpid()}
    while newest := set().union(*map(children, newest)) - found:
        found = found | newest
    return found


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files(process: int | None = None) -> dict[str, str]:
    found = {}
    for link in Path(f"/proc/{process or os.getpid()}/fd").iterdir():
        try:
            found[link.name] = os.readlink(link)
        except OSError:
            continue  # the folder's own
    return found


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def listening(process: int) -> set[str]:
    """Addresses, in the kernel's hexadecimal, on which a process waits for connections. 0100007F is 127.0.0.1."""
    inodes = {target[8:-1] for target in open_files(process).values() if target.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def all_on_loopback(processes: set[int]) -> bool:
    """Some of them listen, and only on the loopback interface."""
    found = set().union(*map(listening, processes))
    return bool(found) and found <= {"0100007F", "0000000000000000FFFF00000100007F"}


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """True as soon as it holds, False if it does not in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
