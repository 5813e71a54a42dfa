"""Device code that kernels of several operations share."""
