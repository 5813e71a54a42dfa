"""What only an NVIDIA GPU can show of the framework. Its twins for a CPU are in the other files of this folder."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from fla.backends import BackendRegistry, BaseBackend, dispatch, explain, runs_on_triton, trace, use_backend
from tests.backends.toy import Toy

pytestmark = [pytest.mark.gpu, pytest.mark.triton]


@pytest.fixture(scope='module')
def scale_op():
    """`scale(x, s)` multiplies by s in Triton (the default), by 10 s in a backend that its toggle switches on."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, y, s, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n) * s, mask=i < n)

    def launch(x, s):
        y = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 1024),)](x, y, s, x.numel(), BLOCK=1024)
        return y

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            ctx.s = s
            return launch(x, s)

        @staticmethod
        def backward(ctx, grad):
            return launch(grad.contiguous(), ctx.s), None

    class Tenfold(BaseBackend):
        backend_type = 'tenfold'
        env_var = 'FLA_TENFOLD'
        default_enable = False
        devices = ('cuda',)
        dtypes = (torch.float32,)
        min_capability = (7, 0)

        def scale(self, x, s=2.0):
            return Scale.apply(x, s * 10)

    def make():
        registry = BackendRegistry('gpu_scale')
        if 'tenfold' not in registry:
            registry.register(Tenfold())

    make()

    @dispatch('gpu_scale', default_verifier=runs_on_triton)
    def scale(x: torch.Tensor, s: float = 2.0) -> torch.Tensor:
        return Scale.apply(x, s)

    scale.remake = make
    return scale


@pytest.fixture
def scale(scale_op):
    scale_op.remake()
    return scale_op


def gradient(function, x):
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad


@pytest.mark.parametrize('mode', [None, 'reduce-overhead'])
def test_compiled_forward_and_backward_follow_the_toggle(scale, mode, monkeypatch):
    x = torch.randn(1 << 14, device='cuda')

    def model(x):
        return scale(x * 1.0).sin().sum()

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for value, factor in ((None, 2.0), ('1', 20.0), ('0', 2.0), ('on', 20.0)):
        monkeypatch.delenv('FLA_TENFOLD', raising=False)
        if value is not None:
            monkeypatch.setenv('FLA_TENFOLD', value)
        for _ in range(3):
            got = gradient(compiled, x).clone()
        exact = factor * torch.cos(factor * x.double())
        assert (got.double() - exact).abs().max() <= 2e-5 * factor * factor
        assert explain(scale, x).winner == ('tenfold' if factor == 20.0 else 'default')


def test_captured_graph_keeps_its_backend(scale, monkeypatch):
    x = torch.randn(1 << 14, device='cuda')
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            scale(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = scale(x)
    monkeypatch.setenv('FLA_TENFOLD', '1')
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x * 2.0)
    assert torch.equal(scale(x), x * 20.0)


def test_platforms_are_told_apart(scale, monkeypatch):
    monkeypatch.setenv('FLA_TENFOLD', '1')
    gpu = torch.ones(8, device='cuda')
    assert explain(scale, gpu).winner == 'tenfold'
    assert explain(scale, gpu.double()).winner == 'default'
    cpu = explain(scale, gpu.cpu())
    assert cpu.winner is None
    assert cpu['tenfold'].verdict == cpu['default'].verdict == 'unavailable'
    with pytest.raises(NotImplementedError, match='cpu'):
        scale(gpu.cpu())


def test_backward_thread_sees_the_scope():
    toy = Toy()
    toy.add('a', default_enable=False)
    seen = {}

    class Stage(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            seen['thread'] = threading.get_ident()
            seen['backend'] = toy.name_of(toy.f(grad, grad))
            return grad

    x = torch.ones(4, device='cuda', requires_grad=True)
    with use_backend('a', op=toy.op):
        Stage.apply(x).sum().backward()
    assert seen['backend'] == 'a'
    assert seen['thread'] != threading.get_ident()


def test_trace_names_the_device(scale):
    x = torch.ones(8, device='cuda')
    with trace() as running:
        scale(x)
    (record,) = running
    assert (record.backend, record.tensors['x'][2]) == ('default', 'cuda:0')


_FORK = """
import os, sys, torch
from fla.backends import BackendRegistry, BaseBackend, dispatch, explain
class B(BaseBackend):
    backend_type = 'b'; devices = ('cuda',); min_capability = (8, 0)
    def probe(self, device): return True
    def f(self, q): return q + 1
BackendRegistry('forked').register(B())
@dispatch('forked')
def f(q: torch.Tensor): return q
x = torch.zeros(2)
f(x); explain(f, x); f(x.to('meta'))
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    y = torch.zeros(2, device='cuda')
    os._exit(0 if float(f(y).sum()) == 2.0 and explain(f, y).winner == 'b' else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_cuda_works_in_a_child_forked_after_cpu_calls():
    done = subprocess.run([sys.executable, '-c', _FORK], env={**os.environ}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
