"""From a host call to a kernel: Triton and TileLang launches, their cache, compiler workarounds."""
