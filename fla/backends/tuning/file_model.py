"""The keys and values of a file of measurements."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from fla.backends.policy_files.schema import ConditionText
from fla.backends.policy_files.validation import Strict, Word


class ChoiceModel(Strict):
    """The fields of `Choice`."""

    when: ConditionText | None
    use: Annotated[list[Word], Field(min_length=1)]


class TimingModel(Strict):
    """The fields of `Timing`."""

    call: dict[str, str]
    milliseconds: dict[str, Annotated[FiniteFloat, Field(ge=0)] | None]


class FunctionModel(Strict):
    """The fields of `Measured`."""

    rules: list[ChoiceModel]
    timings: list[TimingModel]


class FileModel(Strict):
    """The whole file."""

    format: Literal['fla measurements 1']
    device: str
    versions: dict[Word, str | None]
    functions: dict[str, FunctionModel]


# by the key that holds them, for `message`
MODELS = {'': FileModel, 'functions': FunctionModel, 'rules': ChoiceModel, 'timings': TimingModel}
