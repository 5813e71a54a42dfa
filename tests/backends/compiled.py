"""Compiled callers of toy operations, compared with eager ones."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fla.backends import default_dispatcher, use_backend
from tests.backends.toy import Toy

Q = torch.zeros(2, 8)
SHORT, LONG = torch.zeros(2, 32, 8), torch.zeros(2, 64, 8)


class Compiled:
    """A compiled function; a call returns the name of the backend that ran, and `frames` counts compilations."""

    def __init__(self, toy, function=None, backend='eager', fullgraph=True, **options):
        torch._dynamo.reset()
        self.toy, self.function = toy, function or (lambda *args, **kwargs: toy.f(*args, **kwargs) + 0)
        self.counter = CompileCounterWithBackend(backend)
        self.compiled = torch.compile(self.function, backend=self.counter, fullgraph=fullgraph, **options)

    @property
    def frames(self):
        return self.counter.frame_count

    def __call__(self, *args, **kwargs):
        args = args or (Q, Q)
        return self._names(self.compiled(*args, **kwargs))

    def eager(self, *args, **kwargs):
        return self._names(self.function(*(args or (Q, Q)), **kwargs))

    def agrees(self, *args, **kwargs):
        """Returns the backend that compiled and eager code both select. Compiled runs first, so that eager warms
        nothing up."""
        compiled = self(*args, **kwargs)
        assert compiled == self.eager(*args, **kwargs)
        return compiled

    def _names(self, result):
        if isinstance(result, (tuple, list)):
            return [self.toy.name_of(part) for part in result]
        return self.toy.name_of(result)


def two():
    """Returns a toy whose backend `a` is preferred to `b`."""
    toy = Toy()
    toy.add('a', priority=1)
    toy.add('b', priority=2)
    return toy


def toggled():
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A')
    return toy


def inside_plain(toy, q):
    with use_backend('b', op=toy.op):
        inside = toy.f(q, q)
    return toy.f(q, q), inside


def nothing_is_left():
    """Whether no scope, real or virtual, has outlived its block."""
    dispatcher = default_dispatcher()
    return not dispatcher.control.now.scopes and not dispatcher.scopes_in_trace.layers
