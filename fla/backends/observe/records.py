"""What is kept of one call: enough to tell who would serve it under another policy, and nothing that holds memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fla.backends.core.spec import FunctionSpec
from fla.backends.core.tensors import same

# Flags are these, and None; a dtype is written {'dtype': 'bfloat16'}.
_PLAIN = (bool, int, float, str, type(None))
WANTS = 'calls is a trace(), its JSON, the path of such JSON, or a list of records'


@dataclass(frozen=True)
class Record:
    """One dispatched call.

    Attributes:
        function: 'operation.function'.
        backend: which one ran. Under on_error='fallback' each that was tried has a record.
        tensors: parameter → (dtype, shape, device) of tensor arguments; empty for a compiled call.
        flags: parameter → value of the arguments that are numbers, booleans, strings, dtypes and None, where not at their
            default.
        compiled: recorded while a region was traced, not at a call.
        strides: parameter → strides in elements, of the tensors that are not contiguous.
        requires_grad: the tensors that do.
        grad_mode: whether gradients were enabled.
        lost: the arguments of no such kind that are not at their default, nested, sparse and quantised tensors among them.
    """

    function: str
    backend: str
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]
    flags: Mapping[str, Any]
    compiled: bool
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    requires_grad: tuple[str, ...] = ()
    grad_mode: bool = True
    lost: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values; what is at its default from `strides` on is left out."""
        made: dict[str, Any] = {
            'function': self.function,
            'backend': self.backend,
            'tensors': {n: {'dtype': d, 'shape': list(s), 'device': v} for n, (d, s, v) in self.tensors.items()},
            'flags': {n: {'dtype': _name(v)} if isinstance(v, torch.dtype) else v for n, v in self.flags.items()},
            'compiled': self.compiled,
        }
        if self.strides:
            made['strides'] = {n: list(s) for n, s in self.strides.items()}
        if self.requires_grad:
            made['requires_grad'] = list(self.requires_grad)
        if not self.grad_mode:
            made['grad_mode'] = False
        if self.lost:
            made['lost'] = list(self.lost)
        return made

    def arguments(self, device_of: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What the call was made with, its tensors new and of unknown content.

        Args:
            device_of: parameter → device, for those that are to be made on another one.
        """
        made = dict(self.flags)
        for name, (dtype, shape, device) in self.tensors.items():
            where = (device_of or {}).get(name, device)
            kind = getattr(torch, dtype)
            strides = self.strides.get(name)
            made[name] = (
                torch.empty(shape, dtype=kind, device=where)
                if strides is None
                else torch.empty_strided(shape, strides, dtype=kind, device=where)
            )
            if name in self.requires_grad:
                made[name].requires_grad_()
        return made

    def __str__(self) -> str:
        words = []
        for name, (dtype, shape, device) in self.tensors.items():
            more = f' strides {list(self.strides[name])}' if name in self.strides else ''
            more += ' requires_grad' if name in self.requires_grad else ''
            words.append(f'{name}: {dtype}{list(shape)} on {device}{more}')
        words += [f'{name}={value!r}' for name, value in self.flags.items()]
        return ', '.join(words) + ('' if self.grad_mode else '; no_grad')


def record_of(spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> Record:
    """What is kept of a call; `arguments` is None for one that is being compiled."""
    if arguments is None:
        return Record(spec.key, backend, {}, {}, compiled=True)
    tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}
    flags: dict[str, Any] = {}
    strides: dict[str, tuple[int, ...]] = {}
    wanting, lost = [], []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            shape = _shape(value)
            if shape is None:
                lost.append(name)
                continue
            tensors[name] = _name(value.dtype), shape, str(value.device)
            if not value.is_contiguous():
                strides[name] = value.stride()
            if value.requires_grad:
                wanting.append(name)
        elif name in (spec.signature.var_positional, spec.signature.var_keyword):
            if value:
                lost.append(name)
        elif not same(value, spec.signature.default(name)):
            if type(value) in _PLAIN or isinstance(value, torch.dtype):
                flags[name] = value
            else:
                lost.append(name)
    grad_mode = torch.is_grad_enabled()
    return Record(spec.key, backend, tensors, flags, False, strides, tuple(wanting), grad_mode, tuple(lost))


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None for a tensor that its shape and strides do not describe: nested, sparse, quantised, of symbolic sizes, or a view
    that is yet to be conjugated or negated."""
    is_other = tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized
    if is_other or tensor.is_conj() or tensor.is_neg():
        return None
    numbers = (*tensor.shape, *tensor.stride())
    return tuple(tensor.shape) if all(type(number) is int for number in numbers) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def read(told: Any, number: int) -> Record:
    """A record from what `to_dict` makes of one.

    Args:
        number: its place in the list, for errors.

    Raises:
        TypeError, ValueError: for what is none, with the key that is wrong.
    """
    if isinstance(told, Record):
        return told
    if not isinstance(told, Mapping):
        raise TypeError(f'{WANTS}; calls[{number}] is {told!r:.80}')
    reader = _Reader(told, number)
    known = ('function', 'backend', 'tensors', 'flags', 'compiled', 'strides', 'requires_grad', 'grad_mode', 'lost')
    unknown = [key for key in told if key not in known]
    if unknown:
        raise ValueError(f'calls[{number}] has the unknown key {unknown[0]!r}; a record has {", ".join(known)}')
    tensors = {name: reader.tensor(name, of) for name, of in reader.mapping('tensors').items()}
    strides = {name: reader.numbers(f'strides.{name}', of) for name, of in reader.mapping('strides').items()}
    for name, of in strides.items():
        if name not in tensors or len(of) != len(tensors[name][1]):
            raise reader.wrong(f'strides.{name}', list(of), 'one number for each dimension of a tensor of the record')
    wanting = reader.words('requires_grad')
    kinds = {name: getattr(torch, dtype) for name, (dtype, _, _) in tensors.items()}
    if not all(name in kinds and (kinds[name].is_floating_point or kinds[name].is_complex) for name in wanting):
        raise reader.wrong('requires_grad', list(wanting), 'names of floating-point tensors of the record')
    return Record(
        reader.word('function'),
        reader.word('backend'),
        tensors,
        {name: reader.flag(name, value) for name, value in reader.mapping('flags').items()},
        reader.boolean('compiled', False),
        strides,
        wanting,
        reader.boolean('grad_mode', True),
        reader.words('lost'),
    )


class _Reader:
    """Reads the values of one record, each as what it has to be."""

    def __init__(self, told: Mapping[str, Any], number: int) -> None:
        self.told, self.number = told, number

    def wrong(self, key: str, came: Any, wants: str) -> ValueError:
        return ValueError(f'calls[{self.number}].{key} is {came!r:.80}; it has to be {wants}')

    def word(self, key: str) -> str:
        value = self.told.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, 'a name')
        return value

    def words(self, key: str) -> tuple[str, ...]:
        value = self.told.get(key, [])
        if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
            raise self.wrong(key, value, 'a list of names')
        return tuple(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.told.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, 'true or false')
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.told.get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, value, 'a mapping of parameters')
        return value

    def numbers(self, key: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
            raise self.wrong(key, value, 'a list of whole numbers from 0')
        return tuple(value)

    def dtype(self, key: str, value: Any) -> torch.dtype:
        found = getattr(torch, value.removeprefix('torch.'), None) if isinstance(value, str) else None
        if not isinstance(found, torch.dtype):
            raise self.wrong(key, value, "the name of a dtype, such as 'bfloat16'")
        return found

    def tensor(self, name: str, of: Any) -> tuple[str, tuple[int, ...], str]:
        key = f'tensors.{name}'
        if not isinstance(of, Mapping) or {*of} != {'dtype', 'shape', 'device'}:
            raise self.wrong(key, of, 'a mapping of dtype, shape and device')
        shape = self.numbers(f'{key}.shape', of['shape'])
        try:
            device = str(torch.device(of['device']))
        except (RuntimeError, TypeError):
            raise self.wrong(f'{key}.device', of['device'], "a device, such as 'cuda:0'") from None
        return _name(self.dtype(f'{key}.dtype', of['dtype'])), shape, device

    def flag(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and {*value} == {'dtype'}:
            return self.dtype(f'flags.{name}.dtype', value['dtype'])
        if type(value) not in _PLAIN:
            raise self.wrong(f'flags.{name}', value, "a number, true, false, null, a string or {'dtype': ...}")
        return value
