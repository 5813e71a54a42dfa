"""rotary_embedding and RotaryEmbedding."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fla.backends import Policy, policy_context
from fla.modules import RotaryEmbedding
from fla.modules.rotary import rotary_embedding, rotary_embedding_ref
from tests import bounds
from tests.tables import table

from .oracle import DTYPES, check, error, served_by, tensor
from .rotary import rotated


def oracle(x, cos, sin, interleaved=False, seqlen_offsets=0, cu_seqlens=None, **_):
    """Pair by pair, as multiplication by a complex number."""
    half = cos.shape[1]
    out = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            sequence = b if cu_seqlens is None else int((cu_seqlens[1:] <= t).sum())
            place = t if cu_seqlens is None else t - int(cu_seqlens[sequence])
            place += int(seqlen_offsets[sequence]) if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
            row = list(x[b, t].unbind(-1))
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                c, s, u, w = cos[place, i], sin[place, i], row[first], row[second]
                row[first], row[second] = u * c - w * s, u * s + w * c
            out.append(torch.stack(row, -1))
    return torch.stack(out).reshape(x.shape)


@served_by('reference')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
@pytest.mark.parametrize('rotated', [6, 4])
def test_against_the_formula(dtype, interleaved, rotated):
    arguments = {
        'x': tensor(2, 3, 2, 6, dtype=dtype),
        'cos': tensor(5, rotated // 2, dtype=dtype),
        'sin': tensor(5, rotated // 2, dtype=dtype),
    }
    for offsets in (0, 2, torch.tensor([2, 1])):
        check(rotary_embedding, oracle, arguments, bounds.of_module(dtype), interleaved=interleaved, seqlen_offsets=offsets)


@served_by('reference')
@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
@pytest.mark.parametrize('offsets', [0, 3, torch.tensor([1, 0, 4, 2], dtype=torch.int32)], ids=['0', '3', 'tensor'])
def test_packed(offsets, interleaved):
    arguments = {'x': tensor(1, 7, 2, 4), 'cos': tensor(8, 2), 'sin': tensor(8, 2)}
    cu = torch.tensor([0, 2, 2, 3, 7])
    options = {'seqlen_offsets': offsets, 'cu_seqlens': cu, 'interleaved': interleaved}
    check(rotary_embedding, oracle, arguments, bounds.TWO_ORACLES, **options)


@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
def test_two_definitions(interleaved):
    x, cos, sin = tensor(2, 7, 2, 6), tensor(12, 2), tensor(12, 2)
    packed = {'cu_seqlens': torch.tensor([0, 2, 2, 3, 7]), 'seqlen_offsets': torch.tensor([1, 0, 4, 2])}
    for one, options in ((x, {}), (x, {'seqlen_offsets': torch.tensor([3, 1])}), (x[:1], packed)):
        options['interleaved'] = interleaved
        assert bounds.relative_rms(oracle(one, cos, sin, **options), rotated(one, cos, sin, **options)) <= bounds.TWO_ORACLES


def test_in_place_and_strides():
    x, cos, sin = tensor(4, 2, 3, 2).permute(3, 2, 1, 0), tensor(3, 2), tensor(3, 2)
    expected = oracle(x, cos, sin)
    assert error(expected, rotary_embedding(x, cos, sin)) <= bounds.TWO_ORACLES
    assert rotary_embedding(x, cos, sin, inplace=True) is x
    assert error(expected, x) <= bounds.TWO_ORACLES
    assert error(oracle(x, cos, sin), rotary_embedding_ref(x, cos, sin)) <= bounds.TWO_ORACLES

    leaf = tensor(1, 3, 1, 4, grad=True)
    (got,) = torch.autograd.grad((rotary_embedding(leaf * 2, cos, sin, inplace=True) ** 2).sum(), leaf)
    (expected,) = torch.autograd.grad((oracle(leaf * 2, cos, sin) ** 2).sum(), leaf)
    assert error(expected, got) <= bounds.TWO_ORACLES


def test_empty():
    table = torch.ones(4, 2)
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4)):
        assert rotary_embedding(torch.zeros(shape), table, table).shape == shape
    none = torch.zeros(1, dtype=torch.int32)
    assert rotary_embedding(torch.zeros(1, 0, 2, 4), table, table, cu_seqlens=none).shape == (1, 0, 2, 4)


def test_positions_beyond_the_table(monkeypatch):
    monkeypatch.setattr('fla.modules.rotary.ops.readable', lambda one: False)  # as on a GPU
    x, table = torch.ones(1, 3, 1, 2), torch.arange(4.0)[:, None]
    y = rotary_embedding(x, table, 0 * table, seqlen_offsets=torch.tensor([2]))
    assert y[0, :, 0, 0].tolist() == [2, 3, 3]
    with policy_context(Policy(check_values=True)), pytest.raises(ValueError, match='positions go from 2 to 4'):
        rotary_embedding(x, table, 0 * table, seqlen_offsets=torch.tensor([2]))


@pytest.mark.parametrize(
    ('offsets', 'lens', 'message'),
    [
        (-1, [0, 5], 'seqlen_offsets = -1'),
        (10**9, [0, 5], f'seqlen_offsets = {10**9}'),
        (7, [0, 0, 2, 5], 'positions go from 7 to 9'),
        (torch.tensor([-1]), [0, 5], 'positions go from -1 to 3'),
        (torch.tensor([0, 7], dtype=torch.int32), [0, 2, 5], 'positions go from 0 to 9'),
        (torch.tensor([5]), None, 'positions go from 5 to 9'),
        (torch.tensor([-3]), None, 'positions go from -3 to 1'),
    ],
    ids=str,
)
def test_positions_that_can_be_read_are_in_the_table(offsets, lens, message):
    x, table = torch.randn(1, 5, 2, 8), torch.randn(9, 4)
    with pytest.raises(ValueError, match=message):
        rotary_embedding(x, table, table, seqlen_offsets=offsets, cu_seqlens=None if lens is None else torch.tensor(lens))


@served_by('reference')
def test_positions_of_nothing_are_in_no_table():
    """A sequence without steps may begin anywhere, and tables may end with the last step."""
    x, table, cu = tensor(1, 5, 2, 8), tensor(9, 4), torch.tensor([0, 0, 2, 5])
    for offsets in (6, torch.tensor([-1, 7, 6]), torch.tensor([99, 0, 0])):
        found = rotary_embedding(x, table, table, seqlen_offsets=offsets, cu_seqlens=cu)
        assert error(oracle(x, table, table, seqlen_offsets=offsets, cu_seqlens=cu), found) <= bounds.TWO_ORACLES


def of_class(*, q=(2, 5, 4, 8), k=(2, 5, 2, 8), **arguments):
    return RotaryEmbedding(8)(torch.randn(q), torch.randn(k), **arguments)


ROW = {'q': (1, 5, 4, 8), 'k': (1, 5, 2, 8)}


@pytest.mark.parametrize(
    ('arguments', 'kind', 'message'),
    [
        ({'seqlen_offset': torch.tensor([1, 2, 3])}, ValueError, r'seqlen_offset must be an int or a tensor \[N\] = \[2\]'),
        ({'seqlen_offset': torch.tensor([7])}, ValueError, 'seqlen_offset must be'),
        ({'seqlen_offset': torch.tensor(7)}, ValueError, 'seqlen_offset must be'),
        ({'seqlen_offset': torch.tensor([1.5, 2.0])}, TypeError, 'seqlen_offset must be int32 or int64'),
        ({'seqlen_offset': 1.5}, TypeError, 'seqlen_offset must be an int, got float'),
        ({'seqlen_offset': True}, TypeError, 'seqlen_offset must be an int, got bool'),
        ({'seqlen_offset': torch.zeros(2).int().to('meta')}, ValueError, "'seqlen_offset' is on meta"),
        ({'cu_seqlens': torch.tensor([0, 3, 5])}, ValueError, 'batch must be 1'),
        ({'cu_seqlens': torch.tensor([0, 3]), **ROW}, ValueError, 'must start at 0 and end at T = 5'),
        ({'cu_seqlens': torch.tensor([0, 4, 2, 5]), **ROW}, ValueError, 'cu_seqlens must not decrease'),
        ({'cu_seqlens': torch.tensor([0.0, 5.0]), **ROW}, TypeError, 'cu_seqlens must be int32 or int64'),
        ({'cu_seqlens': torch.tensor([[0, 5]]), **ROW}, ValueError, 'cu_seqlens must have one dimension'),
        ({'cu_seqlens': torch.tensor(5), **ROW}, ValueError, 'cu_seqlens must have one dimension'),
        ({'cu_seqlens': torch.zeros(0).int(), **ROW}, ValueError, 'cu_seqlens must have one dimension'),
        ({'cu_seqlens': [0, 5], **ROW}, TypeError, "'cu_seqlens' must be a tensor"),
        (
            {'seqlen_offset': torch.tensor([1, 2, 3]), 'cu_seqlens': torch.tensor([0, 2, 5]), **ROW},
            ValueError,
            'seqlen_offset must be',
        ),
        ({'position_ids': torch.ones(2, 5).bool()}, TypeError, 'position_ids must be integers or real numbers'),
        ({'position_ids': [[0] * 5] * 2}, TypeError, "'position_ids' must be a tensor"),
        (
            {'position_ids': torch.ones(2, 5), 'seqlen_offset': 1},
            ValueError,
            'position_ids gives every position: with it, pass no',
        ),
        ({'position_ids': torch.ones(1, 5), 'cu_seqlens': torch.tensor([0, 5]), **ROW}, ValueError, 'position_ids gives'),
        ({'position_ids': torch.ones(2, 5), 'seqlen_offset': torch.zeros(2).int()}, ValueError, 'position_ids gives'),
        ({'q': (8,)}, ValueError, r'q must be \[B, T, H, D\], got shape \[8\]'),
        ({'k': (2, 5, 8)}, ValueError, r'k must be \[B, T, H, D\], got shape \[2, 5, 8\]'),
        ({'k': (2, 5, 2, 6)}, ValueError, 'k must have D of at least dim = 8'),
    ],
    ids=str,
)
def test_the_class_takes_what_the_function_takes(arguments, kind, message):
    with pytest.raises(kind, match=message):
        of_class(**arguments)


@served_by('reference')
def test_the_class_has_positions_below_zero():
    """There is no table: a batch padded on its left begins below 0."""
    layer, q = RotaryEmbedding(4, base=100.0), tensor(2, 5, 4, 6, dtype=torch.float32)
    angles = torch.tensor([[(p - 3) * 100.0 ** (-2 * i / 4) for i in range(2)] for p in range(32)], dtype=torch.float64)
    expected = oracle(q.double(), angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 2]))
    assert error(expected, layer(q, q, torch.tensor([-3, -1]))[0]) <= bounds.elementwise(torch.float32)


@served_by('reference')
@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
def test_layer(interleaved):
    layer = RotaryEmbedding(4, base=100.0, interleaved=interleaved)
    assert layer.state_dict() == {}
    q, k = tensor(2, 5, 4, 6, dtype=torch.float32), tensor(2, 5, 2, 6, dtype=torch.float32)
    angles = torch.tensor([[p * 100.0 ** (-2 * i / 4) for i in range(2)] for p in range(32)], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    for offset in (0, 7, torch.tensor([3, 20])):
        options = {'interleaved': interleaved, 'seqlen_offsets': offset}
        for x, y in zip((q, k), layer(q, k, offset), strict=True):
            assert error(oracle(x.double(), cos, sin, **options), y) <= bounds.elementwise(torch.float32)
    cu = torch.tensor([0, 4, 10])
    packed = layer(q.reshape(1, 10, 4, 6), k.reshape(1, 10, 2, 6), 1, cu)[0]
    options = {'interleaved': interleaved, 'seqlen_offsets': 1, 'cu_seqlens': cu}
    assert error(oracle(q.reshape(1, 10, 4, 6).double(), cos, sin, **options), packed) <= bounds.elementwise(torch.float32)
    places = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    by_place = layer(q, k, position_ids=places)[0]
    for b, t in ((0, 2), (1, 0)):
        one = layer(q[b : b + 1, t : t + 1], k[b : b + 1, t : t + 1], int(places[b, t]))[0]
        assert error(one, by_place[b : b + 1, t : t + 1]) <= bounds.elementwise(torch.float32)


class Counter(TorchDispatchMode):
    """Operations of PyTorch that launch something on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix('aten::').partition('.')[0]
        if name not in ('view', '_unsafe_view', 'reshape', 'unsqueeze', 'detach', 'empty', 'slice', 'select'):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_few_launches_make_a_table(monkeypatch):
    """Beside the rotations themselves: a decode step is nothing but launches."""
    layer, q = RotaryEmbedding(4), tensor(3, 1, 2, 6, dtype=torch.float32)
    monkeypatch.setattr(layer, '_rotate', lambda x, cos, sin: x)
    for offset, extra in ((7, []), (torch.tensor([3, 20, 1]), ['add'])):
        with Counter() as counter:
            layer(q, q, offset)
        assert sorted(counter.names) == sorted(['arange', 'logspace', 'mul', 'cos', 'sin', *extra])


@pytest.mark.parametrize('kind', [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
def test_position_ids_of_any_dtype(kind):
    layer, q = RotaryEmbedding(0 if kind == torch.int32 else 4), tensor(2, 5, 4, 6, dtype=torch.float32)
    places = torch.arange(10).reshape(2, 5) % 7
    for found, wanted in zip(layer(q, q, position_ids=places.to(kind)), layer(q, q, position_ids=places), strict=True):
        assert torch.equal(found, wanted)


def test_arguments_of_flash_linear_attention():
    """Arguments without effect change nothing."""
    layer = RotaryEmbedding(4, 100.0, None, True, pos_idx_in_fp32=False, device='cpu')
    q = tensor(2, 5, 4, 6, dtype=torch.float32)
    for found, wanted in zip(
        layer(q, q, 3, max_seqlen=64), RotaryEmbedding(4, 100.0, interleaved=True)(q, q, 3), strict=True
    ):
        assert torch.equal(found, wanted)


def test_in_place_of_what_was_made_in_inference_mode():
    cos, sin = tensor(5, 2), tensor(5, 2)
    with torch.inference_mode():
        x = tensor(1, 5, 2, 4)
    expected = oracle(x, cos, sin)
    with torch.no_grad():
        assert rotary_embedding(x, cos, sin, inplace=True) is x
    assert error(expected, x) <= bounds.TWO_ORACLES


def test_scores_depend_on_distance_alone_far_away():
    """Angles are float32: at position 10^5 they are off by less than 0.01."""
    layer = RotaryEmbedding(64)
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)
    near = (layer(q, q, 3)[0] * layer(k, k, 0)[0]).sum()
    far = (layer(q, q, 100_003)[0] * layer(k, k, 100_000)[0]).sum()
    assert math.isclose(float(near), float(far), abs_tol=bounds.FAR_SCORES)


@table(
    ('call', 'kind', 'message'),
    [
        (lambda x, c: rotary_embedding(x[0], c, c), ValueError, r'x must be \[B, T, H, D\]'),
        (
            lambda x, c: rotary_embedding(x[:1].to('meta'), c.to('meta'), c.to('meta'), cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            "'cu_seqlens' is on cpu and 'x' on meta",
        ),
        (lambda x, c: rotary_embedding(x.int(), c, c), TypeError, 'x must be float16'),
        (
            lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=torch.zeros(2, dtype=torch.int64, device='meta')),
            ValueError,
            "'seqlen_offsets' is on meta",
        ),
        (lambda x, c: RotaryEmbedding(4)(x, x, 2**63 - 1), ValueError, r'seqlen_offset \+ T must be within 64 bits'),
        (
            lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=2**63 - 1),
            ValueError,
            r'seqlen_offsets \+ T must be within',
        ),
        (lambda x, c: RotaryEmbedding(-2), ValueError, 'dim must be even and not negative, got -2'),
        (lambda x, c: rotary_embedding(x, c[0], c[0]), ValueError, r'cos must be \[S, R / 2\]'),
        (lambda x, c: rotary_embedding(x, c, c[:2]), ValueError, 'sin must be shaped like cos'),
        (
            lambda x, c: rotary_embedding(x, c.repeat(1, 2), c.repeat(1, 2)),
            ValueError,
            'turns R = 8 channels, but x has D = 4',
        ),
        (lambda x, c: rotary_embedding(x, c[:2], c[:2]), ValueError, 'cos has S = 2 rows, too few for T = 3'),
        (lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=-1), ValueError, 'seqlen_offsets = -1'),
        (lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=0.0), TypeError, 'seqlen_offsets must be an int, got float'),
        (lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=True), TypeError, 'seqlen_offsets must be an int, got bool'),
        (lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=torch.tensor([1])), ValueError, 'seqlen_offsets must be'),
        (lambda x, c: rotary_embedding(x, c, c, seqlen_offsets=torch.ones(2)), TypeError, 'seqlen_offsets must be int32'),
        (lambda x, c: rotary_embedding(x, c, c, cu_seqlens=torch.tensor([0, 3])), ValueError, 'batch must be 1'),
        (lambda x, c: rotary_embedding(x[:1].expand(2, 3, 1, 4), c, c, inplace=True), ValueError, 'elements share memory'),
        (
            lambda x, c: rotary_embedding(x.as_strided((1, 3, 1, 4), (8, 2, 8, 1)), c, c, inplace=True),
            ValueError,
            r'x is written into, but elements share memory, strides \(8, 2, 8, 1\)',
        ),
        (lambda x, c: rotary_embedding(x, c[:0], c[:0], seqlen_offsets=torch.zeros(2).int()), ValueError, 'S = 0 rows'),
        (lambda x, c: RotaryEmbedding(3), ValueError, 'dim must be even'),
        (lambda x, c: RotaryEmbedding(4, scale_base=512.0), ValueError, 'scale_base must be None'),
        (lambda x, c: RotaryEmbedding(4.0), TypeError, 'dim must be an int, got float'),
        (lambda x, c: RotaryEmbedding(4, base=-1.0), ValueError, 'base must be above 0, got -1.0'),
        (lambda x, c: RotaryEmbedding(4, base=0.0), ValueError, 'base must be above 0'),
        (lambda x, c: RotaryEmbedding(4, base=math.inf), ValueError, 'base must be finite'),
        (lambda x, c: RotaryEmbedding(4, base='x'), TypeError, 'base must be a number'),
        (lambda x, c: RotaryEmbedding(4)(x, x[:, :1]), ValueError, 'k must be of the batch and time of q'),
        (lambda x, c: RotaryEmbedding(4)(x, x, position_ids=torch.zeros(3)), ValueError, 'position_ids must be'),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(2, 3, 1, 4), torch.randn(4, 2))
