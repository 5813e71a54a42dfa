"""Fixtures for the tests of the layers."""

import pytest
import torch

from fla.layers import attn, padding


@pytest.fixture(autouse=True)
def fresh_compiler():
    """All layers share their code, and Dynamo limits the compiled variants of one function."""
    torch._dynamo.reset()


@pytest.fixture(params=['syncs', 'packs padding', 'masks', 'masks, padded keys'])
def padded(request, monkeypatch):
    """The paths of a padded batch: eager code, which waits for the device, and code that may not wait. Attention has two of
    the latter, and on a GPU adds masked keys."""
    if request.param != 'syncs':
        monkeypatch.setattr(padding, 'may_sync', lambda x: False)
        monkeypatch.setattr(attn, 'packs_for_attention', lambda x: request.param == 'packs padding')
    if request.param == 'masks, padded keys':
        monkeypatch.setattr(attn, 'takes_cudnn', lambda *asked: True)
        monkeypatch.setattr(attn, 'KEYS_MULTIPLE', 4)
    return request.param
