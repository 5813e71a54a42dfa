"""Helpers of the modules' GPU tests."""

import pytest
import torch

from fla.backends import trace

from .oracle import error, served_by


def gpu_tensor(*shape, dtype, grad=False, seed=0, device='cuda'):
    """A tensor of normal random numbers on the GPU."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype).requires_grad_(grad)


def compare(function, oracle, arguments, bound, **options):
    """Output and gradients of the default against an oracle in float64; arguments are tensors or None."""
    exact = [None if x is None else x.detach().double().requires_grad_() for x in arguments]
    leaves = [x for x in arguments if x is not None and x.requires_grad]
    with trace() as recorded:
        out = function(*arguments, **options)
    assert recorded.last_backend(f'modules.{function.__name__}') == 'default'
    expected = oracle(*exact, **options)
    assert error(expected, out) <= bound
    if not leaves:
        return
    do = gpu_tensor(*out.shape, dtype=out.dtype, seed=9, device=out.device)
    wide = [y for x, y in zip(arguments, exact, strict=True) if x is not None and x.requires_grad]
    wanted = torch.autograd.grad(expected, wide, do.double())
    for a, b in zip(wanted, torch.autograd.grad(out, leaves, do), strict=True):
        assert error(a, b) <= bound


def captured_equals_eager(function, arguments):
    """A CUDA graph, captured on its own stream and replayed on other numbers, gives the results of a call."""
    function(*arguments)  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.no_grad():
        function(*arguments)
        with served_by('default'), torch.cuda.graph(graph, stream=stream):
            out = function(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    for one in arguments:
        if one is not None and one.is_floating_point():
            one.detach().neg_()
    graph.replay()
    expected = function(*arguments)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def compiled_equals_eager(function, arguments):
    """fullgraph with CUDA graphs, forward and backward."""
    leaves = [x for x in arguments if x is not None and x.requires_grad]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, mode='reduce-overhead')
    with served_by('default'):
        compiled(*arguments)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*arguments)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        eager = function(*arguments)
        assert torch.equal(out, eager)
        for a, b in zip(grads, torch.autograd.grad(eager.float().square().sum(), leaves), strict=True):
            torch.testing.assert_close(a, b)


def other_device():
    """A GPU that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    return torch.device('cuda', (torch.cuda.current_device() + 1) % torch.cuda.device_count())
