"""A plugin for pytest where Triton interprets kernels (`-p tests.ops.quick_interpreter`): it has less to do.

Whenever a kernel, or a function within one, is called, the interpreter looks for the functions of `triton.language` and
replaces them by its own. Here it does so once a launch: the same functions, in about two thirds of the time.
"""

import dataclasses
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_sees_all = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})  # what a kernel's functions may name


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


interpreter._patch_lang = lambda fn: _patch(_sees_all)
interpreter.InterpretedFunction.__call__ = _call


def skip_overflow_checks() -> None:
    """The interpreter checks every sum and product of integers, which takes a fifth of its time. Not for tests of a
    kernel by itself: there it finds offsets that need 64 bits."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
