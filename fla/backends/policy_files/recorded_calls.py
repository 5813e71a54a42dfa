"""The JSON of a recorded call, as `Record.to_dict` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, PlainValidator, ValidationError, model_validator

from fla.backends.observe.records import PLAIN, Record
from fla.backends.policy_files.validation import Strict, Word, message


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.removeprefix('torch.'), None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"must be the name of a dtype such as 'bfloat16', got {value!r:.80}")
    return found


def _device(value: Any) -> str:
    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError):
        raise ValueError(f"must be a device such as 'cuda:0', got {value!r:.80}") from None


def _flag(value: Any) -> Any:
    if isinstance(value, Mapping) and {*value} == {'dtype'}:
        return _dtype(value['dtype'])
    if type(value) not in PLAIN:
        raise ValueError(f"must be a number, true, false, null, a string or {{'dtype': ...}}, got {value!r:.80}")
    return value


Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Sizes = Annotated[tuple[Size, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class TensorModel(Strict):
    """A tensor argument."""

    dtype: Annotated[Any, PlainValidator(lambda value: str(_dtype(value)).removeprefix('torch.'))]
    shape: Sizes
    device: Annotated[Any, PlainValidator(_device)]


class RecordModel(Strict):
    """The fields of `Record`."""

    function: Word
    backend: Word
    tensors: dict[str, Annotated[TensorModel, AfterValidator(lambda made: (made.dtype, made.shape, made.device))]] = {}
    flags: dict[str, Annotated[Any, PlainValidator(_flag)]] = {}
    compiled: bool = False
    strides: dict[str, Sizes] = {}
    requires_grad: Names = ()
    grad_mode: bool = True
    lost: Names = ()

    @model_validator(mode='after')
    def _check_tensors(self) -> RecordModel:
        tensors: Mapping[str, Any] = self.tensors
        for name, strides in self.strides.items():
            if name not in tensors or len(strides) != len(tensors[name][1]):
                raise ValueError(f'strides.{name} must have one number for each dimension of a tensor of the record')
        for name in self.requires_grad:
            dtype = getattr(torch, tensors[name][0]) if name in tensors else torch.bool
            if not dtype.is_floating_point and not dtype.is_complex:
                raise ValueError(f'requires_grad must name floating-point tensors of the record, got {name!r}')
        return self


def read(data: Mapping[str, Any], number: int) -> Record:
    """Returns the record that `Record.to_dict` wrote.

    Args:
        number: its index in the list, for errors.

    Raises:
        ValueError: lists every mistake with its key.
    """
    try:
        return Record(**dict(RecordModel.model_validate(dict(data))))
    except ValidationError as error:
        models = {'': RecordModel, 'tensors': TensorModel}
        raise ValueError('; '.join(f'calls[{number}].{message(one, models)}' for one in error.errors())) from None
