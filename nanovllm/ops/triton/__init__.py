"""Triton kernels, one per file, each the fast twin of an operator in `nanovllm/ops`.

Nothing outside this package imports triton. Kernels take and return plain tensors, read lengths on the device and never
wait for it, so every one of them can be captured in a graph.
"""
