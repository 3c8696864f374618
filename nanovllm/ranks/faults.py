"""Which rank is the cause when several report a fault: one fails, and all others then fail to reach it.

Each rank reports its own exception. A rank whose exception was raised inside a collective (hardware/parallel.py) only
lost touch with another; the cause is a rank that raised elsewhere, or died, or has no report although all others have.

gloo ends a wait by itself after worker_timeout. A GPU that waits for another inside a kernel does not, and its host
waits with it: an Alarm, in a thread of its own, ends the kernels then.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nanovllm.hardware import parallel

FAILED, LOST = "failed", "lost"
STARTUP_SECONDS = 600.0  # to load the weights
CONNECT_SECONDS = 30.0  # to find each other, once all are there
GRACE_SECONDS = 1.25  # for the reports of the other ranks, after the first fault
LOOK_SECONDS = 0.02
ALARM_SECONDS = 0.25  # between two checks of an alarm

T = TypeVar("T")


class LostTouchError(Exception):
    """Another rank did not answer."""


@dataclass(frozen=True)
class Report:
    rank: int
    kind: str  # FAILED: this rank is the cause; LOST: it could not reach another
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Report:
        frames = traceback.extract_tb(error.__traceback__)
        lost = isinstance(error, LostTouchError)
        lost = lost or (bool(frames) and Path(frames[-1].filename) == Path(parallel.__file__))
        return cls(rank, LOST if lost else FAILED, f"{type(error).__name__}: {error}"[:4000])


class Alarm:
    """Calls `ring` when a watched function takes too long, or when `is_lost`: another rank is dead. `ring` must make
    the watched function return or raise; its result is then discarded."""

    def __init__(self, seconds: float, is_lost: Callable[[], bool], ring: Callable[[], None]) -> None:
        self._seconds, self._is_lost, self._ring = seconds, is_lost, ring
        self._began: float | None = None
        self._rang = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanovllm-alarm", daemon=True)
        self._thread.start()

    def watch(self, function: Callable[[], T]) -> T:
        self._began = time.monotonic()
        try:
            result = function()
        except Exception as error:
            if self._rang:
                raise LostTouchError("another rank did not answer") from error
            raise
        finally:
            self._began = None
        if self._rang:
            raise LostTouchError("another rank did not answer")
        return result

    def _run(self) -> None:
        while not self._stopped.wait(ALARM_SECONDS):
            began = self._began
            if began is not None and (time.monotonic() - began > self._seconds or self._is_lost()):
                self._rang = True
                self._ring()
                return

    def close(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def collect_reports(read: Callable[[], list[Report]], num_ranks: int, seconds: float = GRACE_SECONDS) -> list[Report]:
    """Read again until the cause is among the reports, every rank has reported, or the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        reports = read()
        done = any(report.kind == FAILED for report in reports) or len(reports) >= num_ranks
        if done or time.monotonic() >= deadline:
            return reports
        time.sleep(LOOK_SECONDS)


def no_answer(seconds: float) -> str:
    return f"no answer within {seconds:.0f} s (worker_timeout): its process hangs or is gone"


def name_cause(reports: list[Report], num_ranks: int, waited: float) -> str:
    failed = [f"rank {report.rank}: {report.text}" for report in reports if report.kind == FAILED]
    if failed:
        return "; ".join(failed)
    silent = sorted(set(range(num_ranks)) - {report.rank for report in reports})
    if silent:
        return f"rank {', '.join(map(str, silent))}: {no_answer(waited)}"
    return "; ".join(f"rank {report.rank} lost touch with the others: {report.text}" for report in reports)
