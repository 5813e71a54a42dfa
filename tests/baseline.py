"""Runs tests of kernels without the dispatcher, as users' CI does that measures a baseline.

    FLA_DISABLE_BACKEND_DISPATCH=1 TRITON_INTERPRET=1 pytest -p tests.baseline -m interpreted tests/ops tests/modules

Only the default is left, so `use_backend('default')` changes nothing, and `last_backend()` answers 'default'. A test whose
own source names anything else of the dispatcher, or compiles, is deselected.
"""

from __future__ import annotations

import contextlib
import inspect
import re

import pytest

import fla.backends

DISPATCHER = re.compile(
    r'\b(explain|trace|NoBackendError|policy_context|setenv|bind|resolve|reference|backends|compile\w*|fullgraph|export\w*)\b'
)


def _use_backend(backend: str, **_: object) -> contextlib.AbstractContextManager[None]:
    if backend != 'default':
        pytest.skip(f'use_backend({backend!r}) needs the dispatcher')
    return contextlib.nullcontext()


fla.backends.use_backend = _use_backend
fla.backends.last_backend = fla.backends.Trace.last_backend = lambda *_: 'default'


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs = {item for item in items if DISPATCHER.search(inspect.getsource(item.function))}  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[item for item in items if item in needs])
    items[:] = [item for item in items if item not in needs]
