"""Ctrl-C between two steps instead of inside one, and while modules are imported."""

from __future__ import annotations

import contextlib
import importlib
import os
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


@contextlib.contextmanager
def ctrl_c_leaves() -> Iterator[None]:
    """Inside this block, where a command imports modules, Ctrl-C ends the process. As an exception it would leave a
    traceback, or half a module, or nothing at all: torch goes on without NumPy if that cannot be imported, whatever the
    reason was."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_torch() -> None:
    """The first import of it in a command."""
    with ctrl_c_leaves():
        importlib.import_module("torch")
