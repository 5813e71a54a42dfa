"""Calls every public function once, forwards and backwards, and writes what came out: a program for a process of its own.

python -m tests.served results.pt
"""

from __future__ import annotations

import os
import sys

import torch

if os.environ.get('TRITON_INTERPRET') == '1':
    from tests.triton_support import interpreter

    interpreter.install()  # before a module with kernels is imported

from fla.backends import trace
from fla.ops.attn import parallel_attn
from tests.modules.test_operators import CASES, inputs_of
from tests.ops.attn.attention import inputs as attention_inputs
from tests.ops.delta_rules import FUNCTIONS, case


def calls():
    """Name → what calls the function, and its tensors that need gradients."""
    for name, (function, _, options) in CASES.items():
        inputs = inputs_of(name)
        yield name, lambda f=function, given=inputs, more=options: f(*given, **more), inputs
    for function in FUNCTIONS:
        made = case(function, T=9, K=8, V=8)
        inputs = [x.requires_grad_() for x in made.tensors.values()]
        yield function.__name__, lambda f=function, made=made: made.call(f), inputs
    inputs = {name: x.requires_grad_() for name, x in attention_inputs(dtype=torch.float32, value_dim=8).items()}
    yield 'parallel_attn', lambda: parallel_attn(**inputs), [*inputs.values()]


def main(path: str) -> None:
    found = {}
    for name, call, inputs in calls():
        torch.manual_seed(0)
        with trace() as traced:
            results = call()
        results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        total = sum((x.float() * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in results if x.requires_grad)
        gradients = torch.autograd.grad(total, wanted) if wanted else ()
        found[name] = sorted({one.backend for one in traced}), [x.detach() for x in (*results, *gradients)]
    torch.save(found, path)


if __name__ == '__main__':
    main(sys.argv[1])
