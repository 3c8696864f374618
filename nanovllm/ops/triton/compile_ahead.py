"""Compiling kernels in threads before they are needed.

Triton compiles a kernel at its first launch, one after the other: ten seconds of waiting for a model's two dozen
variants when nothing is in its cache on disk yet. Most of a compilation runs outside Python's lock, so threads help.
Which variants a model needs follows from the arguments of its launches. So `compile_ahead(function)` runs the function
with every launch turned into a mere warm-up (nothing runs on the GPU, so no kernel reads what another did not write),
and a hook in Triton hands what would be compiled to a thread instead. A variant that is missed here is compiled at its
first launch, as always.

What does need Python's lock is the first stage, which turns the function's source into Triton's language: the threads
take turns there, in the order of the launches, so the first ones go on to the other stages while the last ones wait.
If all began at once, all would end this stage at its end. Triton up to 3.6 also compiles a launcher in C for each
kernel; on an H200's host 27 of them took 4 s one after another, so they are made in the threads too.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


def compile_ahead(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns at once after the function; call what is returned to wait for the compilations. A kernel that does not
    compile raises at its real launch, with its arguments on the stack."""
    pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="compile")
    jobs: dict[Any, Future[None]] = {}
    caller = threading.get_ident()
    launch_kernel, previous = JITFunction.run, knobs.runtime.jit_cache_hook
    make_ir, in_turn = ASTSource.make_ir, threading.Lock()

    def make_ir_in_turn(*args: Any, **kwargs: Any) -> Any:
        with in_turn:
            return make_ir(*args, **kwargs)

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch_kernel(self, *args, grid=grid, warmup=warmup or threading.get_ident() == caller, **kwargs)

    def compile_in_thread(**launch: Any) -> bool:
        if threading.get_ident() != caller:  # a compiling thread, or another engine's: must go on as usual
            return bool(previous and previous(**launch))
        kernel = launch["fn"].jit_function
        job = (kernel, launch["compile"]["key"])
        if job not in jobs:
            jobs[job] = pool.submit(_compile, kernel, launch["compile"]["specialization_data"], device)
        return True

    JITFunction.run, knobs.runtime.jit_cache_hook = warm_up, compile_in_thread
    ASTSource.make_ir = make_ir_in_turn
    try:
        function()
    except BaseException:
        ASTSource.make_ir = make_ir
        raise
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch_kernel, previous
        pool.shutdown(wait=False)

    def wait() -> None:
        for job in jobs.values():
            job.exception()
        ASTSource.make_ir = make_ir

    return wait


def _compile(kernel: Any, specialization: str, device: torch.device) -> None:
    if device.type != "cuda":
        kernel.preload(specialization)
        return
    torch.cuda.set_device(device)  # each thread has its own current device
    _launcher = kernel.preload(specialization).run  # reading it makes the launcher and loads the kernel
