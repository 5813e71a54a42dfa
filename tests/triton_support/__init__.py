"""Triton's kernels without a GPU: their numbers from Triton's interpreter, their machine code from its compiler.

- `plugin` runs tests marked `interpreted` in a child process in which TRITON_INTERPRET=1.
- `interpreter` mends what the interpreter of Triton 3.6 and 3.9 gets wrong, and lets it refuse what it cannot do.
- `compile_only` compiles what an operation launches, for a GPU that need not exist, and checks that it fits.
"""
