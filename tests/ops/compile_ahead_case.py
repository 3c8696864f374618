"""Run by test_compile_ahead.py in a process of its own (one that interprets kernels cannot compile them): a stand-in
driver reports a Hopper card, so kernels are compiled for it without a GPU, and any real launch would fail."""

import sys
import types

import torch
import triton
from triton.backends.compiler import GPUTarget

from nanovllm.ops.triton.compile_ahead import compile_ahead
from nanovllm.ops.triton.norm import norm_kernel, rms_norm

driver = types.SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)
triton.runtime.driver.set_active(driver)
run_before, hook_before = triton.runtime.jit.JITFunction.run, triton.knobs.runtime.jit_cache_hook
make_ir_before = triton.compiler.ASTSource.make_ir


def launches() -> None:
    for size in (64, 64, 96):  # the first two are one variant
        rms_norm(torch.zeros(3, size), torch.ones(size), 1e-5)


def fails() -> None:
    raise ZeroDivisionError


wait = compile_ahead(launches, torch.device("cpu"))
wait()
kernels = norm_kernel.device_caches[0][0]
assert len(kernels) == 2, list(kernels)
assert all("ptx" in kernel.asm for kernel in kernels.values())
try:
    compile_ahead(fails, torch.device("cpu"))
except ZeroDivisionError:
    pass
else:
    sys.exit("the function's error was swallowed")
assert triton.runtime.jit.JITFunction.run is run_before
assert triton.knobs.runtime.jit_cache_hook is hook_before
assert triton.compiler.ASTSource.make_ir is make_ir_before
print("compiled", len(kernels))
