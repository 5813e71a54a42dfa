"""The kernels of a first call are compiled together, before any is launched."""

import threading

import pytest
import torch

from fla.ops.launch import precompile as compile_ahead
from fla.ops.launch.precompile import launch, precompile_parallel
from fla.ops.recurrence.arguments import Inputs, Options, compile_key


class Kernel:
    """The part of a Triton kernel that launches use; records what happens to it."""

    def __init__(self, name, events, barrier=None, fails=False):
        self.name, self.events, self.barrier, self.fails = name, events, barrier, fails

    def warmup(self, *args, grid, **options):
        if self.barrier is not None:
            self.barrier.wait(timeout=30)
        self.events.append(('compiled', self.name, grid, options))
        if self.fails:
            raise ValueError('does not compile')

    def __getitem__(self, grid):
        def run(*args, **options):
            if self.fails:
                raise ValueError('does not compile')
            self.events.append(('launched', self.name, grid, options))

        return run


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    monkeypatch.setattr(compile_ahead, '_INTERPRETED', False)


def test_a_first_call_compiles_in_parallel_then_launches(monkeypatch):
    monkeypatch.setattr(compile_ahead.os, 'cpu_count', lambda: 2)
    events: list = []
    # neither goes on before the other has come
    barrier = threading.Barrier(2)
    first, second = Kernel('first', events, barrier), Kernel('second', events, barrier)

    @precompile_parallel(lambda *args: args)
    def step(x):
        launch(first, (3,))(x, BLOCK=16)
        launch(second, (4,))(x, BLOCK=32)
        return 'done'

    assert step(torch.zeros(2, 3)) == 'done'
    assert sorted(events[:2]) == [('compiled', 'first', (3,), {'BLOCK': 16}), ('compiled', 'second', (4,), {'BLOCK': 32})]
    assert events[2:] == [('launched', 'first', (3,), {'BLOCK': 16}), ('launched', 'second', (4,), {'BLOCK': 32})]


def calls(given) -> list[int]:
    """How many kernels each of several calls compiles."""
    events: list = []
    kernels = [Kernel('one', events), Kernel('two', events)]

    @precompile_parallel(lambda *args: args)
    def step(*args):
        for kernel in kernels:
            launch(kernel, (1,))()

    counts = []
    for args in given:
        events.clear()
        step(*args)
        counts.append(sum(event[0] == 'compiled' for event in events))
        assert [event[1] for event in events[-2:]] == ['one', 'two']
    return counts


def test_each_key_is_compiled_once():
    assert calls([('a',), ('a',), ('b', 1), ('a',), ('b', 1)]) == [2, 0, 2, 0, 0]


def test_delta_rules_are_compiled_for_what_their_key_has():
    q, g = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2)
    inputs, options = Inputs(q, q, q, g, g), Options(output_final_state=True)
    one = compile_key(inputs, options)
    longer = torch.zeros(3, 99, 2, 16)
    assert compile_key(Inputs(longer, longer, q[:, :3], g, g), options) == one, 'batch and steps do not matter'
    others = [
        *(inputs._replace(q=x) for x in (q[..., :8], q.half(), q.to('meta'))),
        *(inputs._replace(v=q[:, :, :1]), inputs._replace(g=g.half()), inputs._replace(beta=g.half())),
        *(inputs._replace(A_log=x) for x in (g, g.half())),
    ]
    keys = {one, *(compile_key(each, options) for each in others), compile_key(inputs, Options())}
    assert len(keys) == 2 + len(others)


def test_one_kernel_is_launched_at_once():
    events: list = []
    kernel = Kernel('only', events)
    precompile_parallel(lambda: None)(lambda: launch(kernel, (1,))())()
    assert [event[0] for event in events] == ['launched']


def test_what_does_not_compile_raises_where_it_is_launched():
    events: list = []
    good, bad = Kernel('good', events), Kernel('bad', events, fails=True)

    @precompile_parallel(lambda *args: args)
    def step():
        launch(good, (1,))()
        launch(bad, (1,))()

    with pytest.raises(ValueError, match='does not compile'):
        step()
    assert ('launched', 'good', (1,), {}) in events


def test_an_error_ends_the_dry_run():
    events: list = []
    kernel = Kernel('kernel', events)

    @precompile_parallel(lambda *args: args)
    def step():
        raise RuntimeError('no')

    with pytest.raises(RuntimeError, match='no'):
        step()
    launch(kernel, (1,))()
    assert events == [('launched', 'kernel', (1,), {})]


def test_a_dry_run_belongs_to_one_thread():
    events: list = []
    kernels = [Kernel('one', events), Kernel('two', events)]
    inside, go_on = threading.Event(), threading.Event()

    @precompile_parallel(lambda *args: args)
    def slow():
        inside.set()
        assert go_on.wait(30)
        for kernel in kernels:
            launch(kernel, (1,))()

    thread = threading.Thread(target=slow)
    thread.start()
    assert inside.wait(30)
    launch(kernels[0], (2,))()
    assert events == [('launched', 'one', (2,), {})]
    go_on.set()
    thread.join()


def test_interpreted_kernels_are_only_launched(monkeypatch):
    monkeypatch.setattr(compile_ahead, '_INTERPRETED', True)
    assert calls([()]) == [0]


def test_a_capture_refuses_new_kernels(monkeypatch):
    events: list = []
    kernels = [Kernel('one', events), Kernel('two', events)]

    @precompile_parallel(lambda *args: args)
    def step(*args):
        for kernel in kernels:
            launch(kernel, (1,))()

    step('known')
    events.clear()
    with monkeypatch.context() as capture:
        capture.setattr(compile_ahead, '_is_capturing', lambda: True)
        with pytest.raises(RuntimeError, match='inside a CUDA graph capture: make the same call once before'):
            step('new')
        assert not events
        step('known')
    assert [event[0] for event in events] == ['launched', 'launched']
    events.clear()
    step('new')
    assert [event[0] for event in events] == ['compiled', 'compiled', 'launched', 'launched']


def test_a_capture_refuses_a_first_decode(monkeypatch):
    decode = pytest.importorskip('fla.ops.recurrence.kernels.decode', exc_type=ImportError)
    monkeypatch.setattr(compile_ahead, '_is_capturing', lambda: True)
    with pytest.raises(RuntimeError, match='inside a CUDA graph capture: make the same call once before'):
        decode._launch(1, (torch.zeros(1),) * 13, (), (), 0)
