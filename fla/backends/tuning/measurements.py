"""The file of measurements, which people can read and edit: times on one device, and the orders that follow from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.policy_files.extra import require_extra

FORMAT = 'fla measurements 1'


class MeasurementError(DispatchError, ValueError):
    """A call that cannot be measured, or a file that is malformed or was measured on another device."""


@dataclass(frozen=True)
class Timing:
    """One measured call: its arguments, and milliseconds by backend, the quickest first; None if the backend raised."""

    call: Mapping[str, str]
    milliseconds: Mapping[str, float | None]

    @property
    def order(self) -> tuple[str, ...]:
        """The backends that ran, the quickest first."""
        ran = {name: time for name, time in self.milliseconds.items() if time is not None}
        return tuple(sorted(ran, key=lambda name: ran[name]))


@dataclass(frozen=True)
class Choice:
    """An order for the calls on which the condition `when` holds; None for all calls."""

    when: str | None
    use: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """The rules of one function, of which the first that holds decides, and the timings behind them."""

    rules: tuple[Choice, ...]
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Measurements:
    """Rules by 'operation.function', with the device and the versions they were measured with."""

    device: str
    versions: Mapping[str, str | None]
    functions: Mapping[str, Measured]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values, as they are written."""
        functions = {key: asdict(measured) for key, measured in sorted(self.functions.items())}
        return {'format': FORMAT, 'device': self.device, 'versions': dict(self.versions), 'functions': functions}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file at once: a reader sees the old content or the new content."""
        target = Path(path).expanduser()
        draft = target.with_name(f'{target.name}.{os.getpid()}')
        try:
            draft.write_text(json.dumps(self.to_dict(), indent=1) + '\n', encoding='utf-8')
            os.replace(draft, target)
        except OSError as error:  # names the file that was asked for
            draft.unlink(missing_ok=True)
            raise type(error)(error.errno, error.strerror, str(target)) from None

    def other_versions(self, here: Mapping[str, str | None]) -> list[str]:
        """Returns the versions that differ from those in `here`, as text."""
        return [
            f'{name} was {version}, is {here.get(name)}'
            for name, version in self.versions.items()
            if here.get(name) != version
        ]


def read(path: str | os.PathLike[str]) -> Measurements:
    """Reads a file of measurements.

    Raises:
        MeasurementError: lists every mistake.
        OSError: if the file cannot be read.
        ImportError: without pydantic.
    """
    require_extra('a file of measurements', 'pydantic')
    from pydantic import ValidationError

    from fla.backends.policy_files.validation import message
    from fla.backends.tuning.file_model import MODELS, FileModel

    errors: list[str] = []

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        errors.extend(f'key {name!r} is a duplicate' for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        text = Path(path).expanduser().read_text(encoding='utf-8-sig')
        content = json.loads(text, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise MeasurementError(f'{path} is not JSON as measure() writes it: {error}') from None
    try:
        file = FileModel.model_validate(content)
    except ValidationError as error:
        errors += [message(one, MODELS) for one in error.errors()]
    if errors:
        raise MeasurementError(f'{path} is not a file of measurements:\n' + '\n'.join(f'  {error}' for error in errors))
    functions = {
        key: Measured(
            tuple(Choice(rule.when, tuple(rule.use)) for rule in function.rules),
            tuple(Timing(timing.call, timing.milliseconds) for timing in function.timings),
        )
        for key, function in file.functions.items()
    }
    return Measurements(file.device, file.versions, functions)
