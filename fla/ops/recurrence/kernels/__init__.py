"""Triton kernels and device code that the delta rules share. Importing this package needs Triton."""
