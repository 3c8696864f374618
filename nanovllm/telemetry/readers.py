"""Readers of the events of `feed.py`: a task of an event loop (EventQueue) or a file (TraceFile)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nanovllm.errors import ConfigError
from nanovllm.telemetry.trace import FORMAT, MAX_TRACE_BYTES

logger = logging.getLogger("nanovllm")

START = b'{"type": "header"'  # of every trace
MAX_UNREAD = 256  # events in an EventQueue: some seconds of a fast engine


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    kind: str
    line: bytes  # one JSON object


class Reader(Protocol):
    """Both are called on the feed thread and must not block it for long."""

    def put(self, event: Event) -> None: ...

    def end(self) -> None: ...


class EventQueue:
    """Events for one task of an event loop. A full queue is emptied and `lost` until the next snapshot."""

    def __init__(self, limit: int = MAX_UNREAD) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._lock = threading.Lock()  # around all below
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self.lost = False

    def put(self, event: Event) -> None:
        with self._lock:
            if self.lost and event.kind != "snapshot":
                return
            self.lost = len(self._events) >= self._limit
            if self.lost:
                self._events.clear()
            else:
                self._events.append(event)
        self._wake()

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._wake()

    async def take(self, seconds: float) -> list[Event] | None:
        """All new events, after waiting for at most so long; None after the end."""
        # Not asyncio.wait_for: before Python 3.12 it may swallow a cancellation that comes with an event.
        timer = self._loop.call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        with self._lock:
            if not self._ended:  # after the end nothing sets it again, and the next call must return None at once
                self._changed.clear()
            events = list(self._events)
            self._events.clear()
            return None if self._ended and not events else events

    def _wake(self) -> None:
        if not self._changed.is_set():
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._changed.set)


def _open_at_once(path: str, flags: int) -> int:
    """Opening a pipe that nothing reads fails instead of waiting for a reader."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(file, True)
    return file


class TraceFile:
    """Every event, one a line, after a header. An error of the disk ends the trace and nothing else."""

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        self._path = path
        self._size = 0
        try:
            if Path(path).is_file():  # writing to a device or a pipe destroys nothing
                with open(path, "rb") as old:
                    if old.read(len(START)) not in (b"", START):
                        raise ConfigError(f"trace={str(path)!r}: is no trace; it is not overwritten, name another file")
            self._file: Any = open(path, "wb", opener=_open_at_once)  # noqa: SIM115
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise ConfigError(f"trace={str(path)!r}: a pipe that nothing reads: start its reader first") from None
            raise ConfigError(f"trace={str(path)!r}: cannot be written ({error}): name a file in a folder") from None
        self._write(json.dumps({"type": "header", "format": FORMAT, **header}).encode())

    def put(self, event: Event) -> None:
        self._write(event.line)

    def end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._size + len(line) + 1 > MAX_TRACE_BYTES:
                raise OSError(f"it has reached {MAX_TRACE_BYTES >> 20} MB, the most that can be viewed")
            self._file.write(line + b"\n")
            self._file.flush()
            self._size += len(line) + 1
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self._path, error)
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # remove a line that was written in part
            self.end()
