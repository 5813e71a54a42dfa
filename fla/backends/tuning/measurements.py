"""What was measured on a card, as a file that people can read and edit, and the orders that follow from it.

JSON and not YAML: it is read at the start of every process, and the standard library reads it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.policy.conditions import Condition, ConditionError

FORMAT = 'fla measurements 1'
_KEYS = ('format', 'device', 'versions', 'functions')
_FUNCTION_KEYS = ('rules', 'timings')
_RULE_KEYS = ('when', 'use')


class MeasurementError(DispatchError, ValueError):
    """A file of measurements that is not one, or was made on another card."""


@dataclass(frozen=True)
class Timing:
    """One measured call: what was passed, and milliseconds by backend, the quickest first; None where it raised."""

    call: Mapping[str, str]
    milliseconds: Mapping[str, float | None]

    @property
    def order(self) -> tuple[str, ...]:
        """The backends that ran, the quickest first."""
        ran = {name: time for name, time in self.milliseconds.items() if time is not None}
        return tuple(sorted(ran, key=lambda name: ran[name]))


@dataclass(frozen=True)
class Choice:
    """An order for the calls that `when` holds for; None: for all."""

    when: str | None
    use: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """One function's choices, the first that holds decides, and the timings behind them."""

    choices: tuple[Choice, ...]
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Measurements:
    """Choices by 'operation.function', with the card and the versions they hold for."""

    device: str
    versions: Mapping[str, str | None]
    functions: Mapping[str, Measured]
    source: str = field(default='measure()', compare=False)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values, as they are written."""
        functions = {
            key: {
                'rules': [{'when': choice.when, 'use': list(choice.use)} for choice in measured.choices],
                'timings': [
                    {'call': dict(timing.call), 'milliseconds': dict(timing.milliseconds)} for timing in measured.timings
                ],
            }
            for key, measured in sorted(self.functions.items())
        }
        return {'format': FORMAT, 'device': self.device, 'versions': dict(self.versions), 'functions': functions}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; whoever reads it meanwhile sees the old one or the new one."""
        target = Path(path).expanduser()
        draft = target.with_name(f'{target.name}.{os.getpid()}')
        try:
            draft.write_text(json.dumps(self.to_dict(), indent=1) + '\n', encoding='utf-8')
            os.replace(draft, target)
        except OSError as error:  # of the file that was asked for
            draft.unlink(missing_ok=True)
            raise type(error)(error.errno, error.strerror, str(target)) from None

    def other_versions(self, here: Mapping[str, str | None]) -> list[str]:
        """What is another version here than where it was measured."""
        return [
            f'{name} was {version}, is {here.get(name)}'
            for name, version in self.versions.items()
            if here.get(name) != version
        ]


def read(path: str | os.PathLike[str]) -> Measurements:
    """The measurements in a file.

    Raises:
        MeasurementError: names everything that is wrong.
        OSError: if it cannot be read.
    """
    problems: list[str] = []
    try:
        content = json.loads(
            Path(path).expanduser().read_text(encoding='utf-8-sig'), object_pairs_hook=functools.partial(_object, problems)
        )
    except (ValueError, RecursionError) as error:
        raise MeasurementError(f'{path} is not JSON as measure() writes it: {error}') from None
    found = _read(content, problems)
    if problems:
        raise MeasurementError(f'{path} holds no measurements:\n' + '\n'.join(f'  {problem}' for problem in problems))
    return Measurements(content['device'], content['versions'], found, str(path))


def _object(problems: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        problems += [f'key {name!r} stands twice in one object' for name in found if names.count(name) > 1]
    return found


def _read(content: Any, problems: list[str]) -> dict[str, Measured]:
    if not _has_keys(content, _KEYS, 'the file', problems):
        return {}
    if content['format'] != FORMAT:
        problems.append(f'format is {content["format"]!r}, must be {FORMAT!r}')
    if not isinstance(content['device'], str):
        problems.append(f'device is the name of a card, got {content["device"]!r}')
    for name in ('versions', 'functions'):
        if not isinstance(content[name], dict):
            problems.append(f'{name} is an object, got {content[name]!r}')
            return {}
    for name, version in content['versions'].items():
        if not name or not isinstance(version, (str, type(None))):
            problems.append(f'versions.{name} is a version or null, got {version!r}')
    return {key: _function(key, value, problems) for key, value in content['functions'].items()}


def _function(key: str, value: Any, problems: list[str]) -> Measured:
    if not _has_keys(value, _FUNCTION_KEYS, f'functions.{key}', problems):
        return Measured(())
    choices, timings = [], []
    for number, rule in enumerate(_list(value['rules'], f'functions.{key}.rules', problems)):
        where = f'functions.{key}.rules[{number}]'
        if not _has_keys(rule, _RULE_KEYS, where, problems):
            continue
        if rule['when'] is not None:
            try:
                Condition(rule['when'])
            except ConditionError as error:
                problems.append(f'{where}.when is a condition or null: {error}')
        names = rule['use']
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
            problems.append(f'{where}.use is a list of backends, got {rule["use"]!r}')
        else:
            choices.append(Choice(rule['when'], tuple(names)))
    for number, timing in enumerate(_list(value['timings'], f'functions.{key}.timings', problems)):
        where = f'functions.{key}.timings[{number}]'
        if not _has_keys(timing, ('call', 'milliseconds'), where, problems):
            continue
        times = timing['milliseconds']
        before = len(problems)
        for name, value in (('call', timing['call']), ('milliseconds', times)):
            if not isinstance(value, dict):
                problems.append(f'{where}.{name} is an object, got {value!r:.80}')
        for name, value in times.items() if isinstance(times, dict) else ():
            if not _is_time(value):
                problems.append(
                    f'{where}.milliseconds.{name} is a number from 0, or null where it raised; got {value!r:.80}'
                )
        if len(problems) == before:
            timings.append(Timing(timing['call'], times))
    return Measured(tuple(choices), tuple(timings))


def _is_time(value: Any) -> bool:
    return value is None or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    )


def _list(value: Any, where: str, problems: list[str]) -> list[Any]:
    if isinstance(value, list):
        return value
    problems.append(f'{where} is a list, got {value!r}')
    return []


def _has_keys(value: Any, keys: Sequence[str], where: str, problems: list[str]) -> bool:
    if not isinstance(value, dict):
        problems.append(f'{where} is an object with {", ".join(keys)}, got {value!r}')
        return False
    unknown, missing = sorted(set(value) - set(keys)), [key for key in keys if key not in value]
    if unknown:
        problems.append(f'{where} has the unknown key {", ".join(map(repr, unknown))}; there are {", ".join(keys)}')
    if missing:
        problems.append(f'{where} lacks {", ".join(map(repr, missing))}')
    return not unknown and not missing


# -- from timings to choices ----------------------------------------------------------------------------------------------


def chosen(milliseconds: Mapping[str, float | None], standing: Sequence[str], margin: float) -> tuple[str, ...]:
    """The backends that ran, the one to be asked first at the head: the quickest, if it beats the first of the standing
    order by more than `margin` of that one's time. What two runs of one kernel differ by is to change nothing."""
    order = Timing({}, milliseconds).order
    usual = next((name for name in standing if name in order), None)
    if usual is None or _number(milliseconds[order[0]]) < (1 - margin) * _number(milliseconds[usual]):
        return order
    return (usual, *(name for name in order if name != usual))


def _number(time: float | None) -> float:
    assert time is not None
    return time


Interval = tuple[float, float]  # from (included) to (excluded)


def choose(
    points: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]], optional: Collection[str] = ()
) -> tuple[Choice, ...]:
    """The choices that follow from measured calls.

    Args:
        points: for each call what it is told by ('q.shape[1]' → 4096, 'q.dtype' → 'bfloat16', 'cu_seqlens is None' → True)
            and the backends, the quickest first. No two are told alike.
        optional: parameters that other calls may leave out, so that a condition on their size asks for them first.

    What is the same in every call is not compared. Between two measured sizes the border is their geometric mean; the
    smallest and the largest size stand for whatever is smaller or larger.
    """
    if len({order[:1] for _, order in points}) == 1:
        return (Choice(None, points[0][1][:1]),)
    columns = _telling_columns([features for features, _ in points])
    borders = {name: _borders(points, name) for name in columns if _is_size(points, name)}
    cells: dict[tuple[Any, ...], tuple[str, ...]] = {}
    for features, order in points:
        cell = tuple(borders[name][features[name]] if name in borders else features[name] for name in columns)
        cells[cell] = order[:1]
    values = [{cell[n] for cell in cells} for n in range(len(columns))]
    merged = _merge(list(cells.items()), [None if name in borders else values[n] for n, name in enumerate(columns)])
    return tuple(Choice(_condition(columns, cell, borders, optional), order) for cell, order in merged)


def _telling_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [name for name in rows[0] if all(name in row for row in rows)]
    seen: list[tuple[Any, ...]] = []
    telling = []
    for name in names:
        column = tuple(row[name] for row in rows)
        if len(set(column)) > 1 and column not in seen:
            seen.append(column)
            telling.append(name)
    return telling


def _is_size(points: Sequence[tuple[Mapping[str, Any], Any]], name: str) -> bool:
    return all(type(features[name]) is int for features, _ in points)


def _borders(points: Sequence[tuple[Mapping[str, Any], Any]], name: str) -> dict[int, Interval]:
    sizes = sorted({features[name] for features, _ in points})
    ends = [float('-inf'), *(_between(a, b) for a, b in itertools.pairwise(sizes)), float('inf')]
    return {size: (ends[i], ends[i + 1]) for i, size in enumerate(sizes)}


def _between(small: int, large: int) -> float:
    return float(max(small + 1, min(large, round((max(small, 1) * large) ** 0.5))))


_EVERY_SIZE = (float('-inf'), float('inf'))
_ANY = None  # in a cell: not compared
Cells = list[tuple[tuple[Any, ...], tuple[str, ...]]]


def _merge(cells: Cells, values: Sequence[set[Any] | None]) -> Cells:
    """Joins cells of one choice that differ in one column, where they are neighbours (sizes: `values` is None) or all there
    are (others), until there are none."""
    while (fewer := _merge_one(cells, values)) is not None:
        cells = fewer
    return cells


def _merge_one(cells: Cells, values: Sequence[set[Any] | None]) -> Cells | None:
    for cell, order in cells:
        for n, there in enumerate(values):
            alike = [(c, o) for c, o in cells if o == order and c[:n] + c[n + 1 :] == cell[:n] + cell[n + 1 :]]
            found = {c[n] for c, _ in alike}
            if there is not None:
                joined = _ANY
                partners = alike if found == there and len(there) > 1 else []
            else:
                partners = [(c, o) for c, o in alike if c is cell or cell[n][1] == c[n][0]]
                joined = (cell[n][0], max(c[n][1] for c, _ in partners))
            if len(partners) > 1:
                rest = [one for one in cells if one not in partners]
                return [((*cell[:n], joined, *cell[n + 1 :]), order), *rest]
    return None


def _condition(
    columns: Sequence[str], cell: Sequence[Any], borders: Mapping[str, Any], optional: Collection[str]
) -> str | None:
    parts: list[str] = []
    for name, value in zip(columns, cell, strict=True):
        if name in borders:
            low, high = value
            there = f'{name.partition(".")[0]} is not None'
            if (low, high) != _EVERY_SIZE and name.partition('.')[0] in optional and there not in parts:
                parts.append(there)
            parts += [f'{name} >= {low:.0f}'] if low > float('-inf') else []
            parts += [f'{name} < {high:.0f}'] if high < float('inf') else []
        elif value is _ANY:
            continue
        elif isinstance(value, bool):
            no = name.replace(' is None', ' is not None') if name.endswith(' is None') else f'not {name}'
            parts.append(name if value else no)
        else:
            parts.append(f'{name} == {value}')
    return ' and '.join(parts) or None
