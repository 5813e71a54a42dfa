"""Policy scopes: `with use_backend('tilelang', op='kda'): ...`

A scope is process-wide, because the backward of a CUDA graph runs on another thread and because a ContextVar breaks Dynamo.
Each scope pushes a token and its exit removes that token, so that interleaved threads and generators cannot restore a stale
policy. Two models in one process that need different policies use `chunk_kda.bind(...)`.

A scope entered in a region that Dynamo traces changes nothing in the process: it adds its policy to an attribute that Dynamo
tracks, and undoes when a trace restarts or is given up. If a graph break separates entry from exit, Dynamo hands the
attribute to eager code. The generated code therefore always reads the attribute first, and later scopes go on top of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from fla.backends.core.dynamo import never_a_frame
from fla.backends.policy.on_error import ON_ERROR, BreakerSettings, as_settings
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer
from fla.backends.runtime.dispatcher import Dispatcher, owner_of

_tokens = itertools.count()


class Scope:
    """A policy for a `with` block. It can be entered again, also while it is in force."""

    def __init__(self, verb: str, spec: tuple[Any, ...], dispatcher: Dispatcher) -> None:
        self.verb, self.spec, self.dispatcher = verb, spec, dispatcher
        self.entered: list[int | None] = []

    def __enter__(self) -> Scope:
        virtual = self.dispatcher.scopes_in_trace
        traced = torch.compiler.is_dynamo_compiling()
        if traced or virtual.layers:
            if not traced:
                self._check()
            virtual.layers = (*virtual.layers, self.spec)
            self.entered.append(None)
        else:
            self.entered.append(self._push(self._check()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.entered:
            raise RuntimeError(f'{self.verb} was left without having been entered')
        token = self.entered.pop()
        if token is None:
            virtual = self.dispatcher.scopes_in_trace
            virtual.layers = virtual.layers[:-1]
        else:
            self.dispatcher.policies.pop_scope(token)

    def _check(self) -> Policy:
        policies, policy = self.dispatcher.policies, Policy(*self.spec)
        if policy.use:
            policies.refuse_in_baseline(self.verb)
        policies.warn_in_baseline(self.verb)
        policies.refuse_if_frozen(f'enter {self.verb}')
        policies.check_scope(policy)
        return policy

    def _push(self, policy: Policy) -> int:
        frame = sys._getframe(2)
        source = f'{self.verb} at {frame.f_code.co_filename}:{frame.f_lineno}'
        token = new_token()
        self.dispatcher.policies.push_scope(token, Layer(policy, source, of_call=True), verb=self.verb)
        return token


# as frames of their own, Dynamo would trace them as part of a compiled region
never_a_frame(Scope.__enter__)
never_a_frame(Scope.__exit__)


def new_token() -> int:
    """A number unique to one scope."""
    return next(_tokens)


def _spec(
    use: tuple[str, ...] = (),
    prefer: tuple[str, ...] = (),
    allow: tuple[str, ...] | None = None,
    deny: tuple[str, ...] = (),
    op: str | None = None,
    strict: bool | None = None,
    on_error: str | None = None,
    breaker: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """`Policy(...).spec` without making a Policy: Dynamo traces this."""
    return (use, prefer, (), allow, deny, op, strict, None, None, on_error, breaker)


def _need(verb: str, names: tuple[str, ...]) -> None:
    if not names:
        raise TypeError(f"{verb} needs at least one backend name, kind, 'vendor:NAME' or 'impl:IMPL_ID'")


def use_backend(*names: str, op: str | None = None, dispatcher: Dispatcher | None = None) -> Scope:
    """Inside the block only these backends may run, in this order; a call that none of them accepts raises.

    Overrides toggles, lists and preferences; `explain` reports it.

    Args:
        *names: backend names, kinds ('vendor', 'native', 'default', 'reference'), 'vendor:NAME' or 'impl:IMPL_ID'.
        op: operation ('kda') or function ('kda.chunk_kda'). None: every function that has such a backend.
        dispatcher: the namespace; default: fla's own.

    Raises:
        UnknownNameError: on entry, for unknown names.
    """
    _need('use_backend()', names)
    return Scope('use_backend()', _spec(use=names, op=op), owner_of(dispatcher))


def prefer_backend(*names: str, op: str | None = None, dispatcher: Dispatcher | None = None) -> Scope:
    """Inside the block these backends come first. Arguments as for `use_backend`."""
    _need('prefer_backend()', names)
    return Scope('prefer_backend()', _spec(prefer=names, op=op), owner_of(dispatcher))


def allow_backends(*names: str, op: str | None = None, dispatcher: Dispatcher | None = None) -> Scope:
    """Inside the block only these backends are allowed; without names, none. Arguments as for `use_backend`."""
    return Scope('allow_backends()', _spec(allow=names, op=op), owner_of(dispatcher))


def deny_backends(*names: str, op: str | None = None, dispatcher: Dispatcher | None = None) -> Scope:
    """Inside the block these backends are not allowed. Arguments as for `use_backend`."""
    _need('deny_backends()', names)
    return Scope('deny_backends()', _spec(deny=names, op=op), owner_of(dispatcher))


def policy_context(policy: Policy, *, dispatcher: Dispatcher | None = None) -> Scope:
    """Inside the block `policy` has precedence over all others."""
    if not isinstance(policy, Policy):
        raise TypeError(f'policy_context() takes a Policy, got {policy!r}')
    return Scope('policy_context()', policy.spec, owner_of(dispatcher))


def strict_mode(on: bool = True, *, op: str | None = None, dispatcher: Dispatcher | None = None) -> Scope:
    """Inside the block backend bugs and preferences that cannot be met raise (with `on=False`, they do not)."""
    return Scope('strict_mode()', _spec(strict=bool(on), op=op), owner_of(dispatcher))


def on_error(
    what: str,
    *,
    op: str | None = None,
    breaker: BreakerSettings | Mapping[str, float] | None = None,
    dispatcher: Dispatcher | None = None,
) -> Scope:
    """Inside the block a failing implementation raises ('raise'), or the next candidate is tried ('fallback').

    A fallback needs an exception that the backend declares in `retryable`; see `fla.backends.fallback` for other conditions.

    Args:
        what: 'raise' or 'fallback'.
        op: operation ('kda') or function ('kda.chunk_kda'). None: all.
        breaker: circuit breaker settings: `BreakerSettings`, or a mapping of its fields. None: those of lower layers.
        dispatcher: the namespace; default: fla's own.

    Raises:
        ValueError: for another word, or invalid settings.
    """
    if what not in ON_ERROR:
        raise ValueError(f"on_error must be 'raise' or 'fallback', got {what!r}")
    settings = as_settings(breaker)
    spec = _spec(on_error=what, breaker=None if settings is None else settings.spec, op=op)
    return Scope('on_error()', spec, owner_of(dispatcher))
