"""Ctrl-C between two steps instead of inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class CtrlC:
    """A handler of SIGINT that remembers the first press. A second one, for a step that hangs, interrupts at once."""

    pressed = False

    def __call__(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextlib.contextmanager
def ctrl_c() -> Iterator[CtrlC]:
    """Ctrl-C sets `pressed` while this lasts, for a caller that looks at it between steps. An exception inside a step
    would cost the engine its prefix cache, and an engine of several ranks its life: the others would wait for this one.

    A handler that the caller has set stays, and outside the main thread, which alone may set handlers, nothing changes.
    """
    handler = CtrlC()
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    # One of ours is there if an interrupt came just before it was taken away.
    if not is_main or not (before is signal.default_int_handler or isinstance(before, CtrlC)):
        yield handler
        return
    try:
        signal.signal(signal.SIGINT, handler)
        yield handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
