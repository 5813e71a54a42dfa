"""parallel_attn on a CPU: `reference` and `sdpa`, against the formula one query at a time in float64."""

from fractions import Fraction

import pytest
import torch
from torch.nn.attention import SDPBackend

from fla.backends import NoBackendError, Policy, explain, policy_context, trace, use_backend
from fla.ops.attn import cudnn, naive, parallel_attn
from fla.ops.attn.backends import sdpa
from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.attn.parallel import parallel_attn as same
from tests import bounds, process
from tests.ops.attn.attention import BF16, FP16, FP32, FP64, bounds_of, check, check_apart, errors, inputs, results
from tests.ops.vendors import fakes
from tests.tables import table

CU = torch.tensor([0, 0, 1, 9, 24])


def oracle(q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, sink_bias=None):
    """One query at a time."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups, past = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    rows = []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            begin = 0 if cu_seqlens is None else max(int(s) for s in cu_seqlens[:-1] if s <= t)
            begin = begin if window_size is None else max(begin, past + t + 1 - window_size)
            for h in range(q.shape[2]):
                keys, values = k[b, begin : past + t + 1, h // groups], v[b, begin : past + t + 1, h // groups]
                weights = scale * keys @ q[b, t, h]
                if g is not None:
                    weights = weights + torch.stack([g[b, j + 1 : t + 1, h].sum() for j in range(begin, t + 1)])
                weights = weights.exp()
                total = weights.sum() + (0 if sink_bias is None else sink_bias[h].exp())
                rows.append(weights @ values / total)
    return torch.stack(rows).reshape(*q.shape[:3], v.shape[-1])


def error(expected, got):
    expected, got = expected.detach().double(), got.detach().double()
    assert expected.shape == got.shape
    return float((expected - got).square().mean().sqrt() / expected.square().mean().sqrt())


CASES = {
    'plain': ((), {}, {}),
    'one kv head, scaled': ((), {'kv_heads': 1}, {'scale': 0.3}),
    'negative scale': ((), {}, {'scale': -0.7}),
    'scale of 0': ((), {}, {'scale': 0}),
    'equal heads and dims': ((), {'kv_heads': 4, 'value_dim': 8}, {}),
    'window': ((), {}, {'window_size': 5}),
    'window of one': ((), {}, {'window_size': 1}),
    'packed': ((), {'batch': 1}, {'cu_seqlens': CU}),
    'packed, window, int32': ((), {'batch': 1}, {'cu_seqlens': CU.int(), 'window_size': 3}),
    'one query': ((), {'queries': 1}, {}),
    'one query, window': ((), {'queries': 1}, {'window_size': 4}),
    'five queries': ((), {'queries': 5}, {}),
    'gate': (('g',), {}, {}),
    'sink': (('sink_bias',), {}, {'window_size': 6}),
    'gate and sink, packed': (('g', 'sink_bias'), {'batch': 1}, {'cu_seqlens': CU}),
}


def check_formula(backend, given, **options):
    """Checks o and all gradients of this backend against the formula in float64."""
    given = {n: x.requires_grad_() for n, x in given.items()}
    exact = {n: x.detach().double().requires_grad_() for n, x in given.items()}
    with use_backend(backend, op='attn'), trace() as t:
        o = parallel_attn(**given, **options)
    assert t.last_backend('attn.parallel_attn') == backend
    expected = oracle(**exact, **options)
    assert o.dtype == given['q'].dtype
    assert o.is_contiguous()
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    got = torch.autograd.grad((o.double() * weights).sum(), list(given.values()))
    wanted = torch.autograd.grad((expected * weights).sum(), list(exact.values()))
    names = [f'd{name}' for name in given]
    if backend == 'reference':
        most = {name: bounds.of_reference(x.dtype) for name, x in zip(['o', *names], [o, *given.values()], strict=True)}
    else:
        most = bounds_of({n: x.detach() for n, x in given.items()}, **options)
    right = dict(zip(names, wanted, strict=True), o=expected.detach())
    found = dict(zip(names, got, strict=True), o=o.detach())
    for name, (rms, _) in errors(found, right).items():
        assert found[name].shape == right[name].shape
        assert rms <= most[name][0], name


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [FP64, FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ('case', 'backend'),
    [
        (case, backend)
        for case, (names, _, _) in CASES.items()
        for backend in ('reference', 'sdpa')
        if backend != 'sdpa' or not names
    ],
)
def test_against_the_formula(case, backend, dtype):
    names, shapes, options = CASES[case]
    check_formula(backend, inputs(*names, dtype=dtype, **shapes), **options)


@pytest.mark.parametrize('dtype', [FP64, BF16, FP16], ids=str)
def test_decays_and_sinks_in_float32(dtype):
    """For any dtype of q; their gradients are float32 too."""
    given = inputs('g', 'sink_bias', dtype=dtype)
    given.update(g=given['g'].float(), sink_bias=given['sink_bias'].float())
    check_formula('reference', given)


@pytest.mark.parametrize('backend', ['reference', 'sdpa'])
def test_broadcast(backend):
    """Expanded rows, heads and steps share memory; each gradient is counted once."""
    given = inputs(dtype=FP32)
    wide = {'q': given['q'][:1], 'k': given['k'][:, :, :1], 'v': given['v'][:, :1]}
    check_formula(backend, {name: x.expand_as(given[name]) for name, x in wide.items()})
    check_formula(backend, {name: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for name, x in given.items()})


@pytest.mark.parametrize(('backend', 'names'), [('reference', ('g', 'sink_bias')), ('sdpa', ())])
def test_laid_out_chunks_change_nothing(backend, names):
    given, chunks = inputs(*names, batch=1), torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0]], dtype=torch.int32)
    without = results(backend, given, cu_seqlens=CU)
    for laid_out in (chunks, chunks.long()[:, None, 0].repeat(1, 2)):  # they are not read
        found = results(backend, given, cu_seqlens=CU, chunk_indices=laid_out)
        assert all(torch.equal(x, without[name]) for name, x in found.items())


EXPORTED = {
    'plain': ((), {}, {}),
    'window, fewer queries': ((), {'queries': 5}, {'window_size': 6}),
    'packed': ((), {'batch': 1}, {'cu_seqlens': CU}),
    'decays and sinks': (('g', 'sink_bias'), {}, {'window_size': 6}),
}


@pytest.mark.parametrize(
    ('case', 'backend'), [(c, b) for c in EXPORTED for b in ('reference', 'sdpa') if b != 'sdpa' or not EXPORTED[c][0]]
)
def test_exported(case, backend):
    """PyTorch's attention is one operator of the exported program, the formula several."""
    names, shapes, options = EXPORTED[case]

    class Attention(torch.nn.Module):
        def forward(self, **given):
            return parallel_attn.bind(backend=backend)(**given)

    given = {**inputs(*names, dtype=FP32, **shapes), **options}
    exported = torch.export.export(Attention(), (), given)
    operators = {str(node.target) for node in exported.graph.nodes if node.op == 'call_function'}
    assert ('aten.scaled_dot_product_attention.default' in operators) == (backend == 'sdpa')
    o = exported.module()(**given)
    assert bounds.relative_rms(parallel_attn.bind(backend=backend)(**given), o) <= bounds.of_module(FP32)


@pytest.mark.parametrize('backend', ['reference', 'sdpa'])
def test_exported_for_any_length(backend):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return parallel_attn.bind(backend=backend)(q, k, v)

    given, steps = inputs(dtype=FP32), torch.export.Dim('T')
    exported = torch.export.export(Attention(), (), given, dynamic_shapes={name: {1: steps} for name in given})
    for length in (24, 9):
        given = inputs(dtype=FP32, length=length)
        found = exported.module()(**given)
        assert bounds.relative_rms(parallel_attn(**given), found) <= bounds.of_compiled(bounds.of_module(FP32))


def test_which_backend_runs_and_why():
    plain = inputs()
    assert explain(parallel_attn, **plain).winner == 'sdpa'
    decision = explain(parallel_attn, **inputs('sink_bias', dtype=FP32))
    assert decision.winner == 'reference'
    assert 'sink_bias' in decision['sdpa'].reason
    assert 'cpu' in decision['default'].reason
    assert same is parallel_attn


@pytest.mark.parametrize(
    ('names', 'shapes', 'options', 'winner', 'why'),
    [
        ((), {}, {}, 'sdpa', None),
        ((), {'queries': 1}, {'window_size': 4}, 'sdpa', None),
        ((), {'kv_heads': 4, 'value_dim': 16}, {}, 'sdpa', None),
        ((), {'value_dim': 16}, {}, 'default', 'no fused kernel'),
        ((), {'kv_heads': 4, 'value_dim': 6}, {}, 'default', 'no fused kernel'),
        ((), {'kv_heads': 4, 'dim': 12}, {}, 'default', 'no fused kernel'),
        ((), {'dtype': FP32, 'kv_heads': 4, 'dim': 6}, {}, 'default', 'no fused kernel'),
        ((), {'dtype': FP32, 'kv_heads': 4, 'value_dim': 6}, {}, 'default', 'no fused kernel'),
        ((), {'dtype': FP32, 'kv_heads': 4, 'dim': 4, 'value_dim': 12}, {}, 'sdpa', None),
        ((), {'dtype': FP32}, {}, 'default', 'no fused kernel'),
        ((), {'dtype': FP32, 'kv_heads': 4}, {}, 'sdpa', None),
        ((), {'dtype': FP64}, {}, 'sdpa', None),
        ((), {}, {'window_size': 5}, 'default', 'a window needs a mask'),
        ((), {'queries': 5}, {}, 'default', 'queries behind cached keys need a mask'),
        ((), {'batch': 1}, {'cu_seqlens': CU}, 'default', 'packed sequences'),
        (('g',), {}, {}, 'default', 'argument g is not supported'),
        (('sink_bias',), {}, {}, 'default', 'argument sink_bias is not supported'),
        (('g',), {'dtype': FP64}, {}, 'reference', 'argument g is not supported'),
    ],
)
def test_preference_on_a_gpu(names, shapes, options, winner, why):
    given = inputs(*names, **{'dtype': BF16, 'value_dim': 8, **shapes})
    decision = explain(parallel_attn, **given, **options, platform='h100')
    assert decision.winner == winner
    assert decision['sdpa'].reason is None if why is None else why in decision['sdpa'].reason


def test_float64_is_not_for_the_kernels():
    decision = explain(parallel_attn, **inputs('g'), platform='h100')
    assert decision.winner == 'reference'
    assert decision['default'].reason == (
        "dtype of 'q' must be torch.float16, torch.bfloat16, torch.float32, got torch.float64"
    )


def test_explain_says_what_a_backend_says_of_itself(monkeypatch):
    """Which of PyTorch's kernels take the call, with an emulated GPU."""
    monkeypatch.setattr(sdpa, 'has_memory_on_gpu', lambda q: True)
    for able in ({'cudnn', 'flash'}, set()):
        for name in ('cudnn', 'flash', 'efficient'):
            monkeypatch.setattr(
                torch.backends.cuda, f'can_use_{name}_attention', lambda call, debug, yes=name in able: yes, raising=False
            )
        (note,) = explain(parallel_attn, **inputs(), window_size=5)['sdpa'].notes
        assert note == ('PyTorch takes one of its kernels cudnn, flash' if able else "PyTorch takes its kernel 'math'")
    assert explain(parallel_attn, **inputs('g'))['sdpa'].notes == ()


CUDNN, EFFICIENT = SDPBackend.CUDNN_ATTENTION.value, SDPBackend.EFFICIENT_ATTENTION.value


@pytest.fixture
def on_gpu(monkeypatch):
    """Emulates a GPU on which PyTorch would choose this kernel, and can or cannot use FlashAttention."""

    def make(choice, flash=True):
        for module in (sdpa, cudnn):
            monkeypatch.setattr(module, 'has_memory_on_gpu', lambda q: True)
        monkeypatch.setattr(torch, '_fused_sdp_choice', lambda *asked, **options: choice)
        for name in ('cudnn', 'flash', 'efficient'):
            yes = flash or name == 'cudnn'
            monkeypatch.setattr(torch.backends.cuda, f'can_use_{name}_attention', lambda *asked, yes=yes: yes, raising=False)
        called = []

        def attend(q, k, v, scale):
            called.append(k.shape[1])
            return sdpa._attend(q, k, v, scale=scale, enable_gqa=True)[0]

        monkeypatch.setattr(sdpa, '_flash', attend)
        return called

    return make


STEP = {'dtype': FP32, 'queries': 1, 'kv_heads': 2, 'value_dim': 8}


@pytest.mark.parametrize(('choice', 'flash'), [(CUDNN, True), (CUDNN, False), (EFFICIENT, True)])
@pytest.mark.parametrize('options', [{}, {'window_size': 7}], ids=str)
def test_a_step_of_decoding_keeps_from_cudnn(on_gpu, choice, flash, options):
    """If PyTorch would take cuDNN and FlashAttention can serve; `explain` notes it."""
    called = on_gpu(choice, flash)
    for scale in (None, -0.7):
        check('sdpa', inputs(**STEP), scale=scale, **options)
    seen, kept = min(24, options.get('window_size', 24)), choice == CUDNN and flash
    assert called == ([seen, seen] if kept else [])
    (note,) = explain(parallel_attn, **inputs(**STEP), **options)['sdpa'].notes
    assert note.startswith("PyTorch's FlashAttention") == kept


@pytest.mark.parametrize('other', [{'queries': None}, {'length': 1}, {'batch': 0}], ids=str)
def test_what_pytorch_chooses_for(on_gpu, other):
    """Several queries, one key, no rows."""
    called = on_gpu(CUDNN)
    parallel_attn.bind(backend='sdpa')(**inputs(**STEP | other))
    assert not called


@pytest.mark.parametrize('how', ['compiled', 'vmap', 'grad'])
def test_where_nobody_can_say_what_pytorch_chooses(on_gpu, how):
    called = on_gpu(CUDNN)
    given = inputs(**STEP)
    call = parallel_attn.bind(backend='sdpa')
    right = call(**given)
    assert called == [24]
    if how == 'compiled':
        torch._dynamo.reset()
        o = torch.compile(lambda given: call(**given), backend='eager', fullgraph=True)(given)
    elif how == 'vmap':
        o = torch.func.vmap(lambda *qkv: call(*qkv))(*(x[None] for x in given.values()))[0]
    else:
        o = torch.func.grad_and_value(lambda s: call(s * given['q'], given['k'], given['v']).sum())(torch.tensor(1.0))[1]
        right = right.sum()
    torch.testing.assert_close(o, right)
    assert called == [24]


@pytest.mark.parametrize('names', [(), ('g', 'sink_bias')])
def test_the_default_on_fake_tensors(names):
    """Fake tensors of a GPU, as compiled code has them."""
    pytest.importorskip('triton')
    o = parallel_attn.bind(backend='default')(**fakes(inputs(*names, dtype=BF16)))
    assert (o.shape, o.dtype, o.device.type) == ((2, 24, 4, 6), BF16, 'cuda')


def test_the_default_says_what_it_needs():
    with use_backend('default', op='attn'), pytest.raises(NoBackendError, match='cpu'):
        parallel_attn(**inputs(dtype=FP32))


def test_without_the_dispatcher():
    """With dispatch off only the default runs, and its error says what it needs."""
    code = """
import torch
from fla.ops.attn import parallel_attn
x = torch.ones(1, 2, 1, 8)
try:
    parallel_attn(x, x, x)
except (RuntimeError, ImportError) as error:
    assert 'parallel_attn' in str(error) and 'reference' in str(error), error
else:
    raise AssertionError('it ran')
"""
    done = process.run(code, FLA_DISABLE_BACKEND_DISPATCH='1', TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr


def test_toggle(monkeypatch):
    monkeypatch.setenv('FLA_SDPA', '0')
    assert explain(parallel_attn, **inputs()).winner == 'reference'


@pytest.mark.parametrize('backend', ['reference', 'sdpa'])
def test_empty(backend):
    with use_backend(backend, op='attn'):
        for shape in ((0, 4), (2, 0)):
            q, k = torch.zeros(*shape, 4, 8), torch.zeros(*shape, 2, 8)
            assert parallel_attn(q, k, k).shape == q.shape
        none = torch.zeros(1, 0, 4, 8)
        assert parallel_attn(none, none, none, cu_seqlens=torch.tensor([0, 0])).shape == none.shape
        assert parallel_attn(none, none, none, cu_seqlens=torch.tensor([0])).shape == none.shape


def test_shapes_on_meta_tensors():
    for names in ((), ('g', 'sink_bias')):
        given = inputs(*names, dtype=BF16)
        o = parallel_attn(**{n: x.to('meta') for n, x in given.items()})
        assert (o.shape, o.dtype) == ((2, 24, 4, 6), BF16)


def test_no_sequence_of_some_steps():
    given = {n: x.to('meta') for n, x in inputs(batch=1).items()}
    with pytest.raises(ValueError, match='cu_seqlens holds no sequence, but there are T = 24 steps'):
        parallel_attn(**given, cu_seqlens=torch.zeros(1, dtype=torch.int32, device='meta'))


PACKED_CASES = [
    *(('reference', ('g', 'sink_bias'), name) for name in ('q', 'k', 'v', 'g')),
    *(('sdpa', (), name) for name in ('q', 'k', 'v')),
]


@pytest.mark.parametrize(('backend', 'names', 'name'), PACKED_CASES)
@pytest.mark.parametrize('window_size', [None, 20])
def test_what_is_no_number_stays_in_its_sequence(backend, names, name, window_size):
    given = inputs(*names, batch=1, length=70)
    given[name][0, 3] = torch.nan
    check_apart(results(backend, given, cu_seqlens=torch.tensor([0, 1, 40, 40, 70]), window_size=window_size))


@pytest.mark.parametrize(('backend', 'names'), [('reference', ('g', 'sink_bias')), ('sdpa', ())])
@pytest.mark.parametrize('window_size', [None, 3])
def test_packed_sequences_whose_lengths_only_a_device_knows(monkeypatch, backend, names, window_size):
    given = inputs(*names, batch=1)
    options = {'cu_seqlens': CU, 'window_size': window_size}
    one_by_one = results(backend, given, **options)
    monkeypatch.setattr(naive, 'readable', lambda lens: False)
    for name, x in results(backend, given, **options).items():
        assert bounds.relative_rms(one_by_one[name], x) <= bounds.TWO_ORACLES, name


def test_compiled_for_any_length():
    compiled = torch.compile(parallel_attn.bind(backend='sdpa'), fullgraph=True, dynamic=True, backend='aot_eager')
    for length in (24, 9):
        given = inputs(length=length)
        torch.testing.assert_close(compiled(**given), parallel_attn(**given))


@pytest.mark.parametrize('scale', [-0.3, 0, 0.3, None])
def test_pytorch_gets_a_scale_above_0(monkeypatch, scale):
    """Prefers the default on a GPU, but not on a CPU."""
    seen, attention = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **options):
        seen.append(options['scale'])
        return attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', watched)
    parallel_attn.bind(backend='sdpa')(**inputs(), scale=scale)
    assert seen == [None if scale is None else abs(scale) or 1.0]


@pytest.mark.parametrize('options', [{}, {'window_size': 5}, {'cu_seqlens': CU}], ids=['plain', 'window', 'packed'])
def test_forward_mode(options):
    """PyTorch's kernels have no forward-mode AD, so `reference` serves. Tangents agree with the gradients."""
    given = inputs(**({'batch': 1} if 'cu_seqlens' in options else {}))
    values = tuple(given[name].detach() for name in 'qkv')
    tangents = tuple(torch.randn_like(x) for x in values)
    with trace() as recorded:
        o, change = torch.func.jvp(lambda q, k, v: parallel_attn(q, k, v, **options), values, tangents)
    assert recorded.last_backend('attn.parallel_attn') == 'reference'
    leaves = [x.clone().requires_grad_() for x in values]
    expected, weights = oracle(*leaves, **options), torch.randn_like(o)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    products = sum((a * b).sum() for a, b in zip(gradients, tangents, strict=True))
    assert error(expected, o) <= bounds.TWO_ORACLES
    # relative to the terms of the sum, which may cancel
    terms = change * weights
    assert abs(float(terms.sum() - products)) <= bounds.TWO_ORACLES * float(terms.abs().sum())
    with trace() as recorded:
        parallel_attn(*values, **options)
    assert recorded.last_backend('attn.parallel_attn') == 'sdpa'


def test_strong_gates_do_not_overflow():
    given = inputs('g', dtype=FP32)
    given['g'] = given['g'] * 100
    assert error(oracle(**{n: x.double() for n, x in given.items()}), parallel_attn(**given)) <= bounds.EXACT[FP32]


def test_strides_autocast_compile_and_second_derivatives():
    given = inputs(dtype=FP32)
    strided = {n: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for n, x in given.items()}
    expected = oracle(**{n: x.double() for n, x in given.items()})
    for backend in ('reference', 'sdpa'):
        bound = parallel_attn.bind(backend=backend)
        assert error(expected, bound(**strided)) <= bounds.of_module(FP32)
        with torch.autocast('cpu', BF16):
            assert error(expected, bound(**given)) <= bounds.of_module(FP32)
        compiled = torch.compile(lambda q, k, v, call=bound: call(q, k, v), fullgraph=True, backend='aot_eager')
        assert error(expected, compiled(**given)) <= bounds.of_module(FP32)
    small = inputs('g', 'sink_bias', batch=1, length=4, heads=2, kv_heads=1, dim=2, value_dim=2)
    q, k, v, g, sink = (x.requires_grad_() for x in small.values())
    assert torch.autograd.gradgradcheck(lambda *a: naive_parallel_attn(*a[:4], sink_bias=a[4]), (q, k, v, g, sink))


def test_the_second_derivatives_of_pytorch_s_attention_are_refused():
    """PyTorch raises; the reference's second derivatives are right."""
    given = {name: x.requires_grad_() for name, x in inputs(kv_heads=4, value_dim=8).items()}
    (dq,) = torch.autograd.grad(parallel_attn(**given).sum(), given['q'], create_graph=True)
    with pytest.raises(RuntimeError, match='not implemented'):
        dq.sum().backward()


@table(
    ('change', 'kind', 'message'),
    [
        ({'q': torch.zeros(2, 24, 8)}, ValueError, 'q must have 4 dimensions'),
        ({'q': torch.zeros(2, 24, 4, 8).int()}, TypeError, 'q must be float16'),
        ({'k': torch.zeros(2, 24, 2, 8)}, TypeError, 'q, k and v must have one dtype'),
        ({'k': torch.zeros(2, 24, 2, 7).double()}, ValueError, 'k must have the batch and head dim of q'),
        ({'v': torch.zeros(2, 23, 2, 8).double()}, ValueError, 'v must have the batch, time and heads of k'),
        ({'q': torch.zeros(2, 24, 3, 8).double()}, ValueError, 'heads of q must be a multiple'),
        ({'q': torch.zeros(2, 25, 4, 8).double()}, ValueError, 'k must be at least as long as q'),
        ({'q': torch.zeros(2, 24, 4, 300).double()}, ValueError, 'head dim of q must be between 1 and 256'),
        ({'q': None}, TypeError, "argument 'q' must be a tensor, got None"),
        ({'q': torch.Tensor}, TypeError, "'q' must be a tensor"),
        ({'scale': '1'}, TypeError, 'scale must be a number or None, got str'),
        ({'scale': torch.nan}, ValueError, 'scale must be finite, got nan'),
        ({'scale': torch.inf}, ValueError, 'scale must be finite, got inf'),
        ({'scale': -torch.inf}, ValueError, 'scale must be finite, got -inf'),
        ({'window_size': 2.0}, TypeError, 'window_size must be a whole number or None, got float'),
        ({'scale': 2**70}, ValueError, 'scale must be within 64 bits'),
        ({'window_size': 2**63}, ValueError, 'window_size must be within 64 bits'),
        ({'window_size': 0}, ValueError, 'window_size must be at least 1'),
        ({'g': torch.zeros(2, 24, 2).double()}, ValueError, r'g must be \[B, T, HQ\]'),
        ({'g': torch.zeros(2, 24, 4).bfloat16()}, TypeError, 'g must be'),
        ({'sink_bias': torch.zeros(2).double()}, ValueError, r'sink_bias must be \[HQ\]'),
        ({'cu_seqlens': torch.tensor([0, 24])}, ValueError, 'batch must be 1'),
        ({'chunk_indices': [0]}, TypeError, "'chunk_indices' must be a tensor, got list"),
        ({'chunk_indices': torch.zeros(3)}, ValueError, 'chunk_indices must be'),
        ({'q': torch.zeros(2, 1, 4, 8).double(), 'g': torch.zeros(2, 1, 4).double()}, ValueError, 'g needs k to be as long'),
        ({'v': torch.zeros(2, 24, 2, 8, device='meta').double()}, ValueError, "'v' is on meta"),
        ({'k': torch.zeros(2, 24, 0, 8).double(), 'v': torch.zeros(2, 24, 0, 6).double()}, ValueError, 'k has 0'),
        ({'q': torch.zeros(2, 24, 4, 0).double()}, ValueError, 'head dim of q must be between 1 and 256, got 0'),
        ({'v': torch.zeros(2, 24, 2, 0).double()}, ValueError, 'head dim of v must be between 1 and 256, got 0'),
        ({'v': torch.zeros(2, 24, 2, 257).double()}, ValueError, 'head dim of v must be between 1 and 256, got 257'),
        ({'k': torch.zeros(3, 24, 2, 8).double()}, ValueError, 'k must have the batch and head dim of q'),
        ({'v': torch.zeros(2, 24, 2, 6)}, TypeError, 'q, k and v must have one dtype'),
        ({'window_size': True}, TypeError, 'window_size must be a whole number or None, got bool'),
        ({'window_size': -3}, ValueError, 'window_size must be at least 1'),
        ({'scale': True}, TypeError, 'scale must be a number or None, got bool'),
        (
            {'sink_bias': torch.zeros(4).half()},
            TypeError,
            'sink_bias must be torch.float64 or torch.float32, got torch.float16',
        ),
        ({'chunk_indices': torch.zeros(3, 3).int()}, ValueError, r'chunk_indices must be \[chunks, 2\]'),
        ({'chunk_indices': torch.zeros(3, 2)}, TypeError, 'chunk_indices must be int32 or int64, got torch.float32'),
        ({'chunk_indices': torch.zeros(3, 2).bool()}, TypeError, 'chunk_indices must be int32 or int64, got torch.bool'),
        ({'q': torch.zeros(2, 24, 4, 8).double().to_sparse()}, TypeError, r"'q' must be a dense tensor, .* q.to_dense\(\)"),
        ({'g': torch.zeros(2, 24, 4).double().to_sparse()}, TypeError, "'g' must be a dense tensor"),
        ({'sink_bias': torch.zeros(4).double().to_sparse()}, TypeError, "'sink_bias' must be a dense tensor"),
        ({'cu_seqlens': CU.to_sparse()}, TypeError, "'cu_seqlens' must be a dense tensor"),
        *(
            (
                {name: torch.nested.nested_tensor([torch.zeros(24, 4)])},
                TypeError,
                f"'{name}' must be a dense tensor, got a nested",
            )
            for name in ('q', 'k', 'v', 'g', 'sink_bias', 'cu_seqlens', 'chunk_indices')
        ),
        ({'scale': Fraction(1, 2)}, TypeError, 'scale must be a number or None, got Fraction'),
        ({'cu_seqlens': [0, 24]}, TypeError, "'cu_seqlens' must be a tensor, got list"),
        (
            {'q': torch.zeros(2, 1, 4, 8).double(), 'cu_seqlens': CU},
            ValueError,
            'cu_seqlens needs k to be as long as q: q has T = 1, k has 24',
        ),
        ({'sink': None}, TypeError, 'sink'),
    ],
)
def test_bad_calls(change, kind, message):
    """The same error for every backend, the default included, which has no GPU here."""
    for backend in ('reference', 'sdpa', 'default'):
        with use_backend(backend, op='attn'), pytest.raises(kind, match=message):
            parallel_attn(**{**inputs(), **change})


def test_decays_that_grow_are_refused_if_values_are_checked():
    given = inputs('g')
    given['g'][0, 3, 1] = 0.5
    parallel_attn(**given)
    message = r'g must be at most 0 \(a logarithm of a decay\), got a maximum of 0.5'
    with policy_context(Policy(check_values=True)), pytest.raises(ValueError, match=message):
        parallel_attn(**given)


@pytest.mark.parametrize('dtype', [FP32, BF16], ids=['fp32', 'bf16'])
def test_weak_decays_behind_strong_ones(dtype):
    """Running sums of 25,000 would be off by 1e-3 in float32, and so would the decays of the last steps."""
    given = inputs('g', dtype=dtype, batch=1, length=600, heads=2, kv_heads=1)
    given['g'] = given['g'].float()
    given['g'][:, :500] -= 50
    given['g'][:, 500:] *= 1e-3
    check('reference', given)


def test_a_decay_of_everything():
    """Earlier keys are invisible; later steps are as if the sequence began there."""
    given = inputs('g', dtype=FP64, batch=1)
    given['g'][:, 10] = -torch.inf
    leaves = {n: x.requires_grad_() for n, x in given.items()}
    o = parallel_attn(**leaves)
    torch.testing.assert_close(o[:, :10], parallel_attn(**{n: x[:, :10] for n, x in given.items()}))
    torch.testing.assert_close(o[:, 10:], parallel_attn(**{n: x[:, 10:] for n, x in given.items()}))
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), list(leaves.values())))
    given['g'].data[:, 12] = torch.nan
    assert parallel_attn(**given)[:, 12:].isnan().all()
