"""Runs tests of kernels without the dispatcher, as users' CI does that measures a baseline.

    FLA_DISABLE_BACKEND_DISPATCH=1 TRITON_INTERPRET=1 pytest -p tests.baseline -m interpreted tests/ops tests/modules

Only the default is left, so `use_backend('default')` changes nothing, and `last_backend()` answers 'default'. A test is
deselected if its own source names anything else of the dispatcher, compiles, or expects arguments to be checked.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator

import pytest

import fla.backends
from tests.modules import oracle

DISPATCHER = re.compile(
    r'\b(explain|trace|NoBackendError|policy_context|setenv|bind|resolve|reference|backends|compile\w*|fullgraph|export\w*'
    r'|refuse)\b'
)


def _use_backend(backend: str, **_: object) -> contextlib.AbstractContextManager[None]:
    if backend != 'default':
        pytest.skip(f'use_backend({backend!r}) needs the dispatcher')
    return contextlib.nullcontext()


@contextlib.contextmanager
def _served_by(backend: str) -> Iterator[None]:
    with _use_backend(backend):
        yield


fla.backends.use_backend = _use_backend
oracle.served_by = _served_by
fla.backends.observe.last_backend = fla.backends.observe.Trace.last_backend = lambda *_: 'default'


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs = {item for item in items if DISPATCHER.search(inspect.getsource(item.function))}  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[item for item in items if item in needs])
    items[:] = [item for item in items if item not in needs]
