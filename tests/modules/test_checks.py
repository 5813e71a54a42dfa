"""Checks that decode steps wait for: a common call is checked in few reads, with the same verdict as by the full checks."""

import itertools
import math

import pytest
import torch

from fla.modules import RotaryEmbedding, checks
from fla.modules.activations import ops as activations
from fla.modules.causal_conv1d import ops as convolution
from fla.modules.norm import fused_norm_gate, layernorm
from fla.modules.rotary import ops as rotary
from fla.ops.attn import checks as attention

ONES = torch.ones
STEP = {'cache': ONES(2, 8, 4), 'weight': ONES(8, 4), 'bias': ONES(8), 'activation': 'silu'}
NORM = {'x': ONES(2, 3, 4), 'weight': ONES(4), 'bias': ONES(4), 'residual': ONES(2, 3, 4), 'eps': 1e-5}
TURN = {'cos': ONES(9, 4), 'sin': ONES(9, 4), 'inplace': False, 'cu_seqlens': None, 'check_values': False}
ATTENTION = {'g': None, 'scale': 0.5, 'cu_seqlens': None, 'chunk_indices': None, 'sink_bias': None, 'check_values': False}

# common calls, some of whose variants are valid too: check, arguments
USUAL = {
    'norm': (layernorm.check_norm, NORM),
    'gated norm': (fused_norm_gate._check, {**NORM, 'g': ONES(2, 3, 4), 'activation': 'sigmoid'}),
    'swiglu': (activations._check_swiglu, {'x': ONES(2, 4), 'y': ONES(2, 4)}),
    'silu_and_mul': (activations._check_silu_and_mul, {'x': ONES(2, 4)}),
    'swiglu_linear': (
        activations._check_swiglu_linear,
        {'x': ONES(2, 4), 'y': ONES(2, 4), 'weight': ONES(3, 4), 'bias': ONES(3)},
    ),
    'step': (convolution._check_update, {**STEP, 'x': ONES(2, 8), 'residual': ONES(2, 8)}),
    'step of rows': (convolution._check_update, {**STEP, 'x': ONES(2, 1, 8), 'residual': ONES(2, 1, 8)}),
    'rotary': (rotary._check, {**TURN, 'x': ONES(2, 3, 2, 8), 'seqlen_offsets': 3}),
    'rotary in place': (rotary._check, {**TURN, 'x': ONES(2, 3, 2, 8), 'seqlen_offsets': 6, 'inplace': True}),
    'rotary class': (
        RotaryEmbedding(4)._check,
        {'q': ONES(2, 3, 2, 8), 'k': ONES(2, 3, 1, 8), 'seqlen_offset': -3, 'cu_seqlens': None, 'position_ids': None},
    ),
    'attention': (
        attention.check_parallel,
        {**ATTENTION, 'q': ONES(2, 3, 4, 8), 'k': ONES(2, 5, 2, 8), 'v': ONES(2, 5, 2, 6), 'window_size': 2},
    ),
}
OPTIONAL = {'bias', 'residual', 'scale', 'window_size'}
VALUES = [
    None,
    0,
    1,
    -1,
    2,
    6,
    7,
    0.5,
    1.0,
    True,
    math.nan,
    math.inf,
    'silu',
    'tanh',
    [],
    torch.tensor([3, 3]),
    ONES(2).bool(),
]


def others(value):
    """Replacements of an argument; for a tensor, views and copies, in a fixed order."""
    if not isinstance(value, torch.Tensor):
        return VALUES
    views = [
        *(value[:0], value[:1], value[None], value[..., None], value[0], value[..., 0], value[..., :-1], value[..., :0]),
        *(value.narrow(-1, 0, 1).expand(*value.shape[:-1], 300), value[:1].expand_as(value)),
        *(value[one] if value.dim() > 2 else value for one in SLICES),
        value.mT if value.dim() > 1 else value,
    ]
    copies = [value.to(dtype) for dtype in (torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64)]
    return [*views, *copies, value.to_sparse(), value.to('meta'), value.numpy(), value.tolist(), 1.0, None]


SLICES = [(slice(None), slice(2)), (slice(None), slice(None), slice(0)), (slice(None), slice(None), [0, 0, 0])]


def verdict(check, arguments):
    try:
        check(**arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error), str(error)
    return None


@pytest.fixture
def one_by_one(monkeypatch):
    """A function that makes every call take the full checks."""

    def switch():
        for module in (activations, convolution, layernorm, rotary):
            monkeypatch.setattr(module, 'is_dense_float', lambda tensor: False)
        monkeypatch.setattr(attention, '_is_common_case', lambda q, k, v: False)

    return switch


@pytest.mark.parametrize('name', USUAL)
def test_few_reads_and_many_say_the_same(one_by_one, name):
    check, whole = USUAL[name]
    calls = []
    for usual in (whole, {**whole, **dict.fromkeys(OPTIONAL & set(whole))}):
        tensors = [one for one, value in usual.items() if isinstance(value, torch.Tensor)]
        calls += [usual, *({**usual, one: other} for one, value in usual.items() for other in others(value))]
        for some in (*itertools.combinations(tensors, 2), *itertools.combinations(tensors, 3)):
            changes = zip(*(others(usual[one]) for one in some), strict=True)
            calls += [{**usual, **dict(zip(some, change, strict=True))} for change in changes]
    found = [verdict(check, call) for call in calls]
    one_by_one()
    assert found == [verdict(check, call) for call in calls]
    assert None in found[1:]
    assert any(found)


@pytest.mark.parametrize('name', USUAL)
def test_a_usual_call_is_looked_at_in_few_reads(monkeypatch, name):
    def refuse(*_, **__):
        raise AssertionError('checked one by one')

    for module in (activations, attention, checks, convolution, fused_norm_gate, layernorm, rotary):
        monkeypatch.setattr(module, 'check_given', refuse)
    check, usual = USUAL[name]
    check(**usual)
    check(**{**usual, **dict.fromkeys(OPTIONAL & set(usual))})
