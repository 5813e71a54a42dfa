"""Rules that follow from timings: which backend to ask first, on which calls."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fla.backends.tuning.measurements import Choice, Timing

# Sizes from the first, included, to the second, excluded.
Interval = tuple[float, float]
Cell = tuple[Any, ...]
Cells = list[tuple[Cell, tuple[str, ...]]]

_EVERY_SIZE = (float('-inf'), float('inf'))
_ANY = None  # in a cell: not compared


def order_by_time(milliseconds: Mapping[str, float | None], standing: Sequence[str], margin: float) -> tuple[str, ...]:
    """Returns the backends that ran, the one to ask first at the head.

    That is the first of the standing order, unless the quickest takes less than `1 - margin` of its time: the difference
    between two runs of one kernel must change nothing.
    """
    order = Timing({}, milliseconds).order
    usual = next((name for name in standing if name in order), None)
    if usual is None or (milliseconds[order[0]] or 0.0) < (1 - margin) * (milliseconds[usual] or 0.0):
        return order
    return (usual, *(name for name in order if name != usual))


def choose(
    points: Sequence[tuple[Mapping[str, Any], tuple[str, ...]]], optional: Collection[str] = ()
) -> tuple[Choice, ...]:
    """Returns the rules that follow from measured calls.

    What is the same in every call is not compared. The border between two measured sizes is their geometric mean; the
    smallest and the largest size stand for every smaller or larger one.

    Args:
        points: for each call its features ('q.shape[1]' → 4096, 'q.dtype' → 'bfloat16', 'cu_seqlens is None' → True) and the
            backends, the quickest first. No two calls have the same features.
        optional: parameters that other calls may leave out, so that a condition on their size asks for them first.
    """
    if len({order[:1] for _, order in points}) == 1:
        return (Choice(None, points[0][1][:1]),)
    columns = _distinct_columns([features for features, _ in points])
    borders = {name: _borders(points, name) for name in columns if _is_size(points, name)}
    cells: dict[Cell, tuple[str, ...]] = {}
    for features, order in points:
        cell = tuple(borders[name][features[name]] if name in borders else features[name] for name in columns)
        cells[cell] = order[:1]
    values = [None if name in borders else {cell[n] for cell in cells} for n, name in enumerate(columns)]
    merged = _merge(list(cells.items()), values)
    return tuple(Choice(_condition(columns, cell, borders, optional), order) for cell, order in merged)


def _distinct_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the features that all rows have, that vary, and that differ from the features before them."""
    columns: dict[tuple[Any, ...], str] = {}
    for name in rows[0]:
        if all(name in row for row in rows):
            columns.setdefault(tuple(row[name] for row in rows), name)
    return [name for column, name in columns.items() if len(set(column)) > 1]


def _is_size(points: Sequence[tuple[Mapping[str, Any], Any]], name: str) -> bool:
    return all(type(features[name]) is int for features, _ in points)


def _borders(points: Sequence[tuple[Mapping[str, Any], Any]], name: str) -> dict[int, Interval]:
    """Returns the interval that each measured size stands for."""
    sizes = sorted({features[name] for features, _ in points})
    ends = [float('-inf'), *(_between(a, b) for a, b in itertools.pairwise(sizes)), float('inf')]
    return {size: (ends[i], ends[i + 1]) for i, size in enumerate(sizes)}


def _between(small: int, large: int) -> float:
    return float(max(small + 1, min(large, round((max(small, 1) * large) ** 0.5))))


def _merge(cells: Cells, values: Sequence[set[Any] | None]) -> Cells:
    """Joins cells of one choice that differ in one column, until none are left: sizes (None in `values`) where they are
    neighbours, other columns where all their values are there."""
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
