"""`@dispatch('<operation>')`."""

from __future__ import annotations

import inspect
import keyword
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from fla.backends.backend.base import DEFAULT_IMPLEMENTATION_PRIORITY, BackendMeta, BaseBackend
from fla.backends.backend.declaration import check_facts
from fla.backends.core.signature import Signature, location
from fla.backends.core.spec import FunctionSpec
from fla.backends.plan.decision import Decision
from fla.backends.policy.policy import Policy
from fla.backends.runtime.dispatcher import Dispatcher, owner_of
from fla.backends.runtime.entry import Entry
from fla.backends.runtime.function import attach
from fla.backends.runtime.view import BackendsView

P = ParamSpec('P')
R = TypeVar('R', covariant=True)


class Dispatched(Protocol[P, R]):
    """A dispatched function, for type checkers: the function itself with a few attributes."""

    __name__: str
    __qualname__: str
    __module__: str
    __wrapped__: Callable[..., Any]
    backends: BackendsView

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Decision:
        """Which backend this call would run and why, without running it; see `fla.backends.explain`."""

    def resolve(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        """The callable that this call would run, for loops that repeat a call."""

    def bind(self, backend: str | None = None, *, policy: Policy | None = None, **fields: Any) -> Dispatched[P, R]:
        """A function of the same signature with a policy of its own, above every scope."""


Facts = type[BaseBackend]


def dispatch(
    operation: str,
    *,
    check: Callable[..., Any] | None = None,
    default_verifier: Callable[..., Any] | Facts | Sequence[Callable[..., Any] | Facts] | None = None,
    mutates: Sequence[str] = (),
    dispatcher: Dispatcher | None = None,
) -> Callable[[Callable[P, R]], Dispatched[P, R]]:
    """Make a function the default implementation of an operation's function of that name.

    The decorated function keeps its signature, name and documentation. A call runs the operation's first backend that is
    available, enabled and accepts the call; the function's own body is a candidate too, named `default`.

    Args:
        operation: such as 'kda'. Its backends are imported from `<namespace>.<operation>.backends` at the first call.
        check: function of any of the parameters, called before a backend is selected; raises for bad calls. It may also name
            `check_values`, which is True under FLA_CHECK_VALUES=1.
        default_verifier: requirements of the default: a verifier function of any of the parameters, a `BaseBackend` class
            that only declares facts (devices, dtypes, package_name, …) such as `runs_on_triton`, or both in a sequence.
        mutates: parameters that the operation changes in place. Calls of such an operation are never retried.
        dispatcher: the namespace; default: fla's own.

    Returns:
        A decorator. With FLA_DISABLE_BACKEND_DISPATCH=1 at import it returns the undecorated function.

    Raises:
        TypeError, ValueError: for an invalid declaration.
    """
    owner = owner_of(dispatcher)
    if not getattr(sys, '_is_gil_enabled', lambda: True)():
        raise RuntimeError(
            '@dispatch replaces the code of running functions, which has not been tested without the GIL: '
            'run Python with PYTHON_GIL=1, or an ordinary build'
        )
    if not isinstance(operation, str) or not all(part.isidentifier() for part in operation.split('.')):
        raise TypeError(f"@dispatch needs the name of an operation, as in @dispatch('kda'), got {operation!r}")

    if check is not None and (isinstance(check, type) or not callable(check)):
        raise TypeError(f'check must be a function of any of the parameters, got {check!r}')
    if isinstance(mutates, str) or not all(isinstance(parameter, str) for parameter in mutates):
        raise TypeError(f"mutates must be a tuple of parameter names such as ('cache',), got {mutates!r}")

    def decorate(function: Callable[P, R]) -> Dispatched[P, R]:
        name = _name_of(function)
        signature = Signature(function)
        unknown = [parameter for parameter in mutates if parameter not in signature.names]
        if unknown:
            raise ValueError(f'mutates names {unknown}; {name} has {", ".join(signature.names)}')
        facts, verifier = _split(default_verifier)
        spec = FunctionSpec(operation, name, signature, function, check, verifier, tuple(mutates), location(function))
        entry = Entry(owner, spec, _default_backend(facts))
        if owner.baseline:
            # nothing is dispatched, but the attributes of a dispatched function exist
            attach(function, entry)
            function.bind = _baseline_bind(owner, function)  # type: ignore[attr-defined]
            function.resolve = lambda *_, **__: function  # type: ignore[attr-defined]
            owner.catalogue.plain[spec.key] = function
            owner.catalogue.register_function(entry)
            return cast('Dispatched[P, R]', function)
        owner.catalogue.add(entry, public=True)
        return cast('Dispatched[P, R]', entry.wrapper)

    return decorate


def _baseline_bind(owner: Dispatcher, function: Callable[P, R]) -> Callable[..., Callable[P, R]]:
    """`bind()` in a baseline process: model code that binds runs the undecorated function."""

    def bind(*_: Any, **__: Any) -> Callable[P, R]:
        owner.policies.warn_in_baseline('bind()')
        return function

    return bind


def _name_of(function: Any) -> str:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f'@dispatch goes under @{type(function).__name__}: it decorates the function itself')
    if isinstance(function, (type, partial)) or not callable(function) or not hasattr(function, '__name__'):
        raise TypeError(f'@dispatch decorates a function, got {function!r}')
    if not hasattr(function, '__dict__'):
        raise TypeError(f'@dispatch decorates a Python function, got {function!r}: write one around it')
    name = str(function.__name__)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise TypeError(f'@dispatch needs a function with a name that backends can use, got {name!r}')
    if hasattr(BaseBackend, name) or name.endswith(('_verifier', '_prefers')):
        raise ValueError(f'{name!r} means something else on a backend class; rename the function')
    try:
        inspect.signature(function)
    except ValueError as error:
        raise TypeError(f'@dispatch needs a function with a signature, {name} has none: {error}') from None
    return name


def _split(given: Any) -> tuple[Facts | None, Callable[..., Any] | None]:
    items = [item for item in (given if isinstance(given, (list, tuple)) else [given]) if item is not None]
    facts = [item for item in items if isinstance(item, type) and issubclass(item, BaseBackend)]
    verifiers = [item for item in items if item not in facts]
    for item in verifiers:
        if isinstance(item, BaseBackend):
            raise TypeError(f'default_verifier takes the class of facts, {type(item).__qualname__}, not an instance')
        if not callable(item):
            raise TypeError(f'default_verifier takes a verifier function or a BaseBackend class of facts, got {item!r}')
    for what, found in (('class of facts', facts), ('verifier function', verifiers)):
        if len(found) > 1:
            raise TypeError(f'default_verifier takes at most one {what}')
    return next(iter(facts), None), next(iter(verifiers), None)


def _default_backend(facts: Facts | None) -> BaseBackend:
    base = facts if facts is not None else BaseBackend
    fields = {
        'backend_type': 'default',
        'kind': 'default',
        'priority': DEFAULT_IMPLEMENTATION_PRIORITY,
        'env_var': None,
    }
    made: BaseBackend = BackendMeta('Default', (base,), fields)()
    check_facts(made, besides=('backend_type', 'kind', 'env_var'))
    return made
