"""The keys and values of a policy file, which become the fields of `Policy`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat

from fla.backends.policy_files.validation import Strict, Word


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Words = Annotated[list[Word], BeforeValidator(_listed)]
SomeWords = Annotated[list[Word], BeforeValidator(_listed), Field(min_length=1)]


class RuleModel(Strict):
    """One rule."""

    ops: SomeWords
    use: SomeWords
    when: Word | None = None
    priority: FiniteFloat = 0


class BreakerModel(Strict):
    """Settings of the circuit breaker."""

    threshold: Annotated[int, Field(ge=1)] = 5
    cooldown: Annotated[FiniteFloat, Field(ge=0)] = 30
    probe_timeout: Annotated[FiniteFloat, Field(gt=0)] = 300


class PolicyModel(Strict):
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


# by the key that holds them, for `message`
MODELS = {'': PolicyModel, 'rules': RuleModel, 'breaker': BreakerModel}
