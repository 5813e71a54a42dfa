"""Fixtures of attention's tests."""

import os

import pytest

from fla.backends import default_dispatcher


@pytest.fixture
def fresh_dispatch(monkeypatch):
    """Removes our environment variables, and resets the dispatcher before and after."""
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()
