"""Whether autocast is on, asked in compiled code, and that it rounds nothing of what is computed in float32."""

import pytest
import torch

from fla.ops.attn import parallel_attn
from fla.ops.backends import trace, use_backend
from fla.ops.common.reference import autocast_is_on
from tests import bounds


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


@pytest.mark.parametrize('cu_seqlens', [None, torch.tensor([0, 4, 9])], ids=['whole', 'packed'])
@pytest.mark.parametrize('value_dim', [16, 8])
@pytest.mark.parametrize('backend', ['reference', 'sdpa'])
def test_a_step_of_training_with_attention_under_autocast(backend, value_dim, cu_seqlens):
    """Forward and backward, and outside of it the backward of that, as without."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 4, 16), (1, 9, 2, 16), (1, 9, 2, value_dim))
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
    dense = {'g': -torch.rand(1, 9, 4, requires_grad=True)} if backend == 'reference' else {}
    leaves, found = (q, k, v, *dense.values()), []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled), use_backend(backend, op='attn'), trace() as recorded:
            o = parallel_attn(q, k, v, cu_seqlens=cu_seqlens, **dense)
            first = torch.autograd.grad(o.square().sum(), leaves, create_graph=backend == 'reference')
        assert recorded.last_backend('attn.parallel_attn') == backend
        second = torch.autograd.grad(first[0].square().sum(), leaves) if backend == 'reference' else ()
        found.append([o, *first, *second])
    for without, under in zip(*found, strict=True):
        assert under.dtype == torch.float32
        assert bounds.relative_rms(without.detach().double(), under.detach()) <= bounds.EXACT[torch.float32]
