"""The function object that users hold: its globals, its cold code, and how source becomes code beside it."""

from __future__ import annotations

import inspect
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

# Globals of generated code. Without `__name__`: Dynamo would look its globals up in the module of that name.
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
    """Globals of one function's generated code, and how source becomes code in them.

    Attributes:
        globals: a plain dict, since Dynamo guards the length of a subclass.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self.spec = spec
        self.globals = {**_GLOBALS, '_d_check': spec.check}

    def compile(self, source: str, what: str) -> FunctionType:
        """Source to a function. Its lines are in linecache, so that tracebacks and Dynamo show them."""
        filename = f'<fla dispatch {self.spec.key} {what}>'
        code = compile(source, filename, 'exec')
        made: dict[str, Any] = {}
        exec(code, self.globals, made)
        function: FunctionType = made[self.spec.name]
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
        return function

    def compile_whole(self, source: str, what: str) -> FunctionType:
        """`compile`, for a function that is called by itself: with the defaults of the public function."""
        function = self.compile(source, what)
        function.__defaults__, function.__kwdefaults__ = self.spec.signature.defaults()
        return function

    def drop_with(self, code: CodeType, *names: str) -> None:
        """Drop names when the code that uses them goes. The finalizer must not hold the namespace: that would keep it alive
        for ever."""
        weakref.finalize(code, _drop, weakref.ref(self), names).atexit = False


def _drop(owner: weakref.ref[Namespace], names: tuple[str, ...]) -> None:
    namespace = owner()
    for name in names if namespace is not None else ():
        namespace.globals.pop(name, None)  # type: ignore[union-attr]


def make_wrapper(namespace: Namespace, serial: str) -> FunctionType:
    """The cold function, which looks like the one that was decorated."""
    spec = namespace.spec
    signature, function = spec.signature, spec.default
    source = f'{signature.header(spec.name)}\n    if _d_cold("") and _d_dyn(): _d_restart()\n'
    source += f'    return _d_self({signature.forward_all()})\n'
    wrapper = namespace.compile_whole(source, f'cold {serial}')
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
    function.bind = entry.bind
    function.resolve = entry.resolve
    function.explain = entry.explain
    function.__fla_entry__ = entry


def check_call(spec: FunctionSpec) -> str | None:
    """The arguments that `check` is called with, None without a check. It may also name `check_values`, which is True under
    FLA_CHECK_VALUES.

    Raises:
        TypeError: for a check that names a parameter which the function does not have.
    """
    if spec.check is None:
        return None
    extra = {'check_values'} - set(spec.signature.names)
    call = spec.signature.call(spec.check)
    bad = [name for name in call.unfillable if name not in extra]
    if bad or (unknown := [name for name in call.unknown if name not in extra]):
        names = ', '.join(map(repr, bad or unknown))
        raise TypeError(
            f'check {location(spec.check)} names {names}, which {spec.name} ({spec.place}) does not have; '
            f'it may name {", ".join(spec.signature.names)}, check_values'
        )
    return call.arguments


def check_default(spec: FunctionSpec) -> None:
    """Raises TypeError for a verifier that names a parameter which the function does not have."""
    if spec.default_verifier is not None:
        unknown = spec.signature.call(spec.default_verifier).unknown
        if unknown:
            raise TypeError(
                f'default_verifier {location(spec.default_verifier)} names {", ".join(map(repr, unknown))}, which '
                f'{spec.name} ({spec.place}) does not have; it may name {", ".join(spec.signature.names)}'
            )


def check_source(spec: FunctionSpec, policy: ResolvedPolicy) -> str | None:
    """The arguments that `check` is called with under a policy."""
    arguments = check_call(spec)
    if arguments is None or spec.check is None:
        return None
    if 'check_values' in spec.signature.names or 'check_values' not in inspect.signature(spec.check).parameters:
        return arguments
    return f'{arguments}{", " if arguments else ""}check_values={policy.check_values}'
