"""Changes under a compiled caller for `compile_breaks.py`, and the backend that must serve the call after each."""

from __future__ import annotations

import contextlib
import itertools
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.backends import BackendRegistry, BaseBackend, dispatch, use_backend

Op = Callable[..., Tensor]
RESULTS = {'default': 0, 'first': 1, 'second': 2}
MIN_T = 64


def undispatched(q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
    return q.new_full((), 0)


class First(BaseBackend):
    backend_type = 'first'
    priority = 1

    def chunk_op(self, q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        return q.new_full((), 1)

    def chunk_op_verifier(self, q, v, safe_gate):
        if safe_gate:
            return False, 'no safe gate'
        if torch.is_grad_enabled():
            return False, 'inference only'
        if q.dtype is not torch.float32:
            return False, 'float32 only'
        if q.shape[1] < MIN_T or q.shape[-1] != 16 or v.shape[-1] != 16:
            return False, 'T >= 64, K = V = 16'
        return True, None


class Second(BaseBackend):
    backend_type = 'second'
    priority = 2

    def chunk_op(self, q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        return q.new_full((), 2)

    def chunk_op_verifier(self, q):
        return (True, None) if q.dtype is not torch.float64 else (False, 'not in float64')


fresh = itertools.count()


class World:
    """A dispatched operation with two backends, each with its own toggle, for one row of the table."""

    def __init__(self) -> None:
        n = next(fresh)
        self.operation = f'compile_bench_{n}'
        self.registry = BackendRegistry(self.operation)
        self.toggle = f'FLA_COMPILE_BENCH_{n}'
        # new classes, because a step may set an attribute of a class
        self.first = types.new_class('First', (First,), {}, lambda body: body.update(env_var=f'{self.toggle}_FIRST'))()
        self.second = types.new_class('Second', (Second,), {}, lambda body: body.update(env_var=f'{self.toggle}_SECOND'))()
        self.handle = self.registry.register(self.first)
        self.registry.register(self.second)

        def chunk_op(q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
            return q.new_full((), 0)

        self.op: Op = dispatch(self.operation)(chunk_op)


def inputs(T: int = 128, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    x = torch.zeros(1, T, 2, 16, dtype=dtype)
    return {'q': x, 'k': x.clone(), 'v': x.clone(), 'g': x.clone(), 'beta': torch.zeros(1, T, 2, dtype=dtype)}


@dataclass(frozen=True)
class Step:
    """One call of the compiled caller.

    Attributes:
        serves: implementation that must serve the call: compiled and eager could agree on a wrong one.
        during: context of the call.
        inputs: arguments of the call; None for the default ones.
    """

    serves: str
    during: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    inputs: dict[str, Any] | None = None


def alternate(times: int, change: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Step]:
    """Returns steps alternately without and with the change, under which the second backend serves."""
    return [Step('second', change) if i % 2 else Step('first') for i in range(times)]


@contextlib.contextmanager
def env(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def priority(backend: BaseBackend, value: int) -> Iterator[None]:
    old = type(backend).priority
    type(backend).priority = value
    try:
        yield
    finally:
        type(backend).priority = old


@contextlib.contextmanager
def without_first(world: World) -> Iterator[None]:
    world.handle.remove()
    try:
        yield
    finally:
        world.handle = world.registry.register(world.first)


def toggled(world: World) -> list[Step]:
    on, off = (lambda: env(world.first.env_var, '1')), (lambda: env(world.first.env_var, '0'))
    return [Step('second', off) if i % 2 else Step('first', on) for i in range(12)]


def set_and_unset(world: World) -> list[Step]:
    return alternate(4, lambda: env(world.first.env_var, '0'))


def scoped(world: World) -> list[Step]:
    return alternate(12, lambda: use_backend('second', op=world.operation))


def unrelated(world: World) -> list[Step]:
    return [Step('first', lambda i=i: env('COMPILE_BENCH_UNRELATED', str(i))) for i in range(6)]


def dtypes(world: World) -> list[Step]:
    first, second = inputs(), inputs(dtype=torch.bfloat16)
    return [Step('first', inputs=first), Step('second', inputs=second)] * 2


def lengths(world: World) -> list[Step]:
    return [Step('first' if T >= MIN_T else 'second', inputs=inputs(T)) for T in (128, 63, 200, 32, 64, 100)]


def flags(world: World) -> list[Step]:
    return [Step('first', inputs=inputs()), Step('second', inputs={**inputs(), 'safe_gate': True})] * 2


def grad_mode(world: World) -> list[Step]:
    return alternate(4, torch.enable_grad)


def priorities(world: World) -> list[Step]:
    return alternate(4, lambda: priority(world.second, 0))


def registrations(world: World) -> list[Step]:
    return alternate(4, lambda: without_first(world))


# Name of a change → (its steps, the compilations they may cost in all; None where no number is promised).
CHANGES: dict[str, tuple[Callable[[World], list[Step]], int | None]] = {
    'toggle flips, 12x': (toggled, 2),
    'toggle unset and set, 4x': (set_and_unset, 2),
    'policy scope (use_backend) flips, 12x': (scoped, 2),
    'unrelated variable, 6x': (unrelated, 1),
    'dtype, 4x': (dtypes, 2),
    'flag, 4x': (flags, 2),
    'grad mode, 4x': (grad_mode, 2),
    'T across a verifier boundary, 6x': (lengths, None),
    'priority, 4x': (priorities, None),
    'backend removed and registered, 4x': (registrations, None),
}
