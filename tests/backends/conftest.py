"""Each test of the framework starts with a fresh dispatcher and no FLA_* variables, and resets Dynamo at its end."""

import os
import sys

import pytest
import torch

from fla.backends import default_dispatcher
from tests.backends.library import Library


@pytest.fixture(autouse=True)
def fresh_dispatch(monkeypatch):
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()
    if 'torch._dynamo' in sys.modules:
        sys.modules['torch._dynamo'].reset()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package of its own for a test, importable while the test runs."""
    made = Library(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    made.forget()


@pytest.fixture
def many_recompiles():
    """Raises Dynamo's limit of recompilations of a function to 64."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
