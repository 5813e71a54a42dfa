"""Triton kernels that the delta rules share. Importing this package needs triton."""
