"""Tests of operations see no policy of whoever runs them."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_policy(monkeypatch):
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
