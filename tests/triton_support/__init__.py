"""Triton kernels without a GPU: numbers from Triton's interpreter, machine code from its compiler.

- `plugin` runs tests marked `interpreted` in a child process with TRITON_INTERPRET=1.
- `interpreter` fixes defects of the interpreters of Triton 3.6 and 3.9, and makes them refuse what they cannot compute.
- `compile_only` compiles the kernels that an operation launches, for a GPU that need not exist, and checks that they fit.
"""
