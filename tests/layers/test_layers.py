"""GatedDeltaNet, KimiDeltaAttention and Attention against the papers' formulas, step by step in float64."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fla.backends import trace
from fla.layers import Attention, Cache, GatedDeltaNet, KimiDeltaAttention
from tests import bounds
from tests.tables import table

HIDDEN = 12

LAYERS = {
    'gdn': lambda **kw: GatedDeltaNet(HIDDEN, head_dim=4, num_heads=2, num_v_heads=4, layer_idx=0, **kw),
    'gdn plain': lambda **kw: GatedDeltaNet(
        HIDDEN, 1, 4, 2, use_gate=False, use_short_conv=False, allow_neg_eigval=True, layer_idx=0, **kw
    ),
    'kda': lambda **kw: KimiDeltaAttention(HIDDEN, head_dim=4, num_heads=2, num_v_heads=4, layer_idx=0, **kw),
    'kda conv bias': lambda **kw: KimiDeltaAttention(
        HIDDEN, 1.5, 4, 2, conv_bias=True, allow_neg_eigval=True, layer_idx=0, **kw
    ),
    # value heads of 516, in three parts
    'gdn wide v': lambda **kw: GatedDeltaNet(HIDDEN, 129, 4, 1, 2, layer_idx=0, **kw),
    'attn': lambda **kw: Attention(HIDDEN, 4, 2, layer_idx=0, head_dim=4, **kw),
    'attn window': lambda **kw: Attention(HIDDEN, 3, qkv_bias=True, qk_norm=True, window_size=4, layer_idx=0, **kw),
    'attn nope': lambda **kw: Attention(HIDDEN, 3, 1, rope_theta=None, layer_idx=0, **kw),
}
RECURRENT = [name for name in LAYERS if not name.startswith('attn')]


def make(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = LAYERS[name](**options)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
        elif not getattr(parameter, '_no_weight_decay', False):
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    return layer.to(dtype)


def hidden(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rms(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu(x):
    return x / (1 + torch.exp(-x))


def delta_oracle(layer, x):
    """x `[T, hidden]`, one sequence."""
    p = {name: value.detach() for name, value in layer.named_parameters()}
    is_kda = 'f_proj.0.weight' in p
    qkv = []
    for name in 'qkv':
        y = x @ p[f'{name}_proj.weight'].T
        if f'{name}_conv1d.weight' in p:
            w = p[f'{name}_conv1d.weight'][:, 0]
            padded = torch.cat([y.new_zeros(w.shape[1] - 1, y.shape[1]), y])
            y = torch.stack([(padded[t : t + w.shape[1]].T * w).sum(1) for t in range(len(y))])
            y = y + p.get(f'{name}_conv1d.bias', 0)
        qkv.append(silu(y))
    heads, value_heads, dim = layer.num_heads, layer.num_v_heads, layer.head_k_dim
    q, k = (y.view(len(x), heads, dim).repeat_interleave(value_heads // heads, 1) for y in qkv[:2])
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    v = qkv[2].view(len(x), value_heads, -1)
    raw = x @ p['f_proj.0.weight'].T @ p['f_proj.1.weight'].T if is_kda else x @ p['a_proj.weight'].T
    raw = (raw + p['dt_bias']).view(len(x), value_heads, -1)
    decay = torch.exp(-p['A_log'].exp()[:, None] * torch.log1p(raw.exp()))
    beta = torch.sigmoid(x @ p['b_proj.weight'].T) * (2 if layer.allow_neg_eigval else 1)
    state, rows = x.new_zeros(value_heads, dim, v.shape[-1]), []
    for t in range(len(x)):
        state = state * decay[t][..., None]
        change = beta[t][:, None] * (v[t] - torch.einsum('hkv,hk->hv', state, k[t]))
        state = state + k[t][..., None] * change[:, None]
        rows.append(torch.einsum('hkv,hk->hv', state, q[t]) * dim**-0.5)
    o = rms(torch.stack(rows), p['o_norm.weight'])
    if is_kda:
        gate = x @ p['g_proj.0.weight'].T @ p['g_proj.1.weight'].T + p['g_proj.1.bias']
        o = o * torch.sigmoid(gate).view(o.shape)
    elif 'g_proj.weight' in p:
        o = o * silu(x @ p['g_proj.weight'].T).view(o.shape)
    return o.flatten(1) @ p['o_proj.weight'].T


def attention_oracle(layer, x):
    p = {name: value.detach() for name, value in layer.named_parameters()}
    dim = layer.head_dim
    q, k, v = ((x @ p[f'{n}_proj.weight'].T + p.get(f'{n}_proj.bias', 0)).view(len(x), -1, dim) for n in 'qkv')
    if 'q_norm.weight' in p:
        q, k = rms(q, p['q_norm.weight']), rms(k, p['k_norm.weight'])
    if layer.rotary is not None:
        angles = torch.tensor([[t * 10000 ** (-2 * i / dim) for i in range(dim // 2)] for t in range(len(x))]).double()
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (torch.complex(y[..., : dim // 2].contiguous(), y[..., dim // 2 :].contiguous()) * turn for y in (q, k))
        q, k = (torch.cat([y.real, y.imag], -1) for y in (q, k))
    rows = []
    for t in range(len(x)):
        begin = 0 if layer.window_size is None else max(0, t + 1 - layer.window_size)
        for h in range(layer.num_heads):
            group = h // (layer.num_heads // layer.num_kv_heads)
            weights = (k[begin : t + 1, group] @ q[t, h] / math.sqrt(dim)).softmax(0)
            rows.append(weights @ v[begin : t + 1, group])
    return torch.stack(rows).view(len(x), -1) @ p['o_proj.weight'].T


def oracle(name, layer, x):
    return torch.stack([(attention_oracle if 'attn' in name else delta_oracle)(layer, row) for row in x])


def error(expected, got):
    expected, got = expected.detach().double(), got.detach().double()
    assert expected.shape == got.shape
    return float((expected - got).square().mean().sqrt() / expected.square().mean().sqrt())


def bound(name):
    """For float64. Angles are float32 whatever the layer's dtype."""
    return bounds.of_layer(torch.float64, turned='attn' in name and 'nope' not in name)


@pytest.mark.parametrize('name', LAYERS)
def test_against_the_formula(name):
    layer, x = make(name), hidden(2, 70)
    with trace() as recorded:
        o, weights, cache = layer(x)
    # sdpa serves softmax attention
    assert {backend for _, backend in recorded.counters} <= {'reference', 'sdpa'}
    assert weights is None
    assert cache is None
    assert error(oracle(name, layer, x), o) < bound(name)


def test_wide_heads_of_v_with_decays_of_channels():
    """In three parts, with the layer's own weights: those of `make` would give very strong gates from 516 inputs."""
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(HIDDEN, 129, 4, 1, 2, layer_idx=0).double(), hidden(2, 9).requires_grad_()
    expected = oracle('kda', layer, x)
    o, weights = layer(x)[0], hidden(2, 9, seed=5)
    assert error(expected, o) < bound('kda')
    (got,), (wanted,) = (torch.autograd.grad((one * weights).sum(), x) for one in (o, expected))
    assert error(wanted, got) < bounds.of_gradient(bound('kda'))
    with torch.no_grad():
        cache = Cache()
        pieces = [layer(part, past_key_values=cache)[0] for part in x.split([5, 1, 3], 1)]
    assert cache[0].recurrent.shape == (2, 6, 4, 172)
    assert error(expected, torch.cat(pieces, 1)) < bound('kda')


@pytest.mark.parametrize('kind', [GatedDeltaNet, KimiDeltaAttention, Attention], ids=lambda kind: kind.__name__)
def test_defaults(kind):
    """A layer made without arguments runs."""
    layer = kind()
    with torch.no_grad():
        o = layer(torch.randn(1, 3, 2048))[0]
    assert o.shape == (1, 3, 2048)
    assert o.isfinite().all()


@pytest.mark.parametrize(
    'make_layer',
    [lambda: GatedDeltaNet(64, head_dim=257), lambda: Attention(514, 2), lambda: KimiDeltaAttention(64, head_dim=512)],
)
def test_heads_too_wide_for_kernels(make_layer):
    with pytest.raises(ValueError, match='head_dim must be at most 256, got'):
        make_layer()


@pytest.mark.parametrize('name', RECURRENT)
def test_recurrent_mode(name):
    layer, x = make(name, mode='fused_recurrent'), hidden(1, 9)
    operation = 'kda' if 'kda' in name else 'gated_delta_rule'
    with trace() as t:
        o = layer(x)[0]
    assert error(oracle(name, layer, x), o) < bound(name)
    assert (f'{operation}.fused_recurrent_{operation}', 'reference') in t.counters
    with trace() as t:
        make(name)(x)
    assert (f'{operation}.chunk_{operation}', 'reference') in t.counters


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('name', LAYERS)
def test_narrow_dtypes(name, dtype):
    """Errors are within those of rounding weights, inputs and projections."""
    layer, x = make(name).to(dtype), hidden(2, 20).to(dtype)
    expected = oracle(name, make(name).to(dtype).double(), x.double())
    o = layer(x)[0]
    assert o.dtype == dtype
    assert error(expected, o) < bounds.of_layer(dtype)


@pytest.mark.parametrize('name', LAYERS)
def test_generation(name):
    """Prefill, more prefill, then single steps give the same as one call."""
    layer, x = make(name), hidden(2, 13)
    with torch.no_grad():
        o, _, cache = layer(x[:, :5], use_cache=True)
        pieces = [o]
        for a, b in itertools.pairwise([5, 9, *range(10, 14)]):
            o, _, same = layer(x[:, a:b], past_key_values=cache)
            assert same is cache
            pieces.append(o)
    assert cache.get_seq_length(0) == 13
    assert error(oracle(name, layer, x), torch.cat(pieces, 1)) < bound(name)


@pytest.mark.parametrize('name', RECURRENT)
def test_generation_of_packed_sequences(name):
    layer, x = make(name), hidden(1, 9)
    cu = torch.tensor([0, 2, 2, 9])
    more = hidden(1, 5, seed=2)
    with torch.no_grad():
        _, _, cache = layer(x, use_cache=True, cu_seqlens=cu)
        o = layer(more, past_key_values=cache, cu_seqlens=torch.tensor([0, 1, 4, 5]))[0]
    wholes = [torch.cat([x[:, :2], more[:, :1]], 1), more[:, 1:4], torch.cat([x[:, 2:], more[:, 4:]], 1)]
    expected = [oracle(name, layer, whole)[:, -n:] for whole, n in zip(wholes, (1, 3, 1), strict=True)]
    assert error(torch.cat(expected, 1), o) < bound(name)


@pytest.mark.parametrize('name', LAYERS)
def test_packed_sequences(name):
    layer, x = make(name), hidden(1, 11)
    cu = torch.tensor([0, 3, 3, 4, 11])
    expected = torch.cat([oracle(name, layer, x[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 11))], 1)
    assert error(expected, layer(x, cu_seqlens=cu)[0]) < bound(name)


@pytest.mark.parametrize('side', ['left', 'right', 'none'])
@pytest.mark.parametrize('name', LAYERS)
def test_padded_generation(padded, name, side):
    """Sequences of different lengths give what each gives alone, whatever stands in the padding."""
    layer, steps = make(name), 3
    lengths = [6, 2, 4] if side != 'none' else [6, 6, 6]
    mask = torch.zeros(3, 6, dtype=torch.long)
    for row, n in zip(mask, lengths, strict=True):
        row[6 - n :] = 1
    mask = mask.flip(1) if side == 'right' else mask
    x, more = hidden(3, 6), hidden(3, steps, seed=2)
    with torch.no_grad():
        o, _, cache = layer(x, attention_mask=mask, use_cache=True)
        pieces = []
        for t in range(steps):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            pieces.append(layer(more[:, t : t + 1], attention_mask=mask, past_key_values=cache)[0])
    for b, n in enumerate(lengths):
        is_step = mask[b, :6].bool()
        whole = oracle(name, layer, torch.cat([x[b, is_step], more[b]])[None])[0]
        assert error(whole[:n], o[b, is_step]) < bound(name)
        assert not o[b, ~is_step].any()
        assert error(whole[n:], torch.cat(pieces, 1)[b]) < bound(name)


def exact_gradients(name, x, weights, spans=None):
    """The formula's gradients of x and all parameters, for the output gradient `weights` and sequences at `spans`."""
    layer = make(name)
    # the oracle detaches parameters: give it some that stay in the graph
    parameters = dict(layer.named_parameters())
    layer.named_parameters = lambda: [(n, _NotDetached(p)) for n, p in parameters.items()]
    o = torch.cat([oracle(name, layer, x[:, a:b]) for a, b in spans or [(0, x.shape[1])]], 1)
    found = torch.autograd.grad((o * weights).sum(), [x, *parameters.values()])
    return dict(zip(['x', *parameters], found, strict=True))


def check_gradients(name, layer, o, x, weights, spans=None):
    expected = exact_gradients(name, x, weights, spans)
    mine = torch.autograd.grad((o * weights).sum(), [x, *layer.parameters()])
    for (label, a), b in zip(expected.items(), mine, strict=True):
        assert error(a, b) < bounds.of_gradient(bound(name)), label


@pytest.mark.parametrize('name', LAYERS)
def test_gradients(name):
    layer, x = make(name), hidden(1, 6).requires_grad_()
    check_gradients(name, layer, layer(x)[0], x, hidden(1, 6, seed=5))


@pytest.mark.parametrize('name', LAYERS)
def test_gradients_of_packed_sequences(name):
    layer, x = make(name), hidden(1, 11).requires_grad_()
    o = layer(x, cu_seqlens=torch.tensor([0, 3, 3, 4, 11]))[0]
    check_gradients(name, layer, o, x, hidden(1, 11, seed=5), [(0, 3), (3, 4), (4, 11)])


@pytest.mark.parametrize('name', LAYERS)
def test_gradients_of_padded_sequences(padded, name):
    """They are those of the steps alone, although padding is NaN and its output has a gradient."""
    layer, x = make(name), hidden(1, 9).requires_grad_()
    is_step = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 0]).bool()
    given = torch.full((2, 9, HIDDEN), torch.nan, dtype=torch.float64)
    given = given.index_put((torch.tensor(0), is_step.nonzero()[:, 0]), x[0, :5]).index_put((torch.tensor(1),), x[0])
    mask = torch.stack([is_step, torch.ones(9).bool()])
    o, weights = layer(given, attention_mask=mask)[0], hidden(2, 9, seed=5)
    mine = torch.autograd.grad((o * weights).sum(), [x, *layer.parameters()])
    whole = exact_gradients(name, x, weights[1:])
    part = exact_gradients(name, x[:, :5], weights[:1, is_step])
    expected = {label: whole[label] + part[label] for label in whole if label != 'x'}
    expected = {'x': whole['x'] + F.pad(part['x'], (0, 0, 0, 4)), **expected}
    for (label, a), b in zip(expected.items(), mine, strict=True):
        assert error(a, b) < bounds.of_gradient(bound(name)), label


class _NotDetached:
    def __init__(self, tensor):
        self._tensor = tensor

    def detach(self):
        return self._tensor


def test_padding_does_not_reach_gradients(padded):
    for name in LAYERS:
        layer, x = make(name), hidden(2, 5).requires_grad_()
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        (layer(x, attention_mask=mask)[0] ** 2).sum().backward()
        assert x.grad.isfinite().all()
        assert not x.grad[0, :2].any()
        assert x.grad[0, 2:].any()


def gradients_of(call, layer, x):
    """Gradients of x and the parameters through `call`, the layer or its compiled form."""
    x = x.detach().requires_grad_()
    o = call(x)[0]
    return torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum(), [x, *layer.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize('name', LAYERS)
def test_compile_and_autocast(name):
    layer, x = make(name, torch.float32), hidden(2, 20, dtype=torch.float32)
    expected = layer(x)[0]
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    assert error(expected, compiled(x)[0]) < bounds.of_compiled(bounds.of_layer(torch.float32))
    for one, other in zip(gradients_of(layer, layer, x), gradients_of(compiled, layer, x), strict=True):
        assert error(one, other) < bounds.of_compiled(bounds.of_gradient(bounds.of_layer(torch.float32)))
    with torch.autocast('cpu', torch.bfloat16):
        o = layer(x)[0]
    assert o.dtype == torch.bfloat16
    assert error(expected, o) < bounds.of_autocast(torch.bfloat16)


@pytest.mark.parametrize('masked', [False, True], ids=['plain', 'masked'])
@pytest.mark.parametrize('narrow', [(False, True, True), (True, False, True), (False, True, False)], ids=str)
@pytest.mark.parametrize('name', LAYERS)
def test_generation_in_and_out_of_autocast(name, narrow, masked):
    """A cache serves calls in and out of autocast, and a call in a narrower dtype does not round it.

    With this seed the output norm never divides by a number near 0, which would amplify rounding errors.
    """
    layer, x, cache, pieces = make(name, torch.float32), hidden(2, 9, dtype=torch.float32, seed=2), Cache(), []
    with torch.no_grad(), trace() as recorded:
        for (a, b), enabled in zip(((0, 5), (5, 8), (8, 9)), narrow, strict=True):
            with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
                mask = torch.ones(2, b) if masked else None
                pieces.append(layer(x[:, a:b], attention_mask=mask, past_key_values=cache)[0])
            assert pieces[-1].dtype == (torch.bfloat16 if enabled else torch.float32)
    assert {backend for _, backend in recorded.counters} <= {'reference', 'sdpa'}
    expected = oracle(name, make(name, torch.float32).double(), x.double())
    assert error(expected, torch.cat([piece.float() for piece in pieces], 1)) < bounds.of_autocast(torch.bfloat16)
    if 'attn' in name and not narrow[0]:
        whole = Cache()
        with torch.no_grad():
            layer(x[:, :5], past_key_values=whole)
        for found, wanted in zip(cache[0].keys_values, whole[0].keys_values, strict=True):
            assert found.dtype == torch.float32
            assert torch.equal(found[:, :5], wanted)


@pytest.mark.parametrize('masked', [False, True], ids=['plain', 'masked'])
@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_made_narrower_goes_on_from_its_cache(name, masked):
    layer, x, cache = make(name, torch.float32), hidden(2, 9, dtype=torch.float32, seed=2), Cache()
    with torch.no_grad():
        first = layer(x[:, :8], past_key_values=cache)[0]
        mask = torch.ones(2, 9) if masked else None
        last = layer.bfloat16()(x[:, 8:].bfloat16(), attention_mask=mask, past_key_values=cache)[0]
    assert last.dtype == torch.bfloat16
    expected = oracle(name, make(name, torch.float32).double(), x.double())
    assert error(expected, torch.cat([first, last.float()], 1)) < bounds.of_autocast(torch.bfloat16)


@pytest.mark.parametrize('name', LAYERS)
def test_exported(name):
    """For any length with attention; for one length with the reference's recurrences, which loop over chunks."""
    layer, x = make(name, torch.float32), hidden(2, 20, dtype=torch.float32)
    steps = torch.export.Dim('T', min=2, max=4096) if 'attn' in name else None
    exported = torch.export.export(layer, (x,), dynamic_shapes=({1: steps},)).module()
    for length in (20, 9) if steps else (20,):
        x = hidden(2, length, dtype=torch.float32)
        o, weights, cache = exported(x)
        assert (weights, cache) == (None, None)
        assert error(layer(x)[0], o) < bounds.of_compiled(bounds.of_layer(torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize('dynamic', [False, True])
@pytest.mark.parametrize('name', ['gdn', 'kda', 'attn window'])
def test_compiled_packed_sequences(name, dynamic):
    layer, x = make(name, torch.float32), hidden(1, 11, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager', dynamic=dynamic)
    with torch.no_grad():
        for lens in ([0, 3, 3, 4, 11], [0, 5, 11, 11, 11]):
            lens = torch.tensor(lens)
            o = compiled(x, cu_seqlens=lens)[0]
            assert error(layer(x, cu_seqlens=lens)[0], o) < bounds.of_compiled(bounds.of_layer(torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gdn', 'gdn plain', 'kda', 'attn', 'attn window'])
def test_compiled_padded_sequences(name):
    """The graph does not break, with or without a cache."""
    layer, x = make(name, torch.float32), hidden(3, 9, dtype=torch.float32)
    limit = bounds.of_compiled(bounds.of_layer(torch.float32))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0]])
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    with torch.no_grad():
        assert error(layer(x, attention_mask=mask)[0], compiled(x, attention_mask=mask)[0]) < limit
        caches = [Cache(), Cache()]
        for piece in (slice(0, 4), slice(4, 9)):
            found, right = (
                mixer(x[:, piece], attention_mask=mask[:, : piece.stop], past_key_values=cache)[0]
                for mixer, cache in zip((compiled, layer), caches, strict=True)
            )
            assert error(right, found) < limit


PADDED = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0]])


@pytest.mark.pairwise
@pytest.mark.parametrize('name', LAYERS)
def test_exported_padded_sequences(name):
    layer, x = make(name, torch.float32), hidden(3, 9, dtype=torch.float32)
    exported = torch.export.export(layer, (x,), {'attention_mask': PADDED}).module()
    for mask in (PADDED, PADDED.flip(0), torch.ones_like(PADDED)):
        found, right = (one(x, attention_mask=mask)[0] for one in (exported, layer))
        assert error(right, found) < bounds.of_compiled(bounds.of_layer(torch.float32))


@pytest.mark.parametrize('name', LAYERS)
def test_padded_sequences_without_data(name):
    """On the meta device and with fake tensors, the number of steps is not read."""
    layer, x = make(name), hidden(3, 9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x), attention_mask=mode.from_tensor(PADDED))[0].shape == x.shape
    assert layer.to('meta')(x.to('meta'), attention_mask=PADDED.to('meta'))[0].shape == x.shape


@pytest.mark.parametrize('name', ['gdn', 'gdn plain', 'kda', 'attn', 'attn window'])
@pytest.mark.filterwarnings('ignore:There is a performance drop', 'ignore:torch.searchsorted')
def test_padded_samples_of_a_vmap(name):
    """Each sample has its own padding and so its own number of steps."""
    layer = make(name)
    x, mask = torch.stack([hidden(3, 9), hidden(3, 9, seed=2)]), torch.stack([PADDED, PADDED.flip(1)])
    with torch.no_grad(), trace() as recorded:
        found = torch.vmap(lambda x, mask: layer(x, attention_mask=mask)[0])(x, mask)
    assert {backend for _, backend in recorded.counters} <= {'reference', 'sdpa'}
    for sample, rows, is_step in zip(found, x, mask.bool(), strict=True):
        for out, row, steps in zip(sample, rows, is_step, strict=True):
            assert not out[~steps].any()
            assert error(oracle(name, layer, row[steps][None])[0], out[steps]) < bound(name)


@pytest.mark.parametrize('name', ['gdn', 'kda', 'attn'])
@pytest.mark.filterwarnings('ignore:There is a performance drop', 'ignore:torch.searchsorted')
def test_gradients_of_padded_samples(name):
    """Per-sample gradients, by a grad inside a vmap."""
    layer = make(name)
    x, mask = torch.stack([hidden(3, 9), hidden(3, 9, seed=2)]), torch.stack([PADDED, PADDED.flip(1)])

    def loss(x, mask):
        return layer(x, attention_mask=mask)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x, mask)
    for got, *sample in zip(found, x, mask, strict=True):
        assert error(torch.func.grad(loss)(*sample), got) < bound(name)


@pytest.mark.parametrize('name', ['attn', 'attn window'])
def test_forward_mode_of_a_mask_after_cached_steps(name):
    layer, x, mask = make(name), hidden(2, 6), torch.ones(2, 6)
    mask[0, 0] = 0

    def pieces(x):
        cache = layer(x[:, :4], attention_mask=mask[:, :4], use_cache=True)[2]
        return layer(x[:, 4:], attention_mask=mask, past_key_values=cache)[0]

    tangent = hidden(2, 6, seed=3)
    _, found = torch.func.jvp(pieces, (x,), (tangent,))
    _, right = torch.func.jvp(lambda x: layer(x, attention_mask=mask)[0][:, 4:], (x,), (tangent,))
    assert error(right, found) < bound(name)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gdn', 'kda conv bias'])
def test_compiled_generation_of_packed_sequences(name):
    """One step of each sequence; then several, which the convolutions serve by another path."""
    layer, x = make(name, torch.float32), hidden(1, 9, dtype=torch.float32)
    start, limit = torch.tensor([0, 2, 2, 9]), bounds.of_compiled(bounds.of_layer(torch.float32))
    with torch.no_grad():
        caches = [layer(x, use_cache=True, cu_seqlens=start)[2] for _ in range(2)]
        for lens in ([0, 1, 4, 5], [0, 1, 2, 3]):
            more, lens = hidden(1, lens[-1], dtype=torch.float32, seed=2), torch.tensor(lens)
            compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
            o = compiled(more, past_key_values=caches[0], cu_seqlens=lens)[0]
            assert error(layer(more, past_key_values=caches[1], cu_seqlens=lens)[0], o) < limit


def test_arguments_of_flash_linear_attention():
    """They have its order, and the ignored one changes nothing."""
    torch.manual_seed(0)
    layer = Attention(HIDDEN, 3, 1, True, True, 4, 500.0, 2048, 0)
    torch.manual_seed(0)
    named = Attention(HIDDEN, 3, 1, qkv_bias=True, qk_norm=True, window_size=4, rope_theta=500.0, layer_idx=0)
    x = hidden(1, 6, dtype=torch.float32)
    assert layer.layer_idx == 0
    assert torch.equal(layer(x)[0], named(x)[0])


def test_initial_decay():
    layer = GatedDeltaNet(HIDDEN, head_dim=4, num_heads=64)
    dt = F.softplus(layer.dt_bias)
    assert 0.0009 < float(dt.detach().min()) < 0.003
    assert 0.03 < float(dt.detach().max()) < 0.101
    assert float(layer.A_log.detach().exp().max()) <= 16
    assert layer.A_log.dtype == torch.float32
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay


@pytest.mark.parametrize('name', RECURRENT)
def test_made_without_memory(name):
    """`reset_parameters` of a layer and its modules fills a layer made on the meta device, as large models are."""
    with torch.device('meta'):
        layer = make(name)
    layer.to_empty(device='cpu')
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    for module in layer.modules():
        if hasattr(module, 'reset_parameters'):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    # KDA's A is at least 1
    assert float(layer.A_log.detach().min()) >= (0 if 'kda' in name else math.log(0.01))
    assert float(layer.A_log.detach().max()) <= math.log(16)
    dt = F.softplus(layer.dt_bias.detach())
    assert 0.00099 < float(dt.min()) <= float(dt.max()) < 0.101


@pytest.mark.parametrize('name', RECURRENT)
def test_marks_of_parameters_are_kept(name):
    with torch.device('meta'):
        empty = make(name)
    layer = make(name)
    assigned = copy.deepcopy(empty)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    replaced = make(name)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        replaced.half()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    others = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), assigned, replaced, empty.to_empty(device='cpu')
    for one in (layer, *others):
        marked = {key for key, parameter in one.named_parameters() if getattr(parameter, '_no_weight_decay', False)}
        assert marked == {'A_log', 'dt_bias'}


def test_layers_of_a_model_share_a_cache():
    cache, x = Cache(), hidden(1, 3, dtype=torch.float32)
    for i, kind in enumerate((GatedDeltaNet, KimiDeltaAttention)):
        kind(HIDDEN, head_dim=4, num_heads=1, layer_idx=i)(x, past_key_values=cache)
    Attention(HIDDEN, 2, layer_idx=2)(x, past_key_values=cache)
    assert len(cache) == 3
    assert [cache.get_seq_length(i) for i in range(4)] == [3, 3, 3, 0]


@table(
    ('call', 'kind', 'message'),
    [
        (lambda gdn, attn, x: gdn(x[..., :3]), ValueError, r'hidden_states must be \[B, T, 12\]'),
        (lambda gdn, attn, x: attn(x[0]), ValueError, r'hidden_states must be \[B, T, 12\]'),
        (lambda gdn, attn, x: gdn(x, attention_mask=torch.ones(2, 3)), ValueError, r'attention_mask must be \[B, S\]'),
        (lambda gdn, attn, x: gdn(x, attention_mask=[1]), TypeError, "'attention_mask' must be a tensor"),
        (lambda gdn, attn, x: attn(x, attention_mask=torch.ones(2, 6)), ValueError, 'must have S = 4 columns'),
        (
            lambda gdn, attn, x: gdn(x, torch.ones(2, 4).log() - torch.inf),
            ValueError,
            'got negative numbers; if this mask is added',
        ),
        (
            lambda gdn, attn, x: attn(x, -10000 * torch.eye(2, 4).long()),
            ValueError,
            'got negative numbers; if this mask is added',
        ),
        (
            lambda gdn, attn, x: gdn(x, torch.ones(2, 4).cfloat()),
            TypeError,
            'attention_mask must be bool, .* got torch.complex64',
        ),
        (
            lambda gdn, attn, x: attn(x, torch.ones(2, 4).to(torch.float8_e5m2)),
            TypeError,
            'attention_mask must be bool, .* got torch.float8_e5m2',
        ),
        (
            lambda gdn, attn, x: gdn(x[:1], attention_mask=torch.ones(1, 4), cu_seqlens=torch.tensor([0, 4])),
            ValueError,
            'pass one of them',
        ),
        (lambda gdn, attn, x: gdn(x, past_key_values={}), TypeError, 'past_key_values must be a fla.layers.Cache'),
        (lambda gdn, attn, x: gdn(x, output_attentions=True), ValueError, 'output_attentions'),
        (lambda gdn, attn, x: attn(x, output_attentions=True), ValueError, 'output_attentions'),
        (lambda gdn, attn, x: gdn(x, use_cash=True), TypeError, 'use_cash'),
        (
            lambda gdn, attn, x: attn(x[:1], use_cache=True, cu_seqlens=torch.tensor([0, 4])),
            ValueError,
            'past_key_values holds a row for each sequence',
        ),
        (lambda gdn, attn, x: attn(x.to_sparse()), TypeError, "'hidden_states' must be a dense tensor"),
        (lambda gdn, attn, x: attn(x, torch.ones(2, 4).to_sparse()), TypeError, "'attention_mask' must be a dense tensor"),
        (lambda gdn, attn, x: gdn(x, torch.ones(2, 4).to_sparse()), TypeError, "'attention_mask' must be a dense tensor"),
        (lambda gdn, attn, x: Attention(12, 0), ValueError, 'num_heads must be at least 1, got 0'),
        (lambda gdn, attn, x: gdn(None), TypeError, "'hidden_states' must be a tensor, got None"),
        (lambda gdn, attn, x: attn(None), TypeError, "'hidden_states' must be a tensor, got None"),
        (lambda gdn, attn, x: gdn(x.long()), TypeError, 'hidden_states must be float16, bfloat16, float32 or float64, got'),
        (lambda gdn, attn, x: attn(x.cfloat()), TypeError, 'hidden_states must be float16, .* got torch.complex64'),
        (lambda gdn, attn, x: Attention(12, 3, layer_idx='0'), TypeError, 'layer_idx must be an int, got str'),
        (lambda gdn, attn, x: GatedDeltaNet(12, 1, 4, 2, layer_idx=0.0), TypeError, 'layer_idx must be an int, got float'),
        (lambda gdn, attn, x: gdn(x.to('meta'), torch.ones(2, 4)), ValueError, "'attention_mask' is on cpu"),
        (lambda gdn, attn, x: gdn(x, attention_mask=torch.ones(3, 4)), ValueError, r'attention_mask must be \[B, S\]'),
        (lambda gdn, attn, x: attn(x, attention_mask=torch.ones(2, 4, 1)), ValueError, r'attention_mask must be \[B, S\]'),
        (
            lambda gdn, attn, x: gdn(x[:1], use_cache=True, cu_seqlens=torch.tensor(0)),
            ValueError,
            r'cu_seqlens must have one dimension \[N \+ 1\], got shape \[\]',
        ),
        (lambda gdn, attn, x: attn(x[:1], cu_seqlens=torch.tensor([]).int()), ValueError, 'cu_seqlens must have one dim'),
        (lambda gdn, attn, x: attn(x[:1], cu_seqlens=torch.tensor([0, 3])), ValueError, 'cu_seqlens must'),
        (lambda gdn, attn, x: gdn(x, cu_seqlens=torch.tensor([0, 4])), ValueError, 'the batch must be 1'),
        (lambda gdn, attn, x: Attention(12, 3)(x, use_cache=True), ValueError, 'needs a layer_idx'),
        (lambda gdn, attn, x: GatedDeltaNet(12, 1, 4, 2)(x, use_cache=True), ValueError, 'needs a layer_idx'),
        (lambda gdn, attn, x: Attention(12, 4, 0), ValueError, 'num_kv_heads must be at least 1, got 0'),
        (lambda gdn, attn, x: Attention(12, 3.0), TypeError, 'num_heads must be an int, got float'),
        (lambda gdn, attn, x: Attention(12, 3, head_dim=0), ValueError, 'head_dim must be at least 1, got 0'),
        (lambda gdn, attn, x: Attention(12, 4), ValueError, 'head_dim must be even for rotary positions, got 3'),
        (lambda gdn, attn, x: Attention(12, 3, rope_theta=0.0), ValueError, 'rope_theta must be above 0'),
        (lambda gdn, attn, x: Attention(12, 3, rope_theta=math.inf), ValueError, 'rope_theta must be finite'),
        (lambda gdn, attn, x: Attention(12, 3, rope_theta='1'), TypeError, 'rope_theta must be a number, got str'),
        (lambda gdn, attn, x: Attention(12, 3, rope_theta=10**400), ValueError, 'rope_theta must be within 64 bits'),
        (lambda gdn, attn, x: Attention(12, 3, norm_eps='1'), TypeError, 'norm_eps must be a number, got str'),
        (lambda gdn, attn, x: GatedDeltaNet(12, norm_eps=-1.0), ValueError, 'norm_eps must be at least 0, got -1.0'),
        (lambda gdn, attn, x: KimiDeltaAttention(12, norm_eps=None), TypeError, 'norm_eps must be a number'),
        (lambda gdn, attn, x: Attention(12, 3, window_size=0), ValueError, 'window_size must be at least 1, got 0'),
        (lambda gdn, attn, x: Attention(12, 3, window_size=True), TypeError, 'window_size must be an int, got bool'),
        (lambda gdn, attn, x: GatedDeltaNet(0), ValueError, 'hidden_size must be at least 1, got 0'),
        (lambda gdn, attn, x: GatedDeltaNet(12, num_heads=0), ValueError, 'num_heads must be at least 1, got 0'),
        (lambda gdn, attn, x: KimiDeltaAttention(12, num_v_heads=0), ValueError, 'num_v_heads must be at least 1, got 0'),
        (lambda gdn, attn, x: KimiDeltaAttention(12, conv_size=0), ValueError, 'conv_size must be at least 1, got 0'),
        (lambda gdn, attn, x: GatedDeltaNet(12, '1'), TypeError, 'expand_v must be a number, got str'),
        (lambda gdn, attn, x: GatedDeltaNet(12, 1e308, 40, 2), ValueError, 'from 1 on, got expand_v = 1e.308'),
        (lambda gdn, attn, x: GatedDeltaNet(12, -1, 4, 2), ValueError, 'from 1 on, got expand_v = -1'),
        (lambda gdn, attn, x: Attention(12, 4, 3), ValueError, 'num_heads = 4 must be a multiple'),
        (lambda gdn, attn, x: Attention(12, 5), ValueError, 'hidden_size = 12 must be a multiple'),
        (
            lambda gdn, attn, x: GatedDeltaNet(12, 1.3, 4, 2),
            ValueError,
            'must be a whole number from 1 on, got expand_v = 1.3',
        ),
        (lambda gdn, attn, x: KimiDeltaAttention(12, 1, 4, 2, 3), ValueError, 'num_v_heads must be a multiple'),
        (lambda gdn, attn, x: GatedDeltaNet(12, mode='parallel'), ValueError, "mode must be 'chunk' or"),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(make('gdn'), make('attn'), hidden(2, 4))
