"""CopyStream: large copies to the device and back beside the computing, and the order between the two.

A GPU can copy and compute at once. Overwriting memory that a running kernel reads, or reading memory that a copy has
not filled yet, is not an error there; the result is silently wrong. Here the two kinds of order are two calls on
*marks*, points in a queue:

    mark = stream.mark_copies()     after everything queued for copying so far
    stream.hold_compute(mark)       what is queued for computing from now on waits for it
    mark = stream.mark_compute()    after everything queued for computing so far
    stream.hold_copies(mark)        what is queued for copying from now on waits for it

`ExpertBuffer` is the only user: it owns memory together with both marks, so that neither can be forgotten.

CopyStream itself is the version for a CPU: a copy is done when `copy` returns and marks are times.

Small uploads do not belong here, but one fact matters to them: a card's copy engine serves copies in the order they
were queued, whatever the stream. 10 KB queued behind an expert of 352 MB arrive 6 ms later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.hardware.device import Device


@dataclass(frozen=True)
class Mark:
    number: int  # marks of one queue are ordered by it
    point: Any  # an event of the GPU; on a CPU the time it was made


class CopyStream:
    def __init__(self) -> None:
        self._num_marks = 0
        self._copies_after = self._compute_after = 0  # number of the mark each queue already waits for

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queued, after all copies before it in either direction. One of the two is page-locked memory of the host,
        which nothing but other copies may change, or as a target read, until a later mark has passed."""
        target.copy_(source)

    def mark_copies(self, timed: bool = False) -> Mark:
        return self._mark(self._record_copies(timed))

    def mark_compute(self, timed: bool = False) -> Mark:
        return self._mark(self._record_compute(timed))

    def hold_copies(self, mark: Mark) -> None:
        # A queue that waits for a mark has also waited for all marks of the other queue before it.
        if mark.number > self._copies_after:
            self._copies_after = mark.number
            self._make_copies_wait(mark.point)

    def hold_compute(self, mark: Mark) -> None:
        if mark.number > self._compute_after:
            self._compute_after = mark.number
            self._make_compute_wait(mark.point)

    def awaits(self, mark: Mark) -> bool:
        """Whether the computing queue does not wait for this mark, or a later one, already."""
        return mark.number > self._compute_after

    def wait(self, mark: Mark) -> None:
        """The host waits."""

    def seconds(self, earlier: Mark, later: Mark) -> float | None:
        """Between two timed marks; None if they have not both passed."""
        return later.point - earlier.point

    def download(self, tensor: torch.Tensor) -> np.ndarray:
        """A small tensor on the host; the host waits for the computing queue."""
        return tensor.numpy()

    def synchronize(self) -> None:
        """The host waits for all copies."""

    def _mark(self, point: Any) -> Mark:
        self._num_marks += 1
        return Mark(self._num_marks, point)

    def _record_copies(self, timed: bool) -> Any:
        return time.perf_counter()

    def _record_compute(self, timed: bool) -> Any:
        return time.perf_counter()

    def _make_copies_wait(self, point: Any) -> None:
        pass

    def _make_compute_wait(self, point: Any) -> None:
        pass


class GpuCopyStream(CopyStream):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device.torch_device
        self._stream = torch.cuda.Stream(self._device)
        self._compute = torch.cuda.current_stream(self._device)
        self._host = torch.empty(1 << 12, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self, mark: Mark) -> None:
        mark.point.synchronize()

    def seconds(self, earlier: Mark, later: Mark) -> float | None:
        if not (earlier.point.query() and later.point.query()):
            return None
        return earlier.point.elapsed_time(later.point) / 1e3

    def download(self, tensor: torch.Tensor) -> np.ndarray:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > len(self._host):
            self._host = torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        host = self._host[:num_bytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        self._follow_current_stream().synchronize()
        return host.numpy().copy()  # the buffer is used again by the next download

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _record_copies(self, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self._stream)
        return event

    def _record_compute(self, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self._follow_current_stream())
        return event

    def _make_copies_wait(self, point: torch.cuda.Event) -> None:
        self._stream.wait_event(point)

    def _make_compute_wait(self, point: torch.cuda.Event) -> None:
        self._follow_current_stream().wait_event(point)

    def _follow_current_stream(self) -> torch.cuda.Stream:
        """Numbers of marks order one computing queue. If the caller moves to another stream (rarely: a warm-up),
        everything queued until then is waited for, once."""
        current = torch.cuda.current_stream(self._device)
        if current != self._compute:
            torch.cuda.synchronize(self._device)
            self._compute = current
        return current


def open_copy_stream(device: Device) -> CopyStream:
    return GpuCopyStream(device) if device.is_gpu else CopyStream()


class ExpertBuffer:
    """Memory of the device for one expert. It is written by `fill` and read inside `reading`, which keep the order: a
    copy into it waits for the last kernel that read it; a kernel that reads it waits for the last copy into it."""

    def __init__(self, memory: torch.Tensor, stream: CopyStream) -> None:
        self._memory, self._stream = memory, stream
        self._copied: Mark | None = None
        self._used: Mark | None = None

    def used_until_now(self) -> None:
        """For what reads it outside `reading`: a captured segment, whose replay marks nothing. The next copy waits for
        all that is queued for computing by now."""
        self._used = self._stream.mark_compute()

    def fill(self, write: Callable[[torch.Tensor], None]) -> None:
        """`write(memory)` queues copies into the buffer."""
        if self._used is not None:
            self._stream.hold_copies(self._used)
        try:
            write(self._memory)
        finally:  # copies that were queued before an error are on their way all the same
            self._copied = self._stream.mark_copies()

    def save(self, read: Callable[[torch.Tensor], None]) -> None:
        """`read(memory)` queues copies out of the buffer. No mark is needed: they are in the queue that fills it, after
        its last copy and before its next, and kernels only read."""
        read(self._memory)


@contextmanager
def reading(buffers: Sequence[ExpertBuffer], stalls: StallClock | None = None) -> Iterator[None]:
    """What is queued for computing in this block may read these buffers."""
    assert buffers
    stream = buffers[0]._stream
    marks = [buffer._copied for buffer in buffers if buffer._copied is not None]
    last = max(marks, key=lambda mark: mark.number, default=None)
    if last is not None and stream.awaits(last):
        hold = stream.hold_compute if stalls is None else stalls.hold
        hold(last)
    try:
        yield
    finally:
        used = stream.mark_compute()
        for buffer in buffers:
            buffer._used = used


class StallClock:
    """How long the computing queue stood waiting for copies. Marks are read only after they have passed, so measuring
    makes neither host nor device wait."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._open: list[tuple[Mark, Mark]] = []
        self._seconds = 0.0

    def hold(self, mark: Mark) -> None:
        before = self._stream.mark_compute(timed=True)
        self._stream.hold_compute(mark)
        self._open.append((before, self._stream.mark_compute(timed=True)))
        if len(self._open) >= 64:
            self.seconds()

    def seconds(self) -> float:
        """Of all waits that are over."""
        waiting = []
        for pair in self._open:
            elapsed = self._stream.seconds(*pair)
            if elapsed is None:
                waiting.append(pair)
            else:
                self._seconds += elapsed
        self._open = waiting
        return self._seconds
