"""Operators in C for fp32 on a CPU: kernels.c, and its loader. Optional: without a C compiler the plain twins serve."""
