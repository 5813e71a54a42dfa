"""Triton kernels of the modules."""
