"""Per-call dispatch of operations to backends.

A call of a function decorated with `@dispatch('<operation>')` selects a backend:
    1. order: the highest policy layer that names an order (scope, code, environment, file), else priority; `default` has
       priority 100, a `reference` comes after it;
    2. available: package, version, platform and device fit; decided when a plan is made;
    3. enabled: no filter and no toggle excludes it;
    4. able: the declared facts, the parameters of its method, and `<fn>_verifier` accept the call;
    5. preferred: `<fn>_prefers` may put it behind the others.
The first remaining candidate runs. If none remains, `NoBackendError` lists every candidate with its reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fla.backends.backend.base import BaseBackend, Verdict
from fla.backends.backend.triton import runs_on_triton
from fla.backends.core.errors import DispatchError, UnknownNameError
from fla.backends.core.logs import set_threshold as _set_threshold
from fla.backends.core.tensors import check_tensors
from fla.backends.fallback.breaker import Breaker, BreakerListener, Health
from fla.backends.observe import describe as _describe
from fla.backends.observe.telemetry import telemetry
from fla.backends.observe.trace import environment_trace, trace
from fla.backends.plan.decision import Decision, NoBackendError
from fla.backends.policy.policy import Policy, Rule
from fla.backends.registry.discovery import Plugin
from fla.backends.runtime.checkpoint import checkpoint_contexts
from fla.backends.runtime.decorator import dispatch
from fla.backends.runtime.dispatcher import (
    _OPERATION_BACKEND_MODULES,
    BackendRegistry,
    Dispatcher,
    default_dispatcher,
    owner_of,
    replan_everything,
)
from fla.backends.runtime.explain import explain
from fla.backends.runtime.freeze import freeze_dispatch, manifest, require_manifest, thaw_dispatch
from fla.backends.runtime.scopes import (
    allow_backends,
    deny_backends,
    on_error,
    policy_context,
    prefer_backend,
    strict_mode,
    use_backend,
)

if TYPE_CHECKING:
    from fla.backends.policy.version import PolicyVersion
    from fla.backends.policy_files import watch_policy
    from fla.backends.tuning import measure

# Imported lazily: together they would take a fifth of this package's import time.
_LAZY = {'measure': 'tuning', 'watch_policy': 'policy_files'}


def _in(room: str) -> Any:
    return importlib.import_module(f'{__name__}.{room}')


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    found = globals()[name] = getattr(_in(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


# the runtime uses these higher rooms, but may not import them
Dispatcher.policy_reader = staticmethod(lambda: _in('policy_files.load'))
Dispatcher.environment_recorder = staticmethod(environment_trace)


def set_policy(policy: Policy, dispatcher: Dispatcher | None = None) -> Policy | None:
    """Set the policy of the code layer for the whole process; returns the one that it replaces."""
    return owner_of(dispatcher).policies.set_policy(policy)


def get_policy(dispatcher: Dispatcher | None = None) -> Policy | None:
    """The policy of the code layer, or None."""
    return owner_of(dispatcher).policies.get_policy()


def reset_policy(dispatcher: Dispatcher | None = None) -> None:
    """Remove the policy of the code layer."""
    owner_of(dispatcher).policies.reset_policy()


def load_policy(path: str | os.PathLike[str], dispatcher: Dispatcher | None = None) -> PolicyVersion:
    """Put a policy file in force, in place of the former one. A bad file raises PolicyFileError and changes nothing."""
    found: PolicyVersion = _in('policy_files.load').load_policy(path, owner_of(dispatcher))
    return found


def refresh(dispatcher: Dispatcher | None = None) -> None:
    """Read again: packages, devices, policy variables, backends packages that failed to import."""
    owner_of(dispatcher).refresh()


def reset(dispatcher: Dispatcher | None = None) -> None:
    """Return to the state of a fresh process, for tests."""
    owner_of(dispatcher).reset()


def plugins(dispatcher: Dispatcher | None = None) -> tuple[Plugin, ...]:
    """The plugins, with version and error."""
    return owner_of(dispatcher).plugins()


def validate(dispatcher: Dispatcher | None = None) -> list[str]:
    """Problems found without a call: unknown names, verifiers without a method, failed plugins and packages."""
    return _describe.problems(owner_of(dispatcher))


def describe(operation: str | None = None, dispatcher: Dispatcher | None = None) -> str:
    """A table of functions and their candidates, for one operation or all."""
    return _describe.describe(owner_of(dispatcher), operation)


def call_op(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a dispatched function by name, as in `call_op('kda.chunk_kda', q, k, v, g, beta)`."""
    return default_dispatcher().catalogue.named(name)(*args, **kwargs)


def resolve_op(name: str, /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The callable that a call would run, by the function's name; without arguments, the dispatched function itself."""
    function = default_dispatcher().catalogue.named(name)
    if not (args or kwargs):
        return function
    found: Callable[..., Any] = function.resolve(*args, **kwargs)  # type: ignore[attr-defined]
    return found


def health(dispatcher: Dispatcher | None = None) -> dict[tuple[str, str], Health]:
    """('operation.function', backend) → state of its circuit breaker."""
    return owner_of(dispatcher).breakers.health()


def breaker(function: str | Callable[..., Any], backend: str, dispatcher: Dispatcher | None = None) -> Breaker:
    """The circuit breaker of a backend for a function: `.state`, `.reset()`, `.force_open()`, `.force_close()`."""
    return owner_of(dispatcher).breaker(function, backend)


def add_breaker_listener(listener: BreakerListener, dispatcher: Dispatcher | None = None) -> Callable[[], None]:
    """Call `listener(event)` with a `BreakerEvent` after every change of a breaker's state, in the call's thread and outside
    every lock. Returns a function that removes the listener. An exception from a listener is logged."""
    return owner_of(dispatcher).breakers.add_listener(listener)


def set_log_level(level: int | str) -> None:
    """Set the level of the logger `fla`, which all namespaces share: DEBUG, INFO, WARNING, ERROR or CRITICAL, or a number.
    Every function plans again, because a plan contains only the logging of its level."""
    _set_threshold(level)
    replan_everything()


__all__ = [
    '_OPERATION_BACKEND_MODULES',
    'BackendRegistry',
    'BaseBackend',
    'Decision',
    'DispatchError',
    'Dispatcher',
    'NoBackendError',
    'Policy',
    'Rule',
    'UnknownNameError',
    'Verdict',
    'add_breaker_listener',
    'allow_backends',
    'breaker',
    'call_op',
    'check_tensors',
    'checkpoint_contexts',
    'default_dispatcher',
    'deny_backends',
    'describe',
    'dispatch',
    'explain',
    'freeze_dispatch',
    'get_policy',
    'health',
    'load_policy',
    'manifest',
    'measure',
    'on_error',
    'plugins',
    'policy_context',
    'prefer_backend',
    'refresh',
    'require_manifest',
    'reset',
    'reset_policy',
    'resolve_op',
    'runs_on_triton',
    'set_log_level',
    'set_policy',
    'strict_mode',
    'telemetry',
    'thaw_dispatch',
    'trace',
    'use_backend',
    'validate',
    'watch_policy',
]
