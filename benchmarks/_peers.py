"""Peers for `dispatch_overhead.py`: other libraries and idioms that put a layer between a caller and a function."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from _cases import CHUNK, OUT, SMALL, Case, small_function, wide_function
from torch import Tensor

Function = Callable[..., Any]


def exact(default: Function) -> Function:
    """Returns a pass-through with the signature of `default`: the minimum for any wrapper in Python."""
    names = ', '.join(inspect.signature(default).parameters)
    namespace: dict[str, Any] = {'target': default}
    exec(f'def wrapper({names}): return target({names})', namespace)
    namespace['wrapper'].__defaults__ = default.__defaults__
    return namespace['wrapper']


def anything(default: Function) -> Function:
    @functools.wraps(default)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return default(*args, **kwargs)

    return wrapper


def by_singledispatch(default: Function, backend: Function) -> Function:
    generic = functools.singledispatch(default)
    generic.register(Tensor, backend)
    return generic


def by_plum(backend: Function) -> Function:
    """Returns a plum function that dispatches on the tensors; plum passes keywords on and does not dispatch on them."""
    import plum

    def wide(q, k, v, g, beta, **options):
        return backend(q, k, v, g, beta, **options)

    def small(x, eps, output_dtype):
        return backend(x, eps, output_dtype)

    method = small if len(inspect.signature(backend).parameters) == 3 else wide
    # no return annotation: with one, plum converts the result, which takes 4 us a call
    tensors = [name for name in inspect.signature(method).parameters if name in ('q', 'k', 'v', 'g', 'beta', 'x')]
    method.__annotations__ = dict.fromkeys(tensors, Tensor)
    return plum.Dispatcher()(method)


def by_networkx(default: Function, name: str) -> Function:
    import networkx

    return networkx._dispatchable(graphs=None, name=f'fla_bench_{name}')(default)


SCHEMAS = {
    'wide': '(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, Tensor? initial_state=None, '
    'bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, '
    'bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, bool safe_gate=False, '
    'float? lower_bound=None, bool state_v_first=False, Tensor? cu_seqlens=None) -> Tensor',
    'small': '(Tensor x, float eps=1e-05, ScalarType? output_dtype=None) -> Tensor',
}

library = torch.library.Library('fla_bench', 'FRAGMENT')  # must live as long as its operators are called


def by_library(backend: Function, name: str) -> Function:
    library.define(f'{name}_impl{SCHEMAS[name]}')
    library.impl(f'{name}_impl', backend, 'CPU')
    return getattr(torch.ops.fla_bench, f'{name}_impl').default


def by_custom_op(backend: Function, name: str) -> Function:
    return torch.library.custom_op(f'fla_bench::{name}_custom', backend, mutates_args=(), schema=SCHEMAS[name])


def peer_cases(skipped: list[str]) -> list[Case]:
    """Returns the peers on both operations; appends to `skipped` those that are not installed."""
    cases = []
    for name, call, function in (('wide', CHUNK, wide_function), ('small', SMALL, small_function)):
        prefix, base = ('', 'direct') if name == 'wide' else ('small op: ', 'direct small')
        default, backend = function(OUT[0]), function(OUT[1])
        peers: list[tuple[str, str | None, int, Callable[[], Function]]] = [
            ('pass-through, exact signature', None, 0, functools.partial(exact, default)),
            ('pass-through, *args, **kwargs', None, 0, functools.partial(anything, default)),
            ('functools.singledispatch', None, 1, functools.partial(by_singledispatch, default, backend)),
            ('plum', 'plum', 1, functools.partial(by_plum, backend)),
            ('networkx, no backend installed', 'networkx', 0, functools.partial(by_networkx, default, name)),
            ('torch Library.define + impl', None, 1, functools.partial(by_library, backend, name)),
            ('torch.library.custom_op', None, 1, functools.partial(by_custom_op, backend, name)),
        ]
        for peer, package, serves, make in peers:
            if package and importlib.util.find_spec(package) is None:
                skipped.append(f'{prefix}{peer}: {package} is not installed')
            else:
                cases.append(Case(prefix + peer, call, make(), serves=serves, base=base))
    return cases
