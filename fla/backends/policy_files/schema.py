"""What may stand in a policy file. The texts are those of the fields of `Policy`, which a file becomes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from fla.utils.env import nearest


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Word = Annotated[str, Field(min_length=1, pattern=r'\S')]
Words = Annotated[list[Word], BeforeValidator(_listed)]
SomeWords = Annotated[list[Word], BeforeValidator(_listed), Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra='forbid', strict=True)


class RuleModel(_Strict):
    """One rule."""

    ops: SomeWords
    use: SomeWords
    when: Word | None = None
    priority: FiniteFloat = 0


class BreakerModel(_Strict):
    """Settings of the circuit breaker."""

    threshold: Annotated[int, Field(ge=1)] = 5
    cooldown: Annotated[FiniteFloat, Field(ge=0)] = 30
    probe_timeout: Annotated[FiniteFloat, Field(gt=0)] = 300


class PolicyModel(_Strict):
    """The whole file."""

    prefer: SomeWords | None = None
    allow: Words | None = None
    deny: SomeWords | None = None
    order: dict[Word, Words] | None = None
    lock: dict[Word, Words] | None = None
    boost: dict[Word, dict[Word, FiniteFloat]] | None = None
    rules: list[RuleModel] | None = None
    on_error: Literal['raise', 'fallback'] | None = None
    breaker: BreakerModel | None = None
    strict: bool | None = None
    require_first: bool | None = None
    check_values: bool | None = None


def _keys(place: tuple[Any, ...]) -> Iterable[str]:
    if place[:1] == ('rules',):
        return RuleModel.model_fields
    return BreakerModel.model_fields if place[:1] == ('breaker',) else PolicyModel.model_fields


def message(error: Any) -> str:
    """One of pydantic's errors in our words: which key, what came, what is allowed."""
    place, came = error['loc'], error['input']
    name = '.'.join(str(part) for part in place if part != '[key]')
    if error['type'] == 'extra_forbidden':
        known = _keys(place[:-1])
        where = f' in {".".join(map(str, place[:-1]))}' if place[:-1] else ''
        return f'unknown key {place[-1]!r}{where}.{nearest(str(place[-1]), known)} Known: {", ".join(known)}'
    if error['type'] == 'missing':
        return f'{name} is missing'
    if error['type'] in _KINDS:
        return f'{name} is no {_KINDS[error["type"]]}, got {came!r:.80}'
    if error['type'] == 'too_short':
        return f'{name} names nothing; leave it out'
    close = nearest(came, ('raise', 'fallback')) if error['type'] == 'literal_error' and isinstance(came, str) else ''
    text = error['msg'][:1].lower() + error['msg'][1:]
    return f'{name}: {text}, got {came!r:.80}.{close}{_misread(came, error["type"])}'


# pydantic would name its own classes
_KINDS = {'model_type': 'mapping of keys', 'dict_type': 'mapping', 'list_type': 'list, and no word'}
_EXPONENT = re.compile(r'[-+]?\d+(\.\d*)?[eE]\d+|[-+]?\d+[eE][-+]\d+')


def _misread(came: Any, kind: str) -> str:
    """What YAML makes of some values, to the surprise of many."""
    if isinstance(came, bool) and kind in ('literal_error', 'string_type'):
        return ' YAML reads bare on, off, yes and no as true and false: write quotes'
    if isinstance(came, str) and _EXPONENT.fullmatch(came):
        return ' YAML reads a number with an exponent if it has a point and a sign: 1.0e+3'
    return ''
