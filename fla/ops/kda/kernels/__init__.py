"""Triton kernels of Kimi delta attention. Importing this package needs Triton."""
