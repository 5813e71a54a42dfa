"""Extension kernels that PyTorch cannot trace (CUTLASS, TileLang, a vendor's wheel), made safe to call from anywhere.

`opaque()` turns a kernel into one function with two roads to the same code:

1. Eager code with plain tensors on the kernel's device runs the kernel as it is, in the `torch.autograd.Function` that
   its author would have written when a gradient is wanted. Nothing goes through PyTorch's dispatcher: the choice of the
   road costs 0.8 x `torch.empty(0)`.
2. Everything else (Dynamo, `torch.export`, FakeTensor, meta, tensor subclasses, dispatch modes, `torch.func`) calls a
   library operator with a fake implementation and the same gradient.

The gradient belongs to the operator. With the usual `autograd.Function` around an operator that has none, Dynamo inlines
the Function, and then `torch.func.grad` in compiled code gives zeros and an exported module has no gradient, silently
(torch 2.13). What has no answer raises instead of losing a gradient or a tangent: `torch.func.grad`, forward-mode AD,
double backward, an input that requires grad where the kernel has no gradient for it.
"""

from __future__ import annotations

import inspect
import keyword
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch.autograd import forward_ad

__all__ = ['OpaqueKernel', 'opaque']

Kernel = Callable[..., Any]

_SCHEMA_FORM = "'(Tensor q, Tensor? h0, float scale) -> (Tensor o, Tensor? ht)'"
# A Parameter is a plain tensor to a kernel; any other subclass may have no memory behind it.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE = _PLAIN | {type(None)}


class OpaqueKernel(Protocol):
    """What `opaque()` returns: a function with the schema's arguments, by position or keyword.

    `op` is the library operator: what an exported program holds, and what `torch.library.opcheck` takes. Below autograd,
    where compiled graphs, dispatch modes and selective checkpointing look, it is `forward_op`, and `backward_op` (None
    without backward).
    """

    op: Any
    forward_op: Any
    backward_op: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def opaque(
    name: str,
    *,
    schema: str,
    forward: Kernel,
    fake: Kernel,
    backward: Kernel | None = None,
    grads: Sequence[str] = (),
    intermediates: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    fake_backward: Kernel | None = None,
    devices: Sequence[str] = ('cuda',),
) -> OpaqueKernel:
    """Wrap an untraceable kernel for eager code, `torch.compile`, `torch.export` and fake tensors.

        def forward(q, k, v, scale):                     # raw: tensors in, new tensors out
            o, lse = vendor.attention_fwd(q, k, v, scale)
            return o, lse

        def backward(q, k, v, o, lse, do, scale):        # names inputs, outputs and `d<output>`, in any order
            return vendor.attention_bwd(do, q, k, v, o, lse, scale)

        attention = opaque(
            'fla::vendor_attention',
            schema='(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor o, Tensor lse)',
            forward=forward,
            fake=lambda q, k, v, scale: (torch.empty_like(v), q.new_empty(q.shape[:-1], dtype=torch.float32)),
            backward=backward,
            grads=('q', 'k', 'v'),                       # what backward returns, in this order
            intermediates=('lse',),                      # only backward reads it: attention(...) returns o alone
        )

    Args:
        name: `'namespace::name'` of the operator; below autograd there are `name_forward` and `name_backward` as well.
        schema: arguments and results without the name, in PyTorch's schema language. All arguments are positional and
            without defaults (an operator drops those before the kernel sees them: write them in the calling function).
            `SymInt` instead of `int` for a number that derives from a size, or each size compiles anew. Tensors are
            `Tensor` or `Tensor?`, the first one not optional; no lists of tensors, autograd does not look into them.
            `Tensor(a!) cache` says that the kernel writes into it, for inference only. Results need names where there
            is a backward.
        forward: called with all arguments by position. Returns one tensor, or several in a tuple, as the schema says.
            Results are new memory: none is an input, or shares memory with an input or another result. Compiled code
            checks that, eager code does not. Strides are the caller's, also when compiled.
        fake: same arguments, but tensors without data and maybe symbolic sizes: returns empty tensors of the right shape,
            dtype, device *and strides*.
        backward: computes gradients, without autograd. Its parameter names say what is saved: an input, a result
            (intermediates too), the gradient of a result (`do` for a result `o`; None only where the result was None;
            with any strides, 0 too), or `needs_input_grad`, a tuple of bools parallel to `grads`. Returns one gradient
            per name in `grads`; None only where the input is None or needs no gradient.
        grads: the inputs that backward differentiates. Any other input that requires grad is an error when called.
        intermediates: the last results, which only backward reads; the caller does not get them.
        non_differentiable: results without a gradient (indices, a log-sum-exp for the caller). All others must be named
            by backward as `d<result>`.
        fake_backward: like `fake`, with backward's arguments. By default a gradient is contiguous with its input's
            shape, dtype and device, which compiled code makes true by converting.
        devices: torch device types that the kernel runs on; `'cuda'` includes ROCm.

    Returns:
        The function to call. With one visible result it returns that, with several a tuple, with none None.

    Defining a name again with the same schema (a module reloaded, a notebook cell run twice) replaces the kernels.
    Autocast neither casts the inputs nor is switched off inside the kernels. `torch.vmap` runs the kernel in a loop, with
    PyTorch's warning. `torch.jit.trace` is not supported: it records the numbers of one run.

    Raises:
        TypeError, ValueError: here, for a declaration that does not hold together; says which argument and what to do.
        RuntimeError: when called, for `torch.func.grad`, forward-mode AD and inputs that require grad but have no
            gradient; in a second backward; in compiled code, for results that share memory.
        NotImplementedError: when called with tensors on a device that is not among `devices`.
    """
    caller = sys._getframe(1)
    declaration = _declare(
        name, schema, forward, fake, backward, grads, intermediates, non_differentiable, fake_backward, devices
    )
    function = _entry(declaration, _define(declaration, caller.f_code.co_filename))
    function.__module__ = caller.f_globals.get('__name__', '')
    return function


# What was declared


@dataclass(frozen=True)
class _Declaration:
    """A checked declaration: nothing after this questions it."""

    name: str
    inputs: dict[str, str]  # name -> type as in the schema, without alias annotation
    results: dict[str, str]
    grads: tuple[str, ...]
    intermediates: tuple[str, ...]
    non_differentiable: tuple[str, ...]
    mutated: tuple[str, ...]
    devices: tuple[str, ...]
    schema: str
    backward_inputs: dict[str, str]
    forward: Kernel
    fake: Kernel
    backward: Kernel | None
    fake_backward: Kernel | None

    @property
    def tensors(self) -> list[str]:
        return [name for name, kind in self.inputs.items() if kind.startswith('Tensor')]

    @property
    def visible(self) -> list[str]:
        return [name for name in self.results if name not in self.intermediates]

    @property
    def backward_schema(self) -> str:
        may_skip = 'needs_input_grad' in self.backward_inputs
        kinds = ['Tensor?' if may_skip else self.inputs[name] for name in self.grads]
        inputs = ', '.join(f'{kind} {name}' for name, kind in self.backward_inputs.items())
        return f'({inputs}) -> ({", ".join(kinds)})'


def _declare(
    name: str,
    schema: str,
    forward: Kernel,
    fake: Kernel,
    backward: Kernel | None,
    grads: Sequence[str],
    intermediates: Sequence[str],
    non_differentiable: Sequence[str],
    fake_backward: Kernel | None,
    devices: Sequence[str],
) -> _Declaration:
    _check_types(
        name,
        schema,
        {'forward': forward, 'fake': fake, 'backward': backward, 'fake_backward': fake_backward},
        {'grads': grads, 'intermediates': intermediates, 'non_differentiable': non_differentiable, 'devices': devices},
    )
    inputs, results, mutated = _parse(name, schema, named_results=backward is not None)
    for kernel, argument in ((forward, 'forward'), (fake, 'fake')):
        _check_parameters(name, kernel, argument, list(inputs))
    declaration = _Declaration(
        name=name,
        inputs=inputs,
        results=results,
        grads=tuple(grads),
        intermediates=tuple(intermediates),
        non_differentiable=tuple(non_differentiable),
        mutated=mutated,
        devices=tuple(devices),
        schema=' '.join(schema.split()),
        backward_inputs={} if backward is None else _backward_inputs(name, backward, inputs, results),
        forward=_bumping(forward, [list(inputs).index(one) for one in mutated]) if mutated else forward,
        fake=fake,
        backward=backward,
        fake_backward=fake_backward,
    )
    _check_devices(declaration)
    _check_gradients(declaration)
    return declaration


def _check_types(name: object, schema: object, kernels: dict[str, object], names: dict[str, object]) -> None:
    if not isinstance(name, str) or not re.fullmatch(r'[A-Za-z_]\w*::[A-Za-z_]\w*', name):
        raise ValueError(f"name={name!r} is not a namespaced operator name; write it as 'fla::flash_kda'")
    if not isinstance(schema, str):
        raise TypeError(f'{name}: schema={schema!r} is not a string like {_SCHEMA_FORM}')
    for argument, kernel in kernels.items():
        if not callable(kernel) and not (kernel is None and argument in ('backward', 'fake_backward')):
            raise TypeError(f'{name}: {argument}={kernel!r} is not a function; running needs forward, tracing needs fake')
    for argument, several in names.items():
        if not isinstance(several, (tuple, list)) or not all(isinstance(one, str) for one in several):
            raise TypeError(f"{name}: {argument}={several!r} is not a tuple of names, such as ('q', 'k')")


def _parse(name: str, schema: str, named_results: bool) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """Inputs and results by name, and the inputs written to. PyTorch's own parser has the last word, in `_define`."""
    match = re.fullmatch(r'\s*\((.*)\)\s*->\s*(.*?)\s*', schema, re.DOTALL)
    if match is None:
        raise ValueError(f'{name}: schema={schema!r} does not read; write it like {_SCHEMA_FORM}, without the name')
    inputs: dict[str, str] = {}
    mutated = []
    for item in filter(None, map(str.strip, match[1].split(','))):
        if '=' in item or item.startswith('*'):
            raise ValueError(
                f'{name}: schema has {item!r}; write plain positional arguments without defaults '
                '(defaults belong into the function that calls the kernel)'
            )
        kind, _, argument = item.rpartition(' ')
        _check_name(name, argument, item, inputs)
        kind, writes = re.subn(r'\([a-z]!\)', '', kind.strip())
        if 'Tensor' in kind and kind not in ('Tensor', 'Tensor?'):
            raise ValueError(
                f'{name}: schema has {item!r}; a tensor argument is Tensor, Tensor? or Tensor(a!), no list or view '
                '(pass the tensors one by one)'
            )
        inputs[argument] = kind
        mutated += [argument] * writes
    if next((kind for kind in inputs.values() if kind.startswith('Tensor')), None) != 'Tensor':
        raise ValueError(
            f'{name}: schema={schema!r} must have a Tensor argument before any Tensor? (its type and device choose the road)'
        )
    results: dict[str, str] = {}
    body = match[2][1:-1] if match[2].startswith('(') and match[2].endswith(')') else match[2]
    for index, item in enumerate(filter(None, map(str.strip, body.split(',')))):
        kind, _, result = item.partition(' ')
        if kind not in ('Tensor', 'Tensor?'):
            raise ValueError(
                f'{name}: schema returns {item!r}; a result is a Tensor or Tensor?, and never a view of an input'
            )
        if not result and named_results:
            raise ValueError(f'{name}: schema returns {item!r} without a name, which backward needs; see {_SCHEMA_FORM}')
        result = result.strip() or f'result{index}'
        _check_name(name, result, item, {**inputs, **results})
        results[result] = kind
    return inputs, results, tuple(mutated)


def _check_name(name: str, argument: str, item: str, taken: dict[str, str]) -> None:
    bad = not argument.isidentifier() or keyword.iskeyword(argument) or argument.startswith('_')
    if bad or argument in ('ctx', 'needs_input_grad'):
        raise ValueError(
            f'{name}: schema has {item!r}; {argument!r} cannot name it (a plain Python name, no leading underscore)'
        )
    if argument in taken:
        raise ValueError(f'{name}: schema uses the name {argument!r} twice; rename one')


def _parameters(kernel: Kernel) -> list[inspect.Parameter] | None:
    """A kernel's parameters; None for a builtin that does not tell."""
    try:
        return list(inspect.signature(kernel).parameters.values())
    except (ValueError, TypeError):
        return None


def _check_parameters(name: str, kernel: Kernel, argument: str, expected: list[str]) -> None:
    """Arguments go by position: a name at another place is a transposition, found here and not in the numbers."""
    parameters = _parameters(kernel)
    if parameters is None:
        return
    try:
        inspect.signature(kernel).bind(*expected)
    except TypeError as error:
        raise TypeError(f'{name}: {argument} must take ({", ".join(expected)}) by position: {error}') from None
    for place, parameter in enumerate(parameters):
        if parameter.name in expected and expected.index(parameter.name) != place:
            got = ', '.join(one.name for one in parameters)
            raise ValueError(
                f'{name}: {argument} takes ({got}), but gets ({", ".join(expected)}) by position; bring them into one order'
            )


def _backward_inputs(name: str, backward: Kernel, inputs: dict[str, str], results: dict[str, str]) -> dict[str, str]:
    known = {**inputs, **results}
    for result, kind in results.items():
        if f'd{result}' in known:
            raise ValueError(
                f"{name}: 'd{result}' could be an argument or the gradient of {result!r}; rename one in the schema"
            )
        known[f'd{result}'] = kind
    known['needs_input_grad'] = 'bool[]'
    parameters = _parameters(backward)
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if parameters is None or not parameters or any(one.kind is not plain for one in parameters):
        raise TypeError(f'{name}: backward must be a function with plain named parameters, which say what it needs')
    for parameter in parameters:
        if parameter.name not in known:
            raise ValueError(f'{name}: backward asks for {parameter.name!r}; it may name {", ".join(known)}')
    return {one.name: known[one.name] for one in parameters}


def _check_devices(declaration: _Declaration) -> None:
    name, devices = declaration.name, declaration.devices
    if not devices:
        raise ValueError(f"{name}: devices=() allows none; name torch device types, such as ('cuda',)")
    for device in devices:
        try:
            known = torch.device(device).index is None and device != 'meta'
        except RuntimeError:
            known = False
        if not known:
            raise ValueError(
                f"{name}: devices has {device!r}; name torch device types, such as 'cuda' (ROCm too), 'xpu', 'cpu'; "
                'meta tensors are served by fake='
            )


def _check_gradients(declaration: _Declaration) -> None:
    name, wanted = declaration.name, declaration.backward_inputs
    if declaration.backward is None:
        for argument in ('grads', 'intermediates', 'non_differentiable', 'fake_backward'):
            if getattr(declaration, argument):
                raise ValueError(f'{name}: {argument}= is given without backward=; give both or neither')
        return
    if declaration.mutated:
        raise ValueError(
            f'{name}: schema writes into {declaration.mutated[0]!r}, which autograd cannot follow; '
            'return a new tensor, or leave backward= out'
        )
    if not declaration.grads or len(set(declaration.grads)) != len(declaration.grads):
        raise ValueError(
            f'{name}: grads={declaration.grads!r} must name the inputs whose gradients backward returns, each once, '
            f'out of {", ".join(declaration.tensors)}'
        )
    for one in declaration.grads:
        if one not in declaration.tensors:
            raise ValueError(
                f'{name}: grads has {one!r}, which is no tensor argument; choose from {", ".join(declaration.tensors)}'
            )
        if declaration.fake_backward is None and one not in wanted:
            raise ValueError(
                f'{name}: the gradient of {one!r} has no known shape: let backward take {one!r} too, or give fake_backward='
            )
    if declaration.fake_backward is not None:
        _check_parameters(name, declaration.fake_backward, 'fake_backward', list(wanted))
    results = list(declaration.results)
    count = len(declaration.intermediates)
    if set(declaration.intermediates) != set(results[len(results) - count :]) or count == len(results):
        raise ValueError(
            f'{name}: intermediates={declaration.intermediates!r} must be the last results, after at least one visible, of '
            f'{", ".join(results)}'
        )
    for one in declaration.non_differentiable:
        if one not in declaration.visible:
            raise ValueError(f'{name}: non_differentiable has {one!r}; choose from {", ".join(declaration.visible)}')
    for one in results:
        has_gradient = one in declaration.visible and one not in declaration.non_differentiable
        if has_gradient and f'd{one}' not in wanted:
            raise ValueError(
                f"{name}: backward ignores the gradient of {one!r}: let it take 'd{one}', "
                f'or list {one!r} in non_differentiable='
            )
        if not has_gradient and f'd{one}' in wanted:
            raise ValueError(
                f"{name}: backward takes 'd{one}', but {one!r} has no gradient (it is not visible, or declared so)"
            )


# The library operators


@dataclass
class _Operators:
    """The operators, and what is behind them: replaced in place, so compiled callers of a reloaded module stay valid."""

    declaration: _Declaration
    origin: str
    library: torch.library.Library  # operators live as long as it
    op: Any = None
    forward_op: Any = None
    backward_op: Any = None
    function: Any = None  # the autograd.Function around forward_op and backward_op


def _define(declaration: _Declaration, origin: str) -> _Operators:
    """Define the operators, or put new kernels behind those that exist."""
    namespace, _, base = declaration.name.partition('::')
    packets = getattr(torch.ops, namespace)
    existing = [one for one in (base, f'{base}_forward', f'{base}_backward') if hasattr(packets, one)]
    # Kept on the operator itself: the one place that a second copy of this module sees too.
    operators = getattr(getattr(packets, base, None), '_fla_operators', None)
    if operators is not None:
        _replace_kernels(operators, declaration, origin)
    elif existing:
        raise ValueError(f'{namespace}::{existing[0]} is an operator of somebody else already; choose another name')
    else:
        operators = _new_operators(declaration, origin)
        getattr(packets, base)._fla_operators = operators
    if declaration.backward is not None:
        operators.function = _autograd_function(declaration, operators.forward_op, operators.backward_op, operator=True)
    return operators


def _new_operators(declaration: _Declaration, origin: str) -> _Operators:
    """Three operators: the public one has the gradient, and ends in the other two, which have none.

    So tracing leaves the Python kernel for autograd behind, which would take half of each compiled call (10 of 21 us).
    """
    namespace, _, base = declaration.name.partition('::')
    library: Any = torch.library.Library(namespace, 'FRAGMENT')  # type: ignore[no-untyped-call]
    operators = _Operators(declaration, origin, library)

    def run(*args: Any) -> Any:
        results = _as_tuple(declaration.name, operators.declaration.forward(*args), len(declaration.results))
        _check_fresh(declaration.name, args, results)
        return _as_returned(results)

    def run_below(*args: Any) -> Any:
        # Compiled code hands over dual tensors here, where their tangents can no longer be seen.
        if forward_ad._current_level >= 0:
            raise RuntimeError(f'{declaration.name} is an opaque kernel: compiled code cannot run it inside forward-mode AD')
        return run(*args)

    def fake(*args: Any) -> Any:
        return operators.declaration.fake(*args)

    def run_backward(*args: Any) -> Any:
        now = operators.declaration
        assert now.backward is not None
        gradients = _as_tuple(f'{declaration.name}_backward', now.backward(*args), len(now.grads))
        if now.fake_backward is None:
            gradients = _conform(now, args, gradients)
        _check_fresh(f'{declaration.name}_backward', args, gradients)
        return _as_returned(gradients)

    def fake_backward(*args: Any) -> Any:
        now = operators.declaration
        return _default_fake_backward(now, args) if now.fake_backward is None else now.fake_backward(*args)

    def define(name: str, schema: str, run: Kernel, fake: Kernel) -> Any:
        # Inductor may restride what it feeds an operator, but a verifier has looked at the strides; 2.7 has the older tag.
        strides = getattr(torch.Tag, 'needs_exact_strides', torch.Tag.needs_fixed_stride_order)
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, strides))
        torch.library.impl(f'{namespace}::{name}', declaration.devices, run, lib=library)
        torch.library.register_fake(f'{namespace}::{name}', fake, lib=library)
        return getattr(getattr(torch.ops, namespace), name).default

    try:
        operators.op = define(base, declaration.schema, run, fake)
    except RuntimeError as error:
        raise ValueError(f'{declaration.name}: PyTorch cannot take schema={declaration.schema!r}: {error}') from error
    operators.forward_op = define(f'{base}_forward', declaration.schema, run_below, fake)
    if declaration.backward is not None:
        operators.backward_op = define(f'{base}_backward', declaration.backward_schema, run_backward, fake_backward)
    library.impl(base, partial(_autograd_kernel, operators), 'Autograd', with_keyset=True)
    return operators


def _autograd_kernel(operators: _Operators, keyset: Any, *args: Any) -> Any:
    """The public operator where PyTorch differentiates: records a gradient, or refuses, or goes below."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(operators.declaration, args)
    if torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in args):
        _refuse_grad(operators.declaration, args)
        return operators.function.apply(*args)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        # Not by way of forward_op: an outer level of torch.func may differentiate, and has to meet this kernel again.
        return operators.op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
    return operators.forward_op(*args)


def _replace_kernels(old: _Operators, new: _Declaration, origin: str) -> None:
    for what in ('schema', 'backward_schema', 'devices'):
        before, after = getattr(old.declaration, what), getattr(new, what)
        if before != after:
            raise ValueError(
                f'{new.name} is defined in {old.origin} with {what} {before!r}, now {after!r}; '
                'an operator keeps its form for life: choose another name, or restart the process'
            )
    if old.origin != origin:
        warnings.warn(f'{new.name} is defined in {old.origin} and again in {origin}; the latter is used now', stacklevel=4)
    old.declaration, old.origin = new, origin


def _bumping(forward: Kernel, places: Sequence[int]) -> Kernel:
    """A kernel that writes into inputs, with autograd's version counters told so."""

    def bumping(*args: Any) -> Any:
        result = forward(*args)
        for place in places:
            if args[place] is not None and not args[place].is_inference():
                torch.autograd.graph.increment_version(args[place])
        return result

    return bumping


def _as_tuple(name: str, results: Any, count: int) -> tuple[Any, ...]:
    """What a kernel returned (extensions return lists as well), checked against the schema."""
    several = (results,) if count == 1 else tuple(results or ())
    if len(several) != count or any(one is not None and not isinstance(one, torch.Tensor) for one in several):
        raise RuntimeError(f'{name}: the kernel returned {results!r:.80}, its schema says {count} results')
    return several


def _as_returned(results: tuple[Any, ...]) -> Any:
    return results if len(results) > 1 else results[0] if results else None


def _check_fresh(name: str, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Compiled code assumes that results share no memory with anything; wrong numbers follow where they do."""
    taken = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
    for place, result in enumerate(results):
        if result is not None:
            memory = result.untyped_storage().data_ptr()
            if memory and memory in taken:
                raise RuntimeError(
                    f'{name}: result {place} shares memory with an argument or an earlier result; '
                    'return new memory (clone() it)'
                )
            taken.add(memory)


def _needed(declaration: _Declaration, args: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Per gradient the input it belongs to, None where there is none to compute."""
    values = dict(zip(declaration.backward_inputs, args, strict=True))
    needs = values.get('needs_input_grad', [True] * len(declaration.grads))
    return [values[name] if need else None for name, need in zip(declaration.grads, needs, strict=True)]


def _default_fake_backward(declaration: _Declaration, args: tuple[Any, ...]) -> Any:
    gradients = tuple(
        None if one is None else torch.empty_like(one, memory_format=torch.contiguous_format)
        for one in _needed(declaration, args)
    )
    return _as_returned(gradients)


def _conform(declaration: _Declaration, args: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make true what `_default_fake_backward` promised: eager autograd forgives dtype and strides, compiled code not."""
    conformed: list[torch.Tensor | None] = []
    for name, like, gradient in zip(declaration.grads, _needed(declaration, args), gradients, strict=True):
        if like is None:
            conformed.append(None)
        elif gradient is None or gradient.shape != like.shape:
            shape = None if gradient is None else tuple(gradient.shape)
            raise RuntimeError(
                f'{declaration.name}: backward returned {shape} as gradient of {name!r}, which has shape {tuple(like.shape)}'
            )
        else:
            conformed.append(gradient.to(like.dtype).contiguous())
    return tuple(conformed)


# The function to call


def _entry(declaration: _Declaration, operators: _Operators) -> OpaqueKernel:
    namespace: dict[str, Any] = {
        '_PLAIN': _PLAIN,
        '_PLAIN_OR_NONE': _PLAIN_OR_NONE,
        '_forward_ad': forward_ad,
        '_is_dynamo_compiling': torch.compiler.is_dynamo_compiling,
        '_is_grad_enabled': torch.is_grad_enabled,
        '_transforms_active': torch._C._are_functorch_transforms_active,
        '_dispatch_modes': torch._C._len_torch_dispatch_stack,
        '_refuse_grad': partial(_refuse_grad, declaration),
        '_raw': declaration.forward,
        '_op': operators.op,
    }
    if declaration.backward is not None:
        namespace['_Function'] = _autograd_function(declaration, declaration.forward, declaration.backward, operator=False)
    base = declaration.name.partition('::')[2]
    function = _generate(f'<opaque {declaration.name}>', _entry_source(declaration, base), namespace)[base]
    function.__doc__ = f'Opaque kernel `{declaration.name}{declaration.schema}`.'
    function.op, function.forward_op, function.backward_op = operators.op, operators.forward_op, operators.backward_op
    return cast(OpaqueKernel, function)


def _entry_source(declaration: _Declaration, base: str) -> str:
    """The text of the public function: straight-line, since each generic loop here would cost as much as a small kernel."""
    arguments = ', '.join(declaration.inputs)
    plain = ' and '.join(
        f'type({name}) in {"_PLAIN" if declaration.inputs[name] == "Tensor" else "_PLAIN_OR_NONE"}'
        for name in declaration.tensors
    )
    first = declaration.tensors[0]
    on_device = ' or '.join(
        f'{first}.is_{device}' if hasattr(torch.Tensor, f'is_{device}') else f'{first}.device.type == {device!r}'
        for device in declaration.devices
    )
    constants = [name for name in declaration.tensors if name not in declaration.grads]
    lines = [
        f'def {base}({arguments}):',
        f'    if (not _is_dynamo_compiling() and {plain} and ({on_device})',
        '            and not _transforms_active() and _forward_ad._current_level < 0 and not _dispatch_modes()):',
        '        if _is_grad_enabled():',
    ]
    if constants:
        lines.append(f'            if {_requires_grad(declaration, constants)}: _refuse_grad(({arguments},))')
    if declaration.backward is not None:
        lines.append(f'            if {_requires_grad(declaration, declaration.grads)}: return _Function.apply({arguments})')
    return '\n'.join(
        lines + _call_and_return(declaration, '_raw', '        ') + _call_and_return(declaration, '_op', '    ')
    )


def _requires_grad(declaration: _Declaration, names: Sequence[str]) -> str:
    return ' or '.join(
        f'{name}.requires_grad' if declaration.inputs[name] == 'Tensor' else f'({name} is not None and {name}.requires_grad)'
        for name in names
    )


def _call_and_return(declaration: _Declaration, kernel: str, indent: str) -> list[str]:
    call = f'{kernel}({", ".join(declaration.inputs)})'
    if not declaration.results:
        return [f'{indent}{call}', f'{indent}return None']
    return [f'{indent}{", ".join(declaration.results)} = {call}', f'{indent}return {", ".join(declaration.visible)}']


def _autograd_function(declaration: _Declaration, forward: Kernel, backward: Kernel, *, operator: bool) -> Any:
    """The `autograd.Function` around a forward and a backward: the raw kernels, or the operators."""
    base = declaration.name.partition('::')[2]
    source = _function_source(declaration, operator)
    filename = f'<opaque {declaration.name} {"operator" if operator else "raw"} autograd>'
    generated = _generate(filename, source, {'_forward': forward, '_backward': backward})
    body = {
        'forward': staticmethod(generated['forward']),
        'backward': staticmethod(_once(declaration.name, generated['backward'])),
    }
    return type(f'{base}_function', (torch.autograd.Function,), body)


def _function_source(declaration: _Declaration, operator: bool) -> str:
    """An operator's returns the intermediates too: they are results of the operator, which the public function drops."""
    arguments = list(declaration.inputs)
    returned = list(declaration.results) if operator else declaration.visible
    fixed = ', '.join(name for name in returned if name in declaration.non_differentiable + declaration.intermediates)
    values = {**declaration.inputs, **declaration.results}
    needed = [name for name in declaration.backward_inputs if name in values]
    saved = [name for name in needed if values[name].startswith('Tensor')]
    constants = [name for name in needed if name not in saved]
    needs = ''.join(f'ctx.needs_input_grad[{arguments.index(name)}], ' for name in declaration.grads)
    passed = [f'({needs})' if name == 'needs_input_grad' else name for name in declaration.backward_inputs]
    lines = [
        f'def forward(ctx, {", ".join(arguments)}):',
        f'    {", ".join(declaration.results)} = _forward({", ".join(arguments)})',
        f'    ctx.save_for_backward({", ".join(saved)})',
    ]
    if constants:
        lines.append(f'    ctx.constants = ({", ".join(constants)},)')
    if fixed:
        lines.append(f'    ctx.mark_non_differentiable(*[_one for _one in ({fixed},) if _one is not None])')
    lines += [
        f'    return {", ".join(returned)}',
        '',
        f'def backward(ctx, {", ".join(f"d{name}" for name in returned)}):',
    ]
    if saved:
        lines.append(f'    {", ".join(saved)}, = ctx.saved_tensors')
    if constants:
        lines.append(f'    {", ".join(constants)}, = ctx.constants')
    gradients = [f'd{name}' if name in declaration.grads else 'None' for name in arguments]
    lines += [
        f'    {", ".join(f"d{name}" for name in declaration.grads)} = _backward({", ".join(passed)})',
        f'    return {", ".join(gradients)}',
    ]
    return '\n'.join(lines)


def _once(name: str, backward: Kernel) -> Kernel:
    """Refuse to be differentiated again. `once_differentiable` lets what depends on saved tensors be silently zero."""

    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f'create_graph=True reached the backward of {name}, an opaque kernel without a derivative of its own; '
                'use an implementation in plain PyTorch for double backward'
            )
        return backward(ctx, *gradients)

    return once


def _generate(filename: str, source: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run generated text, which tracebacks show. No `__name__` in it: Dynamo would look globals up in that module."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, 'exec'), namespace)
    return namespace


def _refuse_grad(declaration: _Declaration, args: tuple[Any, ...]) -> None:
    """Some tensor requires grad: raise where that cannot be honoured."""
    for name, value in zip(declaration.inputs, args, strict=True):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if name not in declaration.grads:
            what = 'no backward' if declaration.backward is None else f'no gradient for {name!r}'
            raise RuntimeError(
                f'{declaration.name} has {what}, and {name!r} requires grad; '
                f'call it under torch.no_grad(), or detach() {name!r}'
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f'{declaration.name} is an opaque kernel: torch.func cannot differentiate it by {name!r}; '
                'use loss.backward(), or an implementation in plain PyTorch'
            )


def _refuse_tangents(declaration: _Declaration, args: tuple[Any, ...]) -> None:
    for name, value in zip(declaration.inputs, args, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        if forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f'{declaration.name} is an opaque kernel: forward-mode AD cannot follow {name!r} into it; '
                'use an implementation in plain PyTorch'
            )
