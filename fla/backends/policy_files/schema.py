"""The keys and values of a policy file, which become the fields of `Policy`; and pydantic's errors in plain words."""

from __future__ import annotations

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


# pydantic's own texts would name the classes above
_KINDS = {'model_type': 'mapping of keys', 'dict_type': 'mapping', 'list_type': 'list'}


def message(error: Any) -> str:
    """Returns one of pydantic's errors as text: the key, the value, what is allowed."""
    place, value = error['loc'], error['input']
    name = '.'.join(str(part) for part in place if part != '[key]')
    if error['type'] == 'extra_forbidden':
        known = _keys(place[:-1])
        where = f' in {".".join(map(str, place[:-1]))}' if place[:-1] else ''
        return f'unknown key {place[-1]!r}{where}.{nearest(str(place[-1]), known)} Known: {", ".join(known)}'
    if error['type'] == 'missing':
        return f'{name} is missing'
    if error['type'] in _KINDS:
        return f'{name} must be a {_KINDS[error["type"]]}, got {value!r:.80}'
    if error['type'] == 'too_short':
        return f'{name} is empty; leave it out'
    text = error['msg'][:1].lower() + error['msg'][1:]
    close = nearest(value, ('raise', 'fallback')) if error['type'] == 'literal_error' and isinstance(value, str) else ''
    boolean = ' YAML 1.2 has true and false only' if error['type'] == 'bool_type' and isinstance(value, str) else ''
    return f'{name}: {text}, got {value!r:.80}.{close}{boolean}'


def _keys(place: tuple[Any, ...]) -> Iterable[str]:
    if place[:1] == ('rules',):
        return RuleModel.model_fields
    return BreakerModel.model_fields if place[:1] == ('breaker',) else PolicyModel.model_fields
