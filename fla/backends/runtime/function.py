"""The function object that users hold: its globals, its cold code, and the compilation of generated source."""

from __future__ import annotations

import linecache
import weakref
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.autograd.profiler

from fla.backends.core import tensors
from fla.backends.core.dynamo import trace_anew, while_tracing
from fla.backends.core.errors import BackendBugError
from fla.backends.core.signature import location
from fla.backends.core.spec import FunctionSpec
from fla.backends.plan.decision import NoBackendError
from fla.backends.policy.precedence import ResolvedPolicy
from fla.backends.runtime.dispatcher import LiveFunction
from fla.backends.runtime.view import BackendsView
from fla.utils.env import LIVE

# Globals of generated code. No `__name__`: Dynamo would look the globals up in the module of that name.
_GLOBALS: dict[str, Any] = {
    '_d_BaseException': BaseException,
    '_d_Bug': BackendBugError,
    '_d_Exception': Exception,
    '_d_NoBackend': NoBackendError,
    '_d_NoTensor': tensors.NO_TENSOR_ARGUMENT,
    '_d_Tensor': torch.Tensor,
    '_d_any_grad': tensors.any_requires_grad,
    '_d_classify': tensors.classify,
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
    '_d_platform': tensors.platform_of,
    '_d_profiler': torch.autograd.profiler,
    '_d_range': torch.autograd.profiler.record_function,
    '_d_refuse': tensors.refuse,
    '_d_restart': while_tracing(trace_anew),
    '_d_same': tensors.same,
    '_d_type': type,
}


class Namespace:
    """Globals of one function's generated code, and the compilation of source in them.

    Attributes:
        globals: a plain dict, since Dynamo guards the length of a subclass.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self.spec = spec
        self.globals = {**_GLOBALS, '_d_check': spec.check}

    def compile(self, source: str, what: str) -> FunctionType:
        """Source to a function with the public function's defaults. Its lines are in linecache for tracebacks and Dynamo."""
        filename = f'<fla dispatch {self.spec.key} {what}>'
        made: dict[str, Any] = {}
        exec(compile(source, filename, 'exec'), self.globals, made)
        function: FunctionType = made[self.spec.name]
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
        function.__defaults__, function.__kwdefaults__ = self.spec.signature.defaults()
        return function

    def drop_with(self, code: CodeType, *names: str) -> None:
        """Drop globals when the code that uses them is freed. The finalizer holds this namespace weakly: otherwise the
        namespace would never be freed."""
        weakref.finalize(code, _drop, weakref.ref(self), names).atexit = False


def _drop(owner: weakref.ref[Namespace], names: tuple[str, ...]) -> None:
    namespace = owner()
    for name in names if namespace is not None else ():
        namespace.globals.pop(name, None)  # type: ignore[union-attr]


def make_wrapper(namespace: Namespace, serial: str) -> FunctionType:
    """The public function with cold code and the attributes of the decorated function."""
    spec = namespace.spec
    signature, function = spec.signature, spec.default
    source = f'{signature.header(spec.name)}\n    if _d_cold("") and _d_dyn(): _d_restart()\n'
    source += f'    return _d_self({signature.forward_all()})\n'
    wrapper = namespace.compile(source, f'cold {serial}')
    wrapper.__module__ = function.__module__
    wrapper.__qualname__ = getattr(function, '__qualname__', spec.name)
    wrapper.__doc__ = function.__doc__
    wrapper.__annotations__ = dict(getattr(function, '__annotations__', {}))
    # as functools.wraps does, without Dynamo's marks: with them, torch < 2.11 unwraps past the dispatcher
    wrapper.__dict__.update({k: v for k, v in vars(function).items() if not k.startswith('_torchdynamo')})
    wrapper.__wrapped__ = function  # type: ignore[attr-defined]
    return wrapper


def attach(function: Any, entry: LiveFunction) -> None:
    """Give a function the attributes by which users and tools inspect it."""
    function.backends = BackendsView(entry)
    function.bind, function.resolve, function.explain = entry.bind, entry.resolve, entry.explain
    function.__fla_entry__ = entry


def check_parameters(spec: FunctionSpec) -> None:
    """Raises TypeError for a check or default verifier that names a parameter which the function does not have."""
    for what, method, extra in (('check', spec.check, ['check_values']), ('default_verifier', spec.default_verifier, [])):
        unknown = [] if method is None else [n for n in spec.signature.call(method).unknown if n not in extra]
        if method is not None and unknown:
            raise TypeError(
                f'{what} {location(method)} names {", ".join(map(repr, unknown))}, which {spec.name} ({spec.place}) '
                f'does not have; it may name {", ".join([*spec.signature.names, *extra])}'
            )


def check_source(spec: FunctionSpec, policy: ResolvedPolicy) -> str | None:
    """The arguments that `check` is called with under a policy; None without a check."""
    if spec.check is None:
        return None
    call = spec.signature.call(spec.check)
    values = f'check_values={policy.check_values}' if call.unknown else ''  # the only such name that it may have
    return ', '.join(filter(None, (call.arguments, values)))
