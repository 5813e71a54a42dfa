"""Fixtures of the layers' tests."""

import pytest
import torch

from fla.layers import attn, padding


@pytest.fixture(autouse=True)
def fresh_compiler():
    """All layers share their code, of which so many variants are compiled and no more."""
    torch._dynamo.reset()


@pytest.fixture(params=['waits', 'packs padding', 'masks', 'masks of few sizes'])
def padded(request, monkeypatch):
    """The roads of a padded batch: of eager code, and where nobody may wait; attention has two of those, and on a GPU adds
    keys that nobody sees."""
    if request.param != 'waits':
        monkeypatch.setattr(padding, 'may_wait', lambda x: False)
        monkeypatch.setattr(attn, 'may_pack', lambda x: request.param == 'packs padding')
    if request.param == 'masks of few sizes':
        monkeypatch.setattr(attn, 'takes_cudnn', lambda *asked: True)
        monkeypatch.setattr(attn, 'KEYS_MULTIPLE', 4)
    return request.param
