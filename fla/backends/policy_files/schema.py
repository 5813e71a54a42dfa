"""The keys and values of a policy file, which become the fields of `Policy`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat

from fla.backends.policy.conditions import Condition
from fla.backends.policy_files.validation import Strict, Word


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _checked_condition(text: str) -> str:
    Condition(text)
    return text


ConditionText = Annotated[Word, AfterValidator(_checked_condition)]
Words = Annotated[list[Word], BeforeValidator(_listed)]
SomeWords = Annotated[list[Word], BeforeValidator(_listed), Field(min_length=1)]


class RuleModel(Strict):
    """One rule."""

    ops: SomeWords
    use: SomeWords
    when: ConditionText | None = None
    priority: FiniteFloat = 0


class BreakerModel(Strict):
    """Settings of the circuit breaker."""

    threshold: Annotated[int, Field(ge=1)] = 5
    cooldown: Annotated[FiniteFloat, Field(ge=0)] = 30
    probe_timeout: Annotated[FiniteFloat, Field(gt=0)] = 300


class PolicyModel(Strict):
    """The whole file. A key without a value is an error: its values may have been commented out by mistake."""

    prefer: SomeWords = []
    allow: Words = []
    deny: SomeWords = []
    order: dict[Word, Words] = {}
    lock: dict[Word, Words] = {}
    boost: dict[Word, dict[Word, FiniteFloat]] = {}
    rules: list[RuleModel] = []
    on_error: Literal['raise', 'fallback'] = 'raise'
    breaker: BreakerModel = BreakerModel()
    strict: bool = False
    require_first: bool = False
    check_values: bool = False


# by the key that holds them, for `message`
MODELS = {'': PolicyModel, 'rules': RuleModel, 'breaker': BreakerModel}
