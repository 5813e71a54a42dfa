"""The operations on a GPU beside other work: no hidden synchronisation, CUDA graphs, compiled callers, a second GPU."""

import threading

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import use_backend
from tests import bounds
from tests.ops.delta_rules import CHUNKED, FLAGS, FUNCTIONS, Case, case, name_of
from tests.ops.kernels import BF16, assert_same, call, everything, operation, upstream

pytestmark = pytest.mark.gpu
every_function = pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
every_chunked = pytest.mark.parametrize('function', CHUNKED, ids=name_of)
SIZES = {'dtype': BF16, 'H': 2, 'HV': 4, 'K': 64, 'V': 64, 'device': 'cuda', **FLAGS}
SHAPES = {'equal': {'T': 150, 'B': 2}, 'packed': {'lens': [0, 1, 100, 0, 49]}, 'one step': {'T': 1, 'B': 4}}
every_shape = pytest.mark.parametrize('shape', SHAPES)
two_gpus = pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason='needs two GPUs')


def renewed(given: Case) -> Case:
    """Other numbers of the same shapes, dtypes and kinds."""
    return given.with_tensors(**{name: x.flip(1) if x.dim() > 2 else x * 0.5 for name, x in given.tensors.items()})


# -- synchronisation --------------------------------------------------------------------------------------------------------


@every_shape
@every_function
def test_no_synchronisation(function, shape):
    """Forward and backward, after a first call that compiles."""
    given = case(function, **SIZES, **SHAPES[shape])
    leaves = {name: x.requires_grad_(function in CHUNKED) for name, x in given.tensors.items()}
    gradients = upstream(*call(function, given))

    def step():
        o, final = call(function, given)
        return torch.autograd.grad([o, final], list(leaves.values()), gradients) if function in CHUNKED else o

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')


# -- CUDA graphs ------------------------------------------------------------------------------------------------------------


def captured(step):
    """A graph of what `step` does, and what it returned while it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def replayed(given: Case, names, graph, results, fresh: Case) -> dict[str, torch.Tensor]:
    """What the graph gives for other inputs."""
    with torch.no_grad():
        for name, x in fresh.tensors.items():
            given.tensors[name].copy_(x)
        for x in results:
            x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return dict(zip(names, [x.detach().clone() for x in results], strict=True))


@every_shape
@every_function
def test_captured_forward(function, shape):
    given = case(function, **SIZES, **SHAPES[shape])

    def step():
        with torch.no_grad():
            return call(function, given)

    graph, results = captured(step)
    for fresh in (renewed(given), case(function, **SIZES, **SHAPES[shape])):
        right = {name: x.clone() for name, x in fresh.tensors.items()}
        got = replayed(given, ('o', 'final'), graph, results, fresh)
        with torch.no_grad():
            o, final = call(function, given.with_tensors(**right))
        assert_same({'o': o, 'final': final}, got)


@every_shape
@every_chunked
def test_captured_backward(function, shape):
    """Forward and backward in one graph."""
    given = case(function, **SIZES, **SHAPES[shape])
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    gradients = upstream(*call(function, given))
    names = ['o', 'final', *(f'd{name}' for name in leaves)]

    def step():
        o, final = call(function, given)
        return [o, final, *torch.autograd.grad([o, final], list(leaves.values()), gradients)]

    graph, results = captured(step)
    for fresh in (renewed(case(function, **SIZES, **SHAPES[shape])), case(function, **SIZES, **SHAPES[shape])):
        got = replayed(given, names, graph, results, fresh)
        assert_same(everything(function, fresh), got)


def test_lengths_of_sequences_may_change_between_replays():
    """The table of chunks is made on the GPU, inside the graph."""
    for function in FUNCTIONS:
        given = case(function, **SIZES, lens=[10, 70, 20])

        def step(function=function, given=given):
            with torch.no_grad():
                return call(function, given)

        graph, results = captured(step)
        given.cu_seqlens.copy_(torch.tensor([0, 65, 65, 100]))
        got = replayed(given, ('o', 'final'), graph, results, renewed(given))
        o, final = step()
        assert_same({'o': o, 'final': final}, got)


# -- compiled ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('shape', ['equal', 'packed'])
@every_chunked
def test_compiled_for_graphs(function, shape):
    """`mode='reduce-overhead'`, forward and backward, gives the bits of eager code."""
    torch._dynamo.reset()
    given = case(function, **SIZES, **SHAPES[shape])

    def step(tensors):
        return given.with_tensors(**tensors).call(function)

    compiled = torch.compile(step, mode='reduce-overhead', fullgraph=True)
    with use_backend('default', op=operation(function)):
        for fresh in (given, renewed(given), given, renewed(given)):
            torch.compiler.cudagraph_mark_step_begin()
            leaves = {name: x.detach().clone().requires_grad_() for name, x in fresh.tensors.items()}
            o, final = compiled(leaves)
            got = torch.autograd.grad([o, final], list(leaves.values()), upstream(o, final))
            found = {'o': o.detach().clone(), 'final': final.detach().clone()}
            found |= {f'd{name}': x.clone() for name, x in zip(leaves, got, strict=True)}
            assert_same(everything(function, fresh), found)
    torch._dynamo.reset()


@pytest.mark.parametrize('function', [f for f in FUNCTIONS if f not in CHUNKED], ids=name_of)
def test_compiled_decoding(function):
    torch._dynamo.reset()
    given = case(function, **SIZES, **SHAPES['one step'])
    compiled = torch.compile(
        lambda tensors: given.with_tensors(**tensors).call(function), mode='reduce-overhead', fullgraph=True
    )
    with use_backend('default', op=operation(function)), torch.no_grad():
        for fresh in (given, renewed(given), given):
            torch.compiler.cudagraph_mark_step_begin()
            o, final = compiled(fresh.tensors)
            # compiled code specialises the kernel for strides, which may round differently
            eager = everything(function, fresh)
            for right, got in ((eager['o'], o), (eager['final'], final)):
                assert bounds.relative_rms(right, got) <= bounds.of_reference(got.dtype)[0]
    torch._dynamo.reset()


# -- a second GPU -----------------------------------------------------------------------------------------------------------


def on(device: str, given: Case) -> Case:
    moved = {name: x.detach().to(device) for name, x in given.tensors.items()}
    cu_seqlens = None if given.cu_seqlens is None else given.cu_seqlens.to(device)
    return Case(moved, cu_seqlens, given.options, given.per_channel)


@two_gpus
@every_shape
@every_function
def test_tensors_of_a_gpu_that_is_not_the_current_one(function, shape):
    given = case(function, **{**SIZES, 'device': 'cpu'}, **SHAPES[shape])
    with torch.cuda.device(0):
        second = everything(function, on('cuda:1', given))
        assert torch.cuda.current_device() == 0
        assert {str(x.device) for x in second.values()} == {'cuda:1'}
        assert_same(everything(function, on('cuda:0', given)), second)


@two_gpus
@every_chunked
def test_backward_on_the_thread_of_the_second_gpu(function):
    """Autograd runs the backward of a GPU on a thread of its own; here two of them at once, and from a third thread."""
    given = case(function, **{**SIZES, 'device': 'cpu'}, **SHAPES['packed'])
    right = everything(function, on('cuda:0', given))
    found, threads = {}, set()

    def work(device):
        placed = on(device, given)
        leaves = {name: x.requires_grad_() for name, x in placed.tensors.items()}
        leaves['q'].register_hook(lambda grad: threads.add(threading.get_ident()))
        o, final = call(function, placed)
        torch.autograd.backward([o, final], upstream(o, final))
        found[device] = {f'd{name}': x.grad for name, x in leaves.items()}

    workers = [threading.Thread(target=work, args=(f'cuda:{i}',)) for i in (1, 0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert threads.isdisjoint({threading.get_ident(), *(worker.ident for worker in workers)})
    expected = {name: x for name, x in right.items() if name.startswith('d')}
    for device in ('cuda:0', 'cuda:1'):
        assert_same(expected, found[device])


@two_gpus
def test_streams_of_the_second_gpu():
    """On the caller's stream of that GPU, while the current one is another."""
    function = CHUNKED[0]
    given = on('cuda:1', case(function, **{**SIZES, 'device': 'cpu'}, **SHAPES['equal']))
    stream = torch.cuda.Stream('cuda:1')
    torch.cuda.synchronize('cuda:1')
    with torch.cuda.stream(stream), torch.cuda.device(0):
        found = everything(function, given)
    stream.synchronize()
    assert_same(everything(function, given), found)
