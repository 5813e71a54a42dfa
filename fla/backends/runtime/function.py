"""The function object that users hold: its namespace, its cold code, and how source becomes code beside it."""

from __future__ import annotations

import inspect
import linecache
import weakref
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad
import torch.autograd.profiler

from fla.backends.core import tensors
from fla.backends.core.dynamo import trace_anew, while_tracing
from fla.backends.core.errors import BackendBugError, NoBackendError
from fla.backends.core.signature import location
from fla.backends.policy.precedence import ResolvedPolicy
from fla.utils.env import LIVE

if TYPE_CHECKING:
    from fla.backends.runtime.entry import Entry


def namespace_of(entry: Entry) -> dict[str, Any]:
    """Globals of the generated code. Without `__name__`: Dynamo would look its globals up in the module of that name."""
    return {
        '_d_BaseException': BaseException,
        '_d_Bug': BackendBugError,
        '_d_Exception': Exception,
        '_d_NoBackend': NoBackendError,
        '_d_NoTensor': tensors.NO_TENSOR_ARGUMENT,
        '_d_Tensor': torch.Tensor,
        '_d_any_grad': tensors.any_requires_grad,
        '_d_box': entry._boxed.box,
        '_d_check': entry.check,
        '_d_classify': tensors.classify,
        '_d_cold': while_tracing(entry._plan_again),
        '_d_decide': tensors.decide,
        '_d_dict': dict,
        '_d_dyn': torch.compiler.is_dynamo_compiling,
        '_d_env': LIVE,
        '_d_first_tensor': tensors.first_tensor,
        '_d_forward_ad': torch.autograd.forward_ad,
        '_d_getattr': getattr,
        '_d_grad_enabled': torch.is_grad_enabled,
        '_d_has_override': torch.overrides.has_torch_function,
        '_d_in_func': tensors.in_func_transform,
        '_d_len': len,
        '_d_need': while_tracing(entry._need_platform),
        '_d_none': entry._raise_no_backend,
        '_d_offer': entry._offer,
        '_d_platform': tensors.platform_of,
        '_d_profiler': torch.autograd.profiler,
        '_d_range': torch.autograd.profiler.record_function,
        '_d_refuse': tensors.refuse,
        '_d_restart': while_tracing(trace_anew),
        '_d_same': tensors.same,
        '_d_select': while_tracing(entry._boxed.select),
        '_d_type': type,
        '_d_virtual': entry.dispatcher.virtual,
    }


def make_wrapper(entry: Entry) -> FunctionType:
    """The cold function, which looks like the one that was decorated."""
    forward = entry.signature.forward_all()
    head = entry.signature.header(entry.name)
    source = f'{head}\n    if _d_cold("") and _d_dyn(): _d_restart()\n    return _d_self({forward})\n'
    wrapper = compile_source(entry, source, f'cold {entry.serial()}')
    function = entry.function
    wrapper.__defaults__, wrapper.__kwdefaults__ = entry.signature.defaults()
    wrapper.__module__ = function.__module__
    wrapper.__qualname__ = getattr(function, '__qualname__', entry.name)
    wrapper.__doc__ = function.__doc__
    wrapper.__annotations__ = dict(getattr(function, '__annotations__', {}))
    # What functools.wraps would copy, without Dynamo's marks: with them, torch < 2.11 unwraps past the dispatcher.
    wrapper.__dict__.update({k: v for k, v in vars(function).items() if not k.startswith('_torchdynamo')})
    wrapper.__wrapped__ = function  # type: ignore[attr-defined]
    attach(wrapper, entry)
    return wrapper


def compile_source(entry: Entry, source: str, what: str) -> FunctionType:
    """Source to a function in the namespace. Its lines are in linecache, so that tracebacks and Dynamo show them."""
    filename = f'<fla dispatch {entry.key} {what}>'
    code = compile(source, filename, 'exec')
    made: dict[str, Any] = {}
    exec(code, entry._namespace, made)
    function: FunctionType = made[entry.name]
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
    return function


def drop_with(entry: Entry, code: CodeType, *names: str) -> None:
    """Names of the namespace go when the code that uses them does. The finalizer must not hold the namespace: that would
    keep this entry alive for ever."""
    weakref.finalize(code, _drop, weakref.ref(entry), names).atexit = False


def check_call(entry: Entry) -> str | None:
    """How `check` is called. It may also name `check_values`, which is True under FLA_CHECK_VALUES."""
    if entry.check is None:
        return None
    extra = {'check_values'} - set(entry.signature.names)
    call = entry.signature.call(entry.check)
    bad = [name for name in call.unfillable if name not in extra]
    if bad or (unknown := [name for name in call.unknown if name not in extra]):
        names = ', '.join(map(repr, bad or unknown))
        raise TypeError(
            f'check {location(entry.check)} names {names}, which {entry.name} ({entry.place}) does not have; '
            f'it may name {", ".join(entry.signature.names)}, check_values'
        )
    return call.arguments


def check_what_default_needs(entry: Entry) -> None:
    """Raise for one that names what the function does not have."""
    if entry.default_verifier is not None:
        unknown = entry.signature.call(entry.default_verifier).unknown
        if unknown:
            raise TypeError(
                f'default_verifier {location(entry.default_verifier)} names {", ".join(map(repr, unknown))}, which '
                f'{entry.name} ({entry.place}) does not have; it may name {", ".join(entry.signature.names)}'
            )


def check_source(entry: Entry, policy: ResolvedPolicy) -> str | None:
    """The arguments that `check` is called with under a policy."""
    if entry._check_call is None or entry.check is None:
        return None
    if 'check_values' in entry.signature.names or 'check_values' not in inspect.signature(entry.check).parameters:
        return entry._check_call
    return f'{entry._check_call}{", " if entry._check_call else ""}check_values={policy.check_values}'


def _drop(owner: weakref.ref[Entry], names: tuple[str, ...]) -> None:
    entry = owner()
    for name in names if entry is not None else ():
        entry._namespace.pop(name, None)  # type: ignore[union-attr]


def attach(function: Any, entry: Entry) -> None:
    """Give a function the attributes by which users and tools look inside."""
    from fla.backends.observe.describe import BackendsView

    function.backends = BackendsView(entry)
    function.bind = entry.bind
    function.resolve = entry.resolve
    function.explain = entry.explain
    function.__fla_entry__ = entry
