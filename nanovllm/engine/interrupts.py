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

    def check(self) -> None:
        """Between two steps: the press is raised here, and the next one waits again."""
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def ctrl_c() -> Iterator[CtrlC]:
    """Inside this block Ctrl-C only sets `pressed`, which the caller checks between steps. An exception inside a step,
    or while a request is added or aborted, would empty the prefix cache, and would end an engine of several ranks: the
    others would wait for this one for ever.

    A press that the caller has not seen, during the last step, is raised at the end of the block. One that it has
    dealt with it sets back to False.

    A handler that the caller has set stays, and outside the main thread, which alone may set handlers, nothing changes.
    """
    handler = CtrlC()
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    # The handler is a CtrlC if an interrupt prevented an earlier block from restoring it.
    if not is_main or not (before is signal.default_int_handler or isinstance(before, CtrlC)):
        yield handler
        return
    try:
        signal.signal(signal.SIGINT, handler)
        yield handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if handler.pressed:
        raise KeyboardInterrupt
