"""Registered data that must not change later, and foreign code that must not run under the lock."""

import logging
import sys
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    DispatchError,
    checkpoint_contexts,
    default_dispatcher,
    deny_backends,
    dispatch,
    explain,
    freeze_dispatch,
    prefer_backend,
    thaw_dispatch,
    trace,
    use_backend,
)
from fla.backends.core.errors import RegistrationError
from fla.backends.core.locking import lock
from tests.backends.toy import Q, Toy


def nobody_else_waits():
    """Asserts, from a backend's own code, that the lock is free, so that imports and threads started there cannot wait
    for it."""
    taken = []
    thread = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=5)) or lock.release())
    thread.start()
    thread.join()
    assert taken == [True]
    return True


class Careful(BaseBackend):
    backend_type = 'careful'
    env_var = 'FLA_CAREFUL'
    extra_env = ('FLA_CAREFUL',)
    devices = ('cpu',)
    default_enable = staticmethod(nobody_else_waits)

    @classmethod
    def is_available(cls):
        return nobody_else_waits()

    def probe(self, device):
        return nobody_else_waits()

    @classmethod
    def is_enabled(cls):
        return nobody_else_waits()

    def f_verifier(self, q):
        return nobody_else_waits(), None

    def f(self, q, k, scale=None, flag=False):
        nobody_else_waits()
        return q * 0 + 1


def test_no_backend_code_runs_under_the_lock(monkeypatch):
    toy = Toy()
    toy.names[1] = 'careful'
    toy.registry.register(Careful())
    assert toy.ran() == 'careful'
    for change in (use_backend('careful'), prefer_backend('careful'), deny_backends('vendor')):
        Toy().ran()  # meanwhile another operation is loaded
        with change:
            toy.ran()
    monkeypatch.setenv('FLA_CAREFUL', '0')
    toy.ran()
    freeze_dispatch()
    toy.ran()
    thaw_dispatch()
    assert toy.ran() == 'careful'


def test_threads_racing_to_read_the_environment_see_all_of_it(monkeypatch):
    monkeypatch.setenv('FLA_DENY_BACKENDS', 'a')
    toy = Toy()
    toy.add('a')
    environment = default_dispatcher().environment
    read = environment.layers

    def slowly():
        layers = read()
        time.sleep(0.05)
        return layers

    monkeypatch.setattr(environment, 'layers', slowly)
    ran = []
    threads = [threading.Thread(target=lambda: ran.append(toy.ran())) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert ran == ['default'] * 4


def test_a_default_that_is_a_function_is_frozen_too():
    on = [True]
    toy = Toy()
    toy.add('a', default_enable=staticmethod(lambda: on[0]))
    freeze_dispatch()
    on[0] = False
    assert (toy.ran(), explain(toy.f, Q, Q).winner) == ('a', 'a')
    thaw_dispatch()
    default_dispatcher().refresh()
    assert toy.ran() == 'default'


def test_the_manifest_does_not_depend_on_where_a_scope_stands():
    toy = Toy()
    toy.add('a')

    def frozen():
        manifest = freeze_dispatch()
        thaw_dispatch()
        return manifest.sha256

    with deny_backends('a'):
        one = frozen()
    with deny_backends('a'):
        other = frozen()
    assert one == other != frozen()


class Facts(BaseBackend):
    devices = ('cpu',)


def test_facts_of_the_default_are_checked_and_followed(monkeypatch):
    toy = Toy(default_verifier=Facts)
    toy.add('plain', kind='reference')
    assert toy.ran() == 'default'
    monkeypatch.setattr(Facts, 'devices', ('cuda',))
    assert (toy.ran(), explain(toy.f, Q, Q).winner) == ('plain', 'plain')
    with pytest.raises(RegistrationError, match='gpu'):
        Toy(default_verifier=type('Wrong', (BaseBackend,), {'devices': ('gpu',)}))
    with pytest.raises(TypeError, match='class of facts, Facts'):
        Toy(default_verifier=Facts())
    with pytest.raises(TypeError, match="names 'zz'"):
        Toy(default_verifier=lambda zz: (True, None))


def test_a_path_with_a_name_is_known_while_it_cannot_be_imported():
    toy = Toy()
    toy.registry.register('no_such_package_of_anybody.backends:Fast', name='fast')
    assert toy.ran() == 'default'
    report = explain(toy.f, Q, Q)['fast']
    assert (report.verdict, 'no_such_package_of_anybody' in report.reason) == ('unavailable', True)
    with use_backend('fast', op=toy.op), pytest.raises(NotImplementedError, match='cannot be imported'):
        toy.f(Q, Q)


def test_a_path_must_keep_its_promise(tmp_path, monkeypatch, caplog):
    (tmp_path / 'promising.py').write_text(
        'from fla.backends import BaseBackend\n'
        'class B(BaseBackend):\n    backend_type = "other"\n    def f(self, q, k): return q\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    toy = Toy()
    toy.registry.register('promising:B', name='fast')
    with caplog.at_level(logging.WARNING):
        assert toy.ran() == 'default'
    assert "registered as 'fast'" in explain(toy.f, Q, Q)['fast'].reason


def test_without_the_gil_dispatch_refuses(monkeypatch):
    monkeypatch.setattr(sys, '_is_gil_enabled', lambda: False, raising=False)
    BackendRegistry('ungil')
    with pytest.raises(RuntimeError, match='GIL'):

        @dispatch('ungil')
        def f(q: torch.Tensor) -> torch.Tensor:
            return q


def test_checkpointing_does_not_warn_of_other_threads(caplog):
    toy = Toy()
    toy.add('a')
    x = torch.ones(2, 8, requires_grad=True)
    with caplog.at_level(logging.WARNING), use_backend('a', op=toy.op):
        y = checkpoint(lambda t: toy.f(t, t).sum() + t.sum(), x, use_reentrant=False, context_fn=checkpoint_contexts)
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert x.grad is not None
    assert not [record for record in caplog.records if 'process-wide' in record.message]


def test_a_trace_records_once():
    toy = Toy()
    with trace() as running:
        with pytest.raises(DispatchError, match='already'):
            running.start()
        toy.ran()
    assert len(running) == 1
