"""Whether autocast is on, asked in compiled code."""

import pytest
import torch

from fla.ops.common.reference import autocast_is_on


def test_compiled_where_pytorch_cannot_trace_its_own_question(monkeypatch):
    """As with PyTorch 2.11, whose Dynamo breaks the graph at `is_autocast_available`."""
    monkeypatch.setattr(torch.amp, 'is_autocast_available', torch.compiler.disable(torch.amp.is_autocast_available))
    asked = torch.compile(lambda x: (autocast_is_on(x.device.type), x + 1), fullgraph=True, backend='eager')
    x = torch.ones(2)
    assert not asked(x)[0]
    with torch.autocast('cpu', torch.bfloat16):
        assert asked(x)[0]
    assert not asked(x)[0]
    assert not asked(x.to('meta'))[0]


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_is_off_by_default(device):
    assert not autocast_is_on(device)
