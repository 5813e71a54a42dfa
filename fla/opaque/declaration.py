"""The declaration of an opaque kernel and all checks of it. Later stages rely on a checked declaration."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Kernel = Callable[..., Any]

_SCHEMA_FORM = "'(Tensor q, Tensor? h0, float scale) -> (Tensor o, Tensor? ht)'"


@dataclass(frozen=True)
class Declaration:
    """A checked declaration."""

    name: str
    inputs: dict[str, str]  # name → type as in the schema, without alias annotation
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


def declare(
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
) -> Declaration:
    """Check the arguments of `opaque()`; raises TypeError or ValueError that names the argument and says what to do."""
    _check_types(
        name,
        schema,
        {'forward': forward, 'fake': fake, 'backward': backward, 'fake_backward': fake_backward},
        {'grads': grads, 'intermediates': intermediates, 'non_differentiable': non_differentiable, 'devices': devices},
    )
    inputs, results, mutated = _parse(name, schema, named_results=backward is not None)
    for kernel, argument in ((forward, 'forward'), (fake, 'fake')):
        _check_parameters(name, kernel, argument, list(inputs))
    declaration = Declaration(
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
        forward=_counting_writes(forward, [list(inputs).index(one) for one in mutated]) if mutated else forward,
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
    """Inputs and results by name, and the inputs written to. PyTorch's own parser checks the schema again in `define`."""
    match = re.fullmatch(r'\s*\((.*)\)\s*->\s*(.*?)\s*', schema, re.DOTALL)
    if match is None:
        raise ValueError(f'{name}: schema={schema!r} is malformed; write it like {_SCHEMA_FORM}, without the name')
    inputs: dict[str, str] = {}
    mutated = []
    for item in filter(None, map(str.strip, match[1].split(','))):
        if '=' in item or item.startswith('*'):
            raise ValueError(
                f'{name}: schema has {item!r}; write plain positional arguments without defaults '
                '(defaults belong in the function that calls the kernel)'
            )
        kind, _, argument = item.rpartition(' ')
        _check_name(name, argument, item, inputs)
        kind, writes = re.subn(r'\([a-z]!\)', '', kind.strip())
        if 'Tensor' in kind and kind not in ('Tensor', 'Tensor?'):
            raise ValueError(
                f'{name}: schema has {item!r}; a tensor argument is Tensor, Tensor? or Tensor(a!), not a list or view '
                '(pass the tensors one by one)'
            )
        inputs[argument] = kind
        mutated += [argument] * writes
    if next((kind for kind in inputs.values() if kind.startswith('Tensor')), None) != 'Tensor':
        raise ValueError(
            f'{name}: schema={schema!r} must have a Tensor argument before any Tensor? (its type and device choose the path)'
        )
    results: dict[str, str] = {}
    body = match[2][1:-1] if match[2].startswith('(') and match[2].endswith(')') else match[2]
    for index, item in enumerate(filter(None, map(str.strip, body.split(',')))):
        kind, _, result = item.partition(' ')
        if kind not in ('Tensor', 'Tensor?'):
            raise ValueError(f'{name}: schema returns {item!r}; a result is a Tensor or Tensor?, not a view of an input')
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
            f'{name}: schema has {item!r}; {argument!r} cannot name it (use a plain Python name without leading underscore)'
        )
    if argument in taken:
        raise ValueError(f'{name}: schema uses the name {argument!r} twice; rename one')


def _parameters(kernel: Kernel) -> list[inspect.Parameter] | None:
    """A kernel's parameters; None for a builtin without a signature."""
    try:
        return list(inspect.signature(kernel).parameters.values())
    except (ValueError, TypeError):
        return None


def _check_parameters(name: str, kernel: Kernel, argument: str, expected: list[str]) -> None:
    """Refuse a kernel that names the arguments in another order: they are passed by position, so it would swap them."""
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
                f'{name}: {argument} takes ({got}), but gets ({", ".join(expected)}) by position; use the same order in both'
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
        raise TypeError(f'{name}: backward must be a function with plain named parameters, which choose what it gets')
    for parameter in parameters:
        if parameter.name not in known:
            raise ValueError(f'{name}: backward asks for {parameter.name!r}; it may name {", ".join(known)}')
    return {one.name: known[one.name] for one in parameters}


def _check_devices(declaration: Declaration) -> None:
    name, devices = declaration.name, declaration.devices
    if not devices:
        raise ValueError(f"{name}: devices=() is empty; name torch device types, such as ('cuda',)")
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


def _check_gradients(declaration: Declaration) -> None:
    name, wanted = declaration.name, declaration.backward_inputs
    if declaration.backward is None:
        for argument in ('grads', 'intermediates', 'non_differentiable', 'fake_backward'):
            if getattr(declaration, argument):
                raise ValueError(f'{name}: {argument}= is given without backward=; give both or neither')
        return
    if declaration.mutated:
        raise ValueError(
            f'{name}: schema writes into {declaration.mutated[0]!r}, which autograd cannot follow; '
            'return a new tensor, or omit backward='
        )
    if not declaration.grads or len(set(declaration.grads)) != len(declaration.grads):
        raise ValueError(
            f'{name}: grads={declaration.grads!r} must name the inputs whose gradients backward returns, each once, '
            f'out of {", ".join(declaration.tensors)}'
        )
    for one in declaration.grads:
        if one not in declaration.tensors:
            raise ValueError(
                f'{name}: grads has {one!r}, which is not a tensor argument; choose from {", ".join(declaration.tensors)}'
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


def _counting_writes(forward: Kernel, places: Sequence[int]) -> Kernel:
    """Wrap a kernel that writes into the arguments at `places`: also increments their autograd version counters."""

    def run(*args: Any) -> Any:
        result = forward(*args)
        for place in places:
            if args[place] is not None and not args[place].is_inference():
                torch.autograd.graph.increment_version(args[place])
        return result

    return run
