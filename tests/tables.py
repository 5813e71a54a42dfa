"""`table`: many small checks as one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def table(
    names: str | tuple[str, ...], rows: Iterable[Any], ids: Callable[[Any], str] | list[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test runs all rows and reports every row that fails.

    For rows that cost milliseconds, such as errors and their messages. Rows share the fixtures of the test; each starts with
    the same random numbers. A row may not skip.
    """
    names = tuple(name.strip() for name in names.split(',')) if isinstance(names, str) else names
    cases = [row if len(names) > 1 else (row,) for row in rows]

    def label(index: int) -> str:
        if isinstance(ids, list):
            return ids[index]
        return '-'.join(map(ids or repr, cases[index]))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for index, row in enumerate(cases):
                torch.default_generator.manual_seed(0)
                try:
                    test(**fixtures, **dict(zip(names, row, strict=True)))
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    line = error.__traceback__.tb_next.tb_lineno if error.__traceback__.tb_next else '?'
                    failed.append(f'row {index}, {label(index)[:200]}: line {line}: {type(error).__name__}: {error}')
            if failed:
                pytest.fail(f'{len(failed)} of {len(cases)} rows failed:\n' + '\n'.join(failed), pytrace=False)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
