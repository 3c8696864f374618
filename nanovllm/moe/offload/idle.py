"""When the link between host and device has nothing to do, and how much it could move in that time."""

from __future__ import annotations

import statistics
import time
from collections import deque

from nanovllm.hardware.copies import CopyStream, Mark


class IdleTime:
    """How much the copy engine can move while no layer needs it: from the end of a layer's own copies to the next
    layer's first. The medians of the last times it happened, for calls of about as many tokens, with and without
    misses; the host's own time to react is part of it."""

    def __init__(self, stream: CopyStream, bandwidth: float | None, piece_bytes: int) -> None:
        self._stream, self._bandwidth, self._piece_bytes = stream, bandwidth, piece_bytes
        self._gaps: dict[tuple[bool, int], deque[float]] = {}
        self._reactions: deque[float] = deque(maxlen=9)
        self._periods: deque[float] = deque(maxlen=9)  # seconds between two downloads, where nothing was missing
        self._began: tuple[int, tuple[bool, int], Mark] | None = None
        self._downloaded = 0.0  # when the last download ended
        self._nothing_missed = False

    def before_download(self, layer: int) -> Mark | None:
        """Before a layer's routing report is downloaded: the engine's idle time ends about here. None if it is not
        worth measuring."""
        follows = self._began is not None and self._began[0] + 1 == layer
        return self._stream.mark_compute(timed=True) if follows and self._bandwidth else None

    def after_download(self, mark: Mark | None) -> None:
        """`mark`: what `before_download` gave."""
        before, self._downloaded = self._downloaded, time.perf_counter()
        if self._nothing_missed:
            self._periods.append(self._downloaded - before)
        self._nothing_missed = False
        if mark is not None and self._began is not None:
            _, kind, began = self._began
            gap = self._stream.seconds(began, mark)  # None: copies are still under way, there was no gap
            self._gaps.setdefault(kind, deque(maxlen=9)).append(max(gap or 0.0, 0.0))

    def pieces(self, layer: int, has_misses: bool, num_tokens: int) -> int:
        """After a layer's own copies were queued: pieces that may follow them."""
        self._reactions.append(time.perf_counter() - self._downloaded)
        if not self._bandwidth:
            return 0
        kind = (has_misses, num_tokens.bit_length())
        self._began = (layer, kind, self._stream.mark_copies(timed=True))
        if kind not in self._gaps:
            return 0
        seconds = statistics.median(self._gaps[kind]) + statistics.median(self._reactions)
        return int(seconds * self._bandwidth / self._piece_bytes)

    def pieces_late(self) -> int:
        """The same after a layer that missed nothing, when the next one has already been replayed: what the engine can
        move in the time such a layer takes. If that one misses something, it waits so long at most."""
        self._began, self._nothing_missed = None, True
        if not self._bandwidth or not self._periods:
            return 0
        return int(statistics.median(self._periods) * self._bandwidth / self._piece_bytes)
