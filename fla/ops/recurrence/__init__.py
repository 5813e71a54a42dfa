"""Code that the linear recurrences share. Both delta rules are one recurrence, with a gate per head or per channel.

- On the host: `arguments.py` (a call's `Inputs`, `Options` and `Gradients`), `checks.py`, `on_triton.py` (requirements of
  the Triton defaults), `operator.py` (the opaque operator).
- In PyTorch: `naive.py` (the definition, step by step), `chunked.py` (the algorithm in chunks), `gates.py` (gates, norms),
  `reference.py` (the whole operation, for the reference backends).
- In Triton, `kernels/`: the recurrent kernel and its launch (`decode.py`), what chunked launches share (`call.py`), and
  device functions.
"""
