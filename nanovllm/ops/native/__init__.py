"""Operators in C for fp32 on a CPU (kernels.c, linear.c, quant.c, sampling.c) and their loader. Optional: without a C
compiler the plain twins serve, and quantised weights are expanded."""
