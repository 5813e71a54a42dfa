"""Attention on a GPU: every backend that can run there against the formula in float64, at sizes that the interpreter is too
slow for; streams, graph capture, compiled code, other devices."""

import importlib.util

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import explain, trace, use_backend
from fla.ops.attn import parallel_attn
from tests import bounds
from tests.ops.attn.attention import BF16, FP16, FP32, bounds_of, check, exact, inputs, results

pytestmark = pytest.mark.gpu

CUDA = {'device': 'cuda'}
LENS = [0, 0, 1, 130, 130, 300, 333, 333]
CASES = {
    'plain': ((), {}, {}),
    'one head of keys': ((), {'kv_heads': 1}, {'scale': 0.3}),
    'negative scale': ((), {'kv_heads': 4}, {'scale': -0.1}),
    'scale of 0': ((), {'kv_heads': 4}, {'scale': 0}),
    'window of 1': ((), {}, {'window_size': 1}),
    'window': ((), {}, {'window_size': 70}),
    'cached': ((), {'queries': 100}, {}),
    'cached, window': ((), {'queries': 100}, {'window_size': 70}),
    'one query': ((), {'queries': 1}, {}),
    'few queries, window, sinks': (('sink_bias',), {'queries': 7}, {'window_size': 70}),
    'decay': (('g',), {}, {}),
    'decay, sinks, window': (('g', 'sink_bias'), {}, {'window_size': 70}),
    'packed': ((), {'batch': 1}, {'cu_seqlens': LENS}),
    'packed, everything': (('g', 'sink_bias'), {'batch': 1}, {'cu_seqlens': LENS, 'window_size': 70}),
}
every_dtype = pytest.mark.parametrize('dtype', [BF16, FP16, FP32], ids=['bf16', 'fp16', 'fp32'])


def options_of(options, index=torch.int32):
    lens = options.get('cu_seqlens')
    return options if lens is None else {**options, 'cu_seqlens': torch.tensor(lens, device='cuda', dtype=index)}


def check_cases(cases, dtype, dims):
    for names, shapes, options in cases:
        given = inputs(*names, **{'dtype': dtype, 'length': 333, 'dim': dims[0], 'value_dim': dims[1], **CUDA, **shapes})
        check('default', given, **options_of(options))


@pytest.mark.parametrize(('dtype', 'dim'), [(BF16, 128), (FP32, 64)], ids=str)
def test_default(dtype, dim):
    """Every case; compilation takes most of the time."""
    check_cases(CASES.values(), dtype, (dim, dim))


@pytest.mark.parametrize('dims', [(64, 64), (256, 256), (192, 128), (100, 72), (16, 16), (1, 5)], ids=str)
def test_sizes(dims):
    check_cases((CASES['plain'], CASES['packed, everything']), BF16, dims)


@pytest.mark.parametrize(('dtype', 'dims'), [(FP32, (128, 128)), (FP32, (256, 256)), (FP16, (128, 128))], ids=str)
def test_dtypes(dtype, dims):
    check_cases((CASES['plain'], CASES['packed, everything']), dtype, dims)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize('dims', [(128, 128), (64, 64), (256, 256), (192, 128), (100, 72), (16, 16), (1, 5)], ids=str)
def test_every_case(dtype, dims):
    """Takes half an hour to compile."""
    check_cases(CASES.values(), dtype, dims)


@pytest.mark.parametrize('dtype', [BF16, FP32], ids=['bf16', 'fp32'])
def test_lengths(dtype):
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1024, 2051):
        given = inputs(
            'g', 'sink_bias', dtype=dtype, length=length, batch=1, heads=2, kv_heads=1, dim=64, value_dim=64, **CUDA
        )
        check('default', given)
        check('default', given, window_size=200)


@pytest.mark.parametrize('strength', [1e-4, 1.0, 20.0, 1000.0])
@pytest.mark.parametrize('dtype', [BF16, FP32], ids=['bf16', 'fp32'])
def test_decays(dtype, strength):
    given = inputs('g', dtype=dtype, length=600, dim=64, value_dim=64, strength=strength, **CUDA)
    given['g'] = given['g'].float()
    check('default', given)
    given['g'][:, 20:500] *= 1e-3
    check('default', given)


@pytest.mark.parametrize('lens', [[0, 333], [0, *range(1, 71)], [0, 0, 100, 100], [0, 64, 128, 1024]], ids=len)
def test_packed_sequences(lens):
    for index in (torch.int32, torch.int64):
        given = inputs('g', dtype=BF16, batch=1, length=lens[-1], dim=128, value_dim=128, **CUDA)
        check('default', given, **options_of({'cu_seqlens': lens}, index))


@every_dtype
@pytest.mark.parametrize('dims', [(128, 128), (64, 64), (100, 72)], ids=str)
def test_sdpa(dtype, dims):
    for names, shapes, options in CASES.values():
        if not names:
            given = inputs(**{'dtype': dtype, 'length': 333, 'dim': dims[0], 'value_dim': dims[1], **CUDA, **shapes})
            check('sdpa', given, **options_of(options))


# a part of each backend's kernel names
PYTORCHS = {'cudnn': 'cudnn', 'flash': 'flash_fwd', 'efficient': 'fmha_cutlass'}


@pytest.mark.parametrize('dtype', [BF16, FP32], ids=['bf16', 'fp32'])
@pytest.mark.parametrize('queries', [1, 64])
def test_explain_names_the_kernels_of_pytorch(dtype, queries):
    """The kernel that actually runs belongs to the backend."""
    given = inputs(dtype=dtype, length=64, queries=queries, dim=64, value_dim=64, kv_heads=4, **CUDA)
    decision = explain(parallel_attn, **given)
    assert decision.winner == 'sdpa'
    (note,) = decision['sdpa'].notes
    (ran,) = kernels_of_pytorch(given)
    if dtype == BF16 and queries == 1:
        assert ran == 'flash'
        assert 'FlashAttention' in note
    else:
        assert ran in note


def kernels_of_pytorch(given):
    """The backends whose kernels run."""
    parallel_attn(**given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        parallel_attn(**given)
        torch.cuda.synchronize()
    kernels = ' '.join(event.key for event in profile.key_averages())
    return [name for name, part in PYTORCHS.items() if part in kernels]


def test_a_step_of_decoding_keeps_from_cudnn():
    """cuDNN takes tens of milliseconds for each new number of keys. Also for unaligned tensors, and without rows."""
    for moved, options in ((0, {}), (1, {}), (0, {'window_size': 50})):
        given = inputs(dtype=BF16, length=301, queries=1, dim=64, value_dim=64, kv_heads=2, **CUDA)
        given['k'] = torch.nn.functional.pad(given['k'].flatten(), (moved, 0))[moved:].view_as(given['k'])
        assert kernels_of_pytorch({**given, **options}) == ['flash']
        check('sdpa', given, **options)
    none = inputs(dtype=BF16, batch=0, length=301, queries=1, **CUDA)
    assert parallel_attn.bind(backend='sdpa')(**none).shape == (0, 1, 4, 6)


MOST = {'plain', 'negative scale', 'scale of 0', 'one head of keys', 'window', 'cached', 'one query'}
PACKED = {'packed', 'plain', 'negative scale', 'window'}
VENDORS = {
    'flash_attn': ('flash_attn', 'FLA_FLASH_ATTN', MOST | PACKED),
    'flash_attn_3': ('flash_attn_interface', 'FLA_FLASH_ATTN_3', MOST | PACKED),
    'flashinfer': ('flashinfer', 'FLA_FLASHINFER_ATTN', MOST),
    'xformers': ('xformers', 'FLA_XFORMERS', MOST),
    'torch_varlen': ('torch.nn.attention.varlen', 'FLA_TORCH_VARLEN', PACKED),
}


@pytest.mark.parametrize('name', VENDORS)
@pytest.mark.parametrize('dtype', [BF16, FP16], ids=['bf16', 'fp16'])
def test_vendors(monkeypatch, name, dtype):
    """Every installed package: its results are right, and it takes some call of each kind."""
    package, variable, wanted = VENDORS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'{package} is not installed')
    monkeypatch.setenv(variable, '1')
    served = set()
    for case, (names, shapes, options) in CASES.items():
        sizes = {'batch': 1} if name == 'flashinfer' else {}
        for dim in (64, 128, 256):
            made = {'dtype': dtype, 'length': 333, 'dim': dim, 'value_dim': dim, **CUDA, **sizes, **shapes}
            given, more = inputs(*names, **made), options_of(options)
            grad = name != 'flashinfer'
            with torch.set_grad_enabled(grad):
                able = explain(parallel_attn, **given, **more)[name]
            if able.verdict == 'unavailable':
                pytest.skip(able.reason)
            if able.can_run:
                check(name, given, grad, **more)
                served.add(case)
    assert wanted <= served


def test_large():
    """q has more than 2^31 elements, and the last rows are as accurate as the first."""
    torch.manual_seed(0)
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip('needs 16 GiB')
    length, heads, dim = 2**18 + 3, 65, 128
    q = torch.randn(1, length, heads, dim, device='cuda', dtype=BF16)
    k = torch.randn(1, length, 1, dim, device='cuda', dtype=BF16)
    with torch.no_grad(), use_backend('default', op='attn'):
        o = parallel_attn(q, k, k, window_size=64)
    tail = {'q': q[:, -5:], 'k': k[:, -200:], 'v': k[:, -200:]}
    wanted = exact(tail, grad=False, window_size=64)['o']
    assert bounds.relative_rms(wanted, o[:, -5:]) <= bounds_of(tail, grad=False, window_size=64)['o'][0]


def test_strides_and_same_bits_twice():
    given = inputs('g', 'sink_bias', dtype=BF16, length=333, dim=64, value_dim=64, **CUDA)
    strided = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in given.items()}
    first, second, third = results('default', given), results('default', given), results('default', strided)
    for name, x in first.items():
        assert torch.equal(x, second[name])
        assert torch.equal(x, third[name])


@pytest.mark.parametrize(('backend', 'names'), [('default', ('g', 'sink_bias')), ('sdpa', ())])
def test_broadcasts(backend, names):
    """Expanded rows, heads and steps, which share memory."""
    given = inputs(*names, dtype=BF16, length=333, dim=64, value_dim=64, **CUDA)
    wide = {'q': given['q'][:1], 'k': given['k'][:, :, :1], 'v': given['v'][:, :1]}
    if names:
        wide |= {'g': given['g'][:, :, :1], 'sink_bias': given['sink_bias'][:1]}
    check(backend, {name: x.expand_as(given[name]) for name, x in wide.items()})


def test_companions_in_float32_and_laid_out_chunks():
    given = inputs('g', 'sink_bias', dtype=BF16, batch=1, length=333, dim=64, value_dim=64, **CUDA)
    given.update(g=given['g'].float(), sink_bias=given['sink_bias'].float())
    packed = options_of({'cu_seqlens': LENS})
    found = check('default', given, **packed)
    again = results('default', given, chunk_indices=torch.zeros(9, 2, device='cuda', dtype=torch.int32), **packed)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def test_graph_capture_on_another_stream():
    """Captured forward and backward replay on new numbers and lengths."""
    given = inputs('g', dtype=BF16, batch=1, length=333, dim=64, value_dim=64, **CUDA)
    lens = torch.tensor(LENS, device='cuda')
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    weights = torch.randn_like(leaves['v']).repeat(1, 1, 2, 1)

    def step():
        o = parallel_attn(**leaves, cu_seqlens=lens)
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), weights)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves.values():
            x.copy_(x.flip(1))
    lens.copy_(torch.tensor([0, 5, 5, 100, 200, 200, 201, 333]))
    graph.replay()
    found = [x.clone() for x in captured]
    assert all(torch.equal(ours, eager) for ours, eager in zip(found, step(), strict=True))


@pytest.mark.parametrize('mode', [None, 'reduce-overhead'])
def test_compiled(mode):
    given = inputs('g', 'sink_bias', dtype=BF16, length=333, dim=64, value_dim=64, **CUDA)
    leaves = [x.requires_grad_() for x in given.values()]
    wanted = results('default', given)
    compiled = torch.compile(lambda *a: parallel_attn(*a[:4], sink_bias=a[4]), fullgraph=True, mode=mode)
    weights = torch.randn(wanted['o'].shape, generator=torch.Generator().manual_seed(9)).bfloat16().to('cuda')
    with trace() as recorded:
        compiled(*leaves)  # recorded once, during tracing
    assert recorded.last_backend('attn.parallel_attn') == 'default'
    for _ in range(3):
        o = compiled(*leaves)
        got = [o.detach().clone(), *(x.clone() for x in torch.autograd.grad(o, leaves, weights))]
        assert all(torch.equal(x, y) for x, y in zip(got, wanted.values(), strict=True))
    torch._dynamo.reset()


def test_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip('one GPU')
    given = inputs('g', 'sink_bias', dtype=BF16, length=100, device='cuda:1')
    assert torch.cuda.current_device() == 0
    check('default', given)
