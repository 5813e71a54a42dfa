"""The TileLang backends on a Hopper GPU: errors, bits, CUDA graphs, streams, compiled callers."""

import importlib.util

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from tests.ops.delta_rules import case, name_of
from tests.ops.kernels import BF16, EVERYTHING, FP16, assert_same, beyond, call, check, everything, operation

pytestmark = pytest.mark.gpu

LARGE = {'H': 2, 'HV': 4, 'K': 128, 'V': 128, 'B': 2, 'T': 200, 'device': 'cuda'}
BOTH = pytest.mark.parametrize('function', [chunk_gated_delta_rule, chunk_kda], ids=name_of)


@pytest.fixture(autouse=True)
def hopper():
    if importlib.util.find_spec('tilelang') is None:
        pytest.skip('TileLang is not installed')
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip('the kernels are for compute capability 9.x')


@BOTH
@pytest.mark.parametrize('dtype', [BF16, FP16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('sizes', [(128, 128), (64, 128), (128, 64), (64, 64)], ids=lambda s: f'{s[0]}x{s[1]}')
def test_sizes(function, dtype, sizes):
    check(function, case(function, **{**LARGE, 'dtype': dtype, 'K': sizes[0], 'V': sizes[1]}), backend='tilelang')


@BOTH
def test_lengths_and_gates(function):
    options = {
        'one step': {'T': 1},
        'a chunk': {'T': 64},
        'beyond': {'T': 65},
        'weak': {'strength': -1e-4},
        'strong': {'strength': -20.0},
        'of all strengths': {'strength': 'spread'},
    }
    given = {name: case(function, **{**LARGE, 'dtype': BF16, **one}) for name, one in options.items()}
    wrong = {name: found for name, one in given.items() if (found := beyond(function, one, backend='tilelang'))}
    assert not wrong


@BOTH
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
def test_packed_with_everything(function, index):
    options = {**LARGE, **EVERYTHING, 'lens': [0, 1, 130, 64, 0, 65, 3], 'index': index, 'dtype': BF16}
    check(function, case(function, **options), backend='tilelang')


@BOTH
def test_gates_in_bf16(function):
    check(function, case(function, **LARGE, dtype=BF16, gate_dtype=BF16, initial=False), backend='tilelang')


def test_bounded_gates_and_kept_tensors():
    given = case(chunk_kda, **LARGE, dtype=BF16, use_gate_in_kernel=True, lower_bound=-5.0, disable_recompute=True)
    check(chunk_kda, given, backend='tilelang')


@BOTH
def test_same_bits_twice(function):
    given = case(function, **LARGE, dtype=BF16)
    assert_same(everything(function, given, 'tilelang'), everything(function, given, 'tilelang'))


@BOTH
def test_captured(function):
    """A graph replays on new inputs; the first call was outside of it."""
    given = case(function, **LARGE, dtype=BF16)
    leaves = {name: x.detach().requires_grad_() for name, x in given.tensors.items()}
    ready = given.with_tensors(**leaves)

    def step():
        o, final = call(function, ready, 'tilelang')
        return (
            o,
            final,
            *torch.autograd.grad([o, final], list(leaves.values()), [torch.ones_like(o), torch.ones_like(final)]),
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        leaves['v'].mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    found = [x.clone() for x in captured]
    assert all(torch.equal(x, y) for x, y in zip(found, step(), strict=True))


@BOTH
def test_on_the_current_stream(function):
    """What the stream has still to do comes first."""
    given = case(function, **LARGE, dtype=BF16)
    with torch.no_grad(), use_backend('tilelang', op=operation(function)):
        right, _ = given.call(function)
        busy = torch.zeros(2**28, device='cuda')
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            v = torch.zeros_like(given.tensors['v'])
            for _ in range(20):
                busy.add_(1)
            v.copy_(given.tensors['v'])
            late, _ = given.with_tensors(v=v).call(function)
        torch.cuda.synchronize()
    assert torch.equal(late, right)


@BOTH
@pytest.mark.parametrize(
    'how', [{'backend': 'aot_eager'}, {'mode': 'reduce-overhead'}], ids=lambda how: next(iter(how.values()))
)
def test_compiled_callers(function, how):
    """Forward and backward give the bits of eager code; as graphs are captured and replayed, too."""
    torch._dynamo.reset()
    given = case(function, **LARGE, dtype=BF16)
    leaves = {name: x.detach().requires_grad_() for name, x in given.tensors.items()}

    def results(**tensors):
        return function(**tensors)[0]

    with use_backend('tilelang', op=operation(function)):
        o = results(**leaves)
        do = torch.randn_like(o)
        expected = [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)]
        compiled = torch.compile(results, fullgraph=True, **how)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            o = compiled(**leaves)
            found = [o.detach().clone(), *torch.autograd.grad(o, list(leaves.values()), do)]
            assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    torch._dynamo.reset()


@BOTH
def test_exported(function):
    given = case(function, **LARGE, dtype=BF16)

    class Model(torch.nn.Module):
        def forward(self, **tensors):
            return function(**tensors)

    with use_backend('tilelang', op=operation(function)), torch.no_grad():
        program = torch.export.export(Model(), (), dict(given.tensors), strict=False)
        assert any('tilelang' in str(node.target) for node in program.graph.nodes)
        right, _ = function(**given.tensors)
        found, _ = program.module()(**given.tensors)
    assert torch.equal(right, found)
