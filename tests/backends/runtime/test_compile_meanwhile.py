"""Changes while another thread compiles: from its next call on, a compiled caller chooses as eager code does."""

import sys
import threading
import types

import pytest
import torch

from fla.backends import Policy, prefer_backend, set_policy
from fla.backends.core.dynamo import another_thread_compiles
from tests.backends.compiled import Compiled, two

WAIT = 60


def deny(toy):
    set_policy(Policy(deny='a'))


def deny_and_call(toy):
    set_policy(Policy(deny='a'))
    assert toy.ran() == 'b'


def register(toy):
    toy.add('new', priority=0)


def deprecate(toy):
    next(backend for backend in toy.registry if backend.backend_type == 'a').priority = 9


def scope(toy):
    prefer_backend('b', op=toy.op).__enter__()


CHANGES = {deny: 'b', deny_and_call: 'b', register: 'new', deprecate: 'b', scope: 'b'}


class Paused:
    """A compiler that waits until another thread has made a change, and that thread."""

    def __init__(self, change):
        self.started, self.changed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._change, args=(change,))
        self.thread.start()

    def _change(self, change):
        assert self.started.wait(WAIT)
        change()
        self.changed.set()

    def __call__(self, graph, inputs):
        self.started.set()
        assert self.changed.wait(WAIT)
        return graph.forward


@pytest.mark.parametrize('warm', [True, False])
@pytest.mark.parametrize('change', CHANGES, ids=lambda change: change.__name__)
def test_a_change_while_another_thread_compiles(change, warm):
    toy = two()
    if warm:
        assert toy.ran() == 'a'
    paused = Paused(lambda: change(toy))
    f = Compiled(toy, backend=paused)
    assert f() == 'a'  # the state when the call began
    paused.thread.join(WAIT)
    assert [f(), f()] == [CHANGES[change]] * 2  # without an eager call in between
    assert f.agrees() == CHANGES[change]
    frames = f.frames
    assert [f(), f()] == [CHANGES[change]] * 2
    assert f.frames == frames == 2


def test_names_of_a_renewed_plan_live_as_long_as_it_does():
    toy = two()
    paused = Paused(lambda: deny_and_call(toy))
    f = Compiled(toy, backend=paused)
    assert f() == 'a'
    paused.thread.join(WAIT)
    for _ in range(2):
        assert f() == toy.ran() == 'b'
        torch._dynamo.reset()
    set_policy(Policy())
    assert f() == toy.ran() == 'a'
    set_policy(Policy(deny='a'))
    assert f() == toy.ran() == 'b'


def test_another_thread_is_importing_dynamo(monkeypatch):
    """`sys.modules` lists a module from the start of its import, when it is still incomplete."""
    monkeypatch.setitem(sys.modules, 'torch._dynamo.convert_frame', types.ModuleType('torch._dynamo.convert_frame'))
    assert not another_thread_compiles()
