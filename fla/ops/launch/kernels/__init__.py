"""Device code that the kernels of several operations share. Importing this package needs Triton."""
