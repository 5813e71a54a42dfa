"""Forked and spawned processes: a child keeps registry and policy, reloads half-loaded modules, and never hangs."""

import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from textwrap import dedent

import pytest

import fla
from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Policy,
    default_dispatcher,
    get_policy,
    plugins,
    prefer_backend,
    refresh,
    set_policy,
    use_backend,
    validate,
)
from fla.backends.core.locking import lock
from tests.backends.library import backend_source
from tests.backends.toy import Q, Toy

pytestmark = [
    pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork'),
    pytest.mark.filterwarnings('ignore:This process.*multi-threaded:DeprecationWarning'),
]


def in_child(function, timeout=30):
    """Forks, calls `function` in the child and returns its JSON result. A child that hangs is killed and fails the test."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            answer = {'result': function()}
            status = 0
        except BaseException:
            answer = {'error': traceback.format_exc()}
        finally:
            os.write(writing, json.dumps(answer).encode())
            os._exit(status)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], timeout)
        if not ready:
            raise AssertionError('the child hangs')
        answer = json.loads(os.read(reading, 1 << 20) or b'{"error": "the child died"}')
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert 'error' not in answer, answer['error']
    return answer['result']


# -- what the child keeps -------------------------------------------------------------------------------------------------


def test_the_child_keeps_registry_policy_and_plans(monkeypatch):
    toy = Toy()
    toy.add('a')
    toy.add('b', env_var='FLA_FORK_B')
    toy.add('c')
    monkeypatch.setenv('FLA_DENY_BACKENDS', 'a')
    refresh()
    assert toy.ran() == 'b'
    code = toy.f.__code__
    set_policy(Policy(prefer=('c',)))

    def child():
        found = [toy.ran(), list(toy.f.backends), get_policy().prefer]
        set_policy(Policy(prefer=('b',)))
        found.append(toy.ran())
        os.environ['FLA_FORK_B'] = '0'
        found.append(toy.ran())
        toy.registry.unregister('c')
        found.append(toy.ran())
        return found

    assert in_child(child) == ['c', ['a', 'b', 'c', 'default'], ['c'], 'b', 'c', 'default']
    assert toy.ran() == 'c'
    default_dispatcher().policies.reset_policy()
    assert toy.ran() == 'b'
    assert toy.f.__code__ is code


def test_the_child_may_be_the_first_to_call(library):
    library.add('op', backend_source('a', 'registry'))
    f = library.f('op')
    assert in_child(f) == 'a'
    assert not library.loaded('op')
    assert f() == 'a'


def test_a_grandchild():
    toy = Toy()
    toy.add('a')
    assert in_child(lambda: in_child(toy.ran)) == 'a'


def test_the_child_goes_on_in_the_scope_of_the_thread_that_forked():
    toy = Toy()
    toy.add('a')
    toy.add('b')

    def child(scope):
        found = [toy.ran()]
        scope.__exit__(None, None, None)
        found.append(toy.ran())
        with use_backend('default', op=toy.op):
            found.append(toy.ran())
        return [*found, toy.ran()]

    with prefer_backend('b', op=toy.op) as scope:
        assert in_child(lambda: child(scope)) == ['b', 'a', 'default', 'a']
        assert toy.ran() == 'b'
    assert toy.ran() == 'a'


def test_scopes_of_threads_that_do_not_exist_in_the_child_are_left():
    """No thread of the child could leave them."""
    toy = Toy()
    toy.add('a')
    toy.add('b')
    entered, leave = threading.Event(), threading.Event()

    def other():
        with use_backend('b', op=toy.op):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    assert toy.ran() == 'b'
    try:
        with prefer_backend('default', op=toy.op):
            assert in_child(lambda: [toy.ran(), len(default_dispatcher().control.now.scopes)]) == ['default', 1]
        assert in_child(lambda: [toy.ran(), len(default_dispatcher().control.now.scopes)]) == ['a', 0]
        assert toy.ran() == 'b'
    finally:
        leave.set()
        thread.join()


# -- forking while something is under way -----------------------------------------------------------------------------------


def test_forking_while_other_threads_dispatch_and_plan():
    toy = Toy()
    a = toy.add('a', env_var='FLA_FORK_A')
    toy.add('b')
    stop = threading.Event()
    errors = []

    def repeat(function):
        try:
            while not stop.is_set():
                function()
        except Exception as error:
            errors.append(error)

    def plan():
        a.priority = 9
        toy.ran()
        a.priority = 1
        toy.ran()

    def scope():
        with prefer_backend('b', op=toy.op):
            toy.ran()

    def register():
        toy.registry.register(guest).remove()

    guest = toy.add('guest', register=False)
    threads = [threading.Thread(target=repeat, args=(f,), daemon=True) for f in (toy.ran, plan, scope, register)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(15):

            def child():
                first = toy.ran()
                a.priority = 1
                found = [toy.ran()]
                with use_backend('b', op=toy.op):
                    found.append(toy.ran())
                toy.add('new', priority=0)
                return [first in ('a', 'b', 'guest'), *found, toy.ran(), len(default_dispatcher().control.now.scopes)]

            assert in_child(child) == [True, 'a', 'b', 'new', 0]
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(20)
    assert not errors, errors


def test_forking_while_another_thread_holds_the_lock():
    toy = Toy()
    toy.add('a')
    held, release = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            release.wait(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)

    def child():
        with lock:
            pass
        toy.add('b', priority=1)
        return toy.ran()

    assert in_child(child) == 'b'
    release.set()
    thread.join()
    assert toy.ran() == 'a'


def fork_in_the_middle(library, start, child, began, finish):
    """Forks while another thread is inside `start()`, which writes the file `began` and waits for the file `finish`."""
    results = []
    thread = threading.Thread(target=lambda: results.append(start()))
    thread.start()
    deadline = time.monotonic() + 20
    while not began.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert began.exists()
    began.unlink()
    try:
        answer = in_child(child)
    finally:
        finish.touch()
        thread.join(20)
    assert not thread.is_alive()
    return results[0], answer


@pytest.fixture
def slow(tmp_path):
    """Returns source that waits in the parent until the file `finish` exists, and does not wait in a child."""
    began, finish = tmp_path / 'began', tmp_path / 'finish'
    source = dedent(
        f"""
        import os, time, pathlib
        if os.getpid() == {os.getpid()}:
            pathlib.Path({str(began)!r}).touch()
            deadline = time.monotonic() + 20
            while not pathlib.Path({str(finish)!r}).exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        """
    )
    return source, began, finish


def test_forking_while_another_thread_imports_a_backends_package(library, slow):
    source, began, finish = slow
    library.add('op', backend_source('early', 'registry', 'priority = 2') + source + backend_source('late', 'registry'))
    f = library.f('op')

    def child():
        return [f(), list(f.backends), library.dispatcher.discovery.is_loading(), validate(library.dispatcher)]

    result, answer = fork_in_the_middle(library, f, child, began, finish)
    assert result == 'early'
    assert answer == ['early', ['early', 'late', 'default'], False, []]
    assert list(f.backends) == ['early', 'late', 'default']
    assert library.loads('op') == 1


def test_forking_while_another_thread_imports_what_a_package_imports(library, slow):
    source, began, finish = slow
    library.add('op', f'from {library.name}.ops.op.backends import deep\n' + backend_source('a', 'registry'))
    library.write('ops/op/backends/deep/__init__.py', 'from . import deeper\n')
    library.write('ops/op/backends/deep/deeper.py', source)
    f = library.f('op')
    result, answer = fork_in_the_middle(library, f, f, began, finish)
    assert (result, answer) == ('a', 'a')


def test_forking_while_another_thread_imports_a_path(library, slow):
    source, began, finish = slow
    library.add('op', f"registry.register('{library.name}.vendor:Backend_a')\n")
    vendor = 'from fla.backends import BaseBackend\n' + source + backend_source('a', '', register=False)
    library.write('vendor.py', vendor)
    f = library.f('op')
    result, answer = fork_in_the_middle(library, f, lambda: [f(), list(f.backends)], began, finish)
    assert result == 'a'
    assert answer == ['a', ['a', 'default']]


def test_forking_while_another_thread_loads_plugins(library, slow, tmp_path, monkeypatch):
    source, began, finish = slow
    name = f'{library.name}_plugin'
    plugin = 'from fla.backends import BaseBackend\n' + backend_source('plugged', '', 'priority = 1', register=False)
    register = "def register(registries):\n    registries('op').register(Backend_plugged())\n"
    (tmp_path / f'{name}.py').write_text(plugin + source + register)
    monkeypatch.setenv(f'{library.prefix}_PLUGIN_MODULES', name)
    library.add('op', backend_source('a', 'registry'))
    f = library.f('op')

    def child():
        return [f(), [plugin.error for plugin in library.dispatcher.plugins()]]

    try:
        result, answer = fork_in_the_middle(library, f, child, began, finish)
        assert result == 'plugged'
        assert answer == ['plugged', [None]]
    finally:
        sys.modules.pop(name, None)


def test_forking_while_another_thread_creates_a_module(library, slow, monkeypatch):
    """Like a large extension module: its import lock is held, and `sys.modules` does not list it yet."""
    source, began, finish = slow
    library.add('op', backend_source('a', 'registry'))
    f = library.f('op')
    wait = compile(source, 'wait', 'exec')

    class Loader(importlib.machinery.SourceFileLoader):
        def create_module(self, spec):
            exec(wait, {})

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == f'{library.name}.ops.op.backends':
                file = f'{path[0]}/backends/__init__.py'
                return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))

    monkeypatch.setattr(sys, 'meta_path', [Finder(), *sys.meta_path])
    result, answer = fork_in_the_middle(library, f, f, began, finish)
    assert (result, answer) == ('a', 'a')


def test_forking_while_a_third_thread_waits_for_the_import(library, slow):
    source, began, finish = slow
    library.add('op', source + backend_source('a', 'registry'))
    f = library.f('op')
    waiters = [threading.Thread(target=f) for _ in range(2)]

    def child():
        return f()

    def start():
        for waiter in waiters:
            waiter.start()
        return f()

    result, answer = fork_in_the_middle(library, start, child, began, finish)
    assert (result, answer) == ('a', 'a')
    for waiter in waiters:
        waiter.join(20)
        assert not waiter.is_alive()
    assert library.loads('op') == 1


def test_a_backend_module_that_forks_while_it_loads(library):
    """Some packages probe a driver in a child, so that the parent does not initialise it."""
    body = f"""
from tests.backends.runtime.test_fork import in_child
from {library.name}.ops.op import f
{backend_source('early', 'registry')}
FOUND = in_child(f)
{backend_source('late', 'registry', 'priority = 1')}
"""
    library.add('op', body)
    assert library.f('op')() == 'late'
    assert library.module('ops.op.backends').FOUND == 'early'


def test_a_module_that_was_loaded_stays_loaded_in_the_child(library, slow):
    """Only a module that another thread was loading is loaded again."""
    source, began, finish = slow
    library.add('done', backend_source('a', 'registry'))
    library.add('op', source + backend_source('b', 'registry'))
    done, f = library.f('done'), library.f('op')
    assert done() == 'a'
    module = library.module('ops.done.backends')

    def child():
        same = library.module('ops.done.backends') is module
        return [done(), f(), same, library.loads('done'), library.loads('op')]

    _, answer = fork_in_the_middle(library, f, child, began, finish)
    assert answer == ['a', 'b', True, 1, 2]


# -- other ways to start a process ----------------------------------------------------------------------------------------


def test_a_pickled_function_in_a_spawned_process(library):
    library.add('op', backend_source('a', 'registry'))
    f = library.f('op')
    assert f() == 'a'
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        assert pool.apply_async(f).get(120) == 'a'
        assert pool.map_async(f, [None, 1]).get(120) == ['a', 'a']


def test_a_pool_of_forked_processes(library):
    library.add('op', backend_source('a', 'registry'))
    f = library.f('op')
    assert f() == 'a'
    with multiprocessing.get_context('fork').Pool(2) as pool:
        assert pool.map_async(f, range(8)).get(60) == ['a'] * 8


def test_plugins_are_known_in_the_child():
    plugins()
    assert in_child(lambda: [plugin.name for plugin in plugins()]) == [plugin.name for plugin in plugins()]


def test_registering_in_a_child_that_was_forked_from_a_thread():
    toy = Toy()
    toy.add('a')
    found = []

    def child():
        BackendRegistry(toy.op).register(type('B', (BaseBackend,), {'backend_type': 'b', 'priority': 1, 'f': answer})())
        return toy.f(Q, Q)

    thread = threading.Thread(target=lambda: found.append(in_child(child)))
    thread.start()
    thread.join(60)
    assert found == ['b']
    assert toy.ran() == 'a'


def answer(self, q, k, scale=None, flag=False):
    return 'b'


@pytest.mark.gpu
def test_cuda_is_usable_in_a_child_after_cpu_calls_in_the_parent():
    """Runs in a new process: another test may have initialised the driver in this one."""
    source = """
        import os
        import torch
        from fla.backends import BackendRegistry, BaseBackend, describe, dispatch, explain, runs_on_triton, validate

        class Gpu(BaseBackend):
            backend_type = 'gpu'
            devices = ('cuda', 'rocm')
            min_capability = (7, 0)

            def f(self, q):
                return q + 1

        class Plain(BaseBackend):
            backend_type = 'reference'
            kind = 'reference'

            def f(self, q):
                return q + 2

        for backend in (Gpu(), Plain()):
            BackendRegistry('op_forked').register(backend)

        @dispatch('op_forked', default_verifier=runs_on_triton)
        def f(q: torch.Tensor):
            return q

        q = torch.zeros(3)
        assert f(q).tolist() == [2, 2, 2]
        explain(f, q), validate(), describe('op_forked'), list(f.backends)
        assert not torch.cuda.is_initialized()
        pid = os.fork()
        if pid == 0:
            assert f(q).tolist() == [2, 2, 2]
            on_gpu = f(q.cuda())
            assert on_gpu.is_cuda and on_gpu.tolist() == [1, 1, 1], on_gpu
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        assert f(q.cuda()).tolist() == [1, 1, 1]
        """
    environ = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')}
    root = str(Path(fla.__file__).parents[1])
    environ['PYTHONPATH'] = os.pathsep.join([root, *filter(None, [environ.get('PYTHONPATH')])])
    done = subprocess.run(
        [sys.executable, '-c', dedent(source)], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
