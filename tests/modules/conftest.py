"""Fixtures of every test of the modules."""

import itertools

import pytest

from tests.modules import oracle


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch):
    monkeypatch.setattr(oracle, 'seeds', itertools.count())
