"""Shared by the pydantic models of files: a strict base class, and errors in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fla.utils.env import nearest


class Strict(BaseModel):
    """A mapping with these keys and no others, whose values are not converted."""

    model_config = ConfigDict(extra='forbid', strict=True)


Word = Annotated[str, Field(min_length=1, pattern=r'\S')]

# pydantic's own texts would name the models
_KINDS = {'model_type': 'mapping of keys', 'dict_type': 'mapping', 'list_type': 'list'}


def message(error: Any, models: Mapping[str, Any]) -> str:
    """Returns one of pydantic's errors as text: the key, what is allowed, the value.

    Args:
        error: an element of `ValidationError.errors()`.
        models: the model of the whole file under '', and of each mapping in it under the key that holds it.
    """
    place, value = error['loc'], error['input']
    name = '.'.join(str(part) for part in place if part != '[key]')
    if error['type'] == 'extra_forbidden':
        known = next((models[part] for part in reversed(place[:-1]) if part in models), models['']).model_fields
        where = f' in {".".join(map(str, place[:-1]))}' if place[:-1] else ''
        return f'unknown key {place[-1]!r}{where}.{nearest(str(place[-1]), known)} Known: {", ".join(known)}'
    if error['type'] == 'missing':
        return f'{name} is missing'
    if value is None:
        return f'{name} has no value; leave it out'
    if error['type'] in _KINDS:
        return f'{name} must be a {_KINDS[error["type"]]}, got {value!r:.80}'
    if error['type'] == 'too_short':
        return f'{name} is empty; leave it out'
    if error['type'] == 'value_error':
        return f'{name}: {error["ctx"]["error"]}'
    text = error['msg'][:1].lower() + error['msg'][1:]
    return f'{name}: {text}, got {value!r:.80}.{_hint(error)}'


def _hint(error: Any) -> str:
    if not isinstance(error['input'], str):
        return ''
    if error['type'] == 'literal_error':
        return nearest(error['input'], error['ctx']['expected'].replace("'", '').split(' or '))
    return ' YAML 1.2 has true and false only' if error['type'] == 'bool_type' else ''
