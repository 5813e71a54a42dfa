"""Calls and policy changes on several threads: one consistent plan serves each call, and nothing raises."""

import os
import random
import sys
import threading
import time

import pytest

from fla.backends import (
    BaseBackend,
    NoBackendError,
    Policy,
    default_dispatcher,
    deny_backends,
    explain,
    prefer_backend,
    refresh,
    reset_policy,
    set_policy,
    trace,
    use_backend,
    validate,
)
from fla.backends.observe import snapshot
from tests.backends.library import backend_source
from tests.backends.registry.test_discovery import all_at_once
from tests.backends.toy import Q, Toy

SECONDS = 2.0


@pytest.fixture
def restless():
    """Switches threads every 10 µs instead of every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Crew:
    """Threads that repeat a function until the time is up and each thread has had its turns, or until one fails. On a loaded
    machine a thread may not run for seconds."""

    def __init__(self, seconds=SECONDS):
        self.stop = threading.Event()
        self.deadline = time.monotonic() + seconds
        self.errors, self.threads, self.rounds, self.turns = [], [], {}, {}

    def is_over(self):
        late = time.monotonic() - self.deadline
        return late > 0 and (late > 40 or all(self.rounds[name] >= turns for name, turns in self.turns.items()))

    def repeat(self, name, function, turns=3):
        def run():
            try:
                while not self.stop.is_set() and not self.is_over():
                    function()
                    self.rounds[name] += 1
            except BaseException as error:
                self.errors.append((name, error))
                self.stop.set()

        self.rounds[name], self.turns[name] = 0, turns
        self.threads.append(threading.Thread(target=run, name=name, daemon=True))

    def work(self):
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), f'{thread.name} hangs'
        if self.errors:
            name, error = self.errors[0]
            raise AssertionError(f'{name} failed') from error
        return self.rounds


def callers(crew, toy, allowed, count=4, **kwargs):
    """Threads that call the toy and check that one of the allowed backends ran."""
    seen = set()

    def call():
        name = toy.ran(Q, Q, **kwargs)
        assert name in allowed, name
        seen.add(name)

    for n in range(count):
        crew.repeat(f'caller {n}', call, turns=25)
    return seen


@pytest.mark.usefixtures('restless')
def test_everything_changes_while_threads_call():
    toy = Toy()
    toy.add('a', env_var='FLA_THREADS_A', accepts=lambda self, q: (q.shape[-1] == 8, ('K is %s', q.shape[-1])))
    b = toy.add('b', accepts=lambda self, q, k: (q.dtype == k.dtype, 'dtypes'))
    guest = toy.add('guest', register=False, priority=1)
    crew = Crew(2 * SECONDS)
    seen = callers(crew, toy, {'a', 'b', 'guest', 'default'})

    def environment():
        for value in ('0', '1', 'off', ' Yes ', 'nonsense'):
            os.environ['FLA_THREADS_A'] = value
        del os.environ['FLA_THREADS_A']

    def policy():
        set_policy(Policy(prefer=('b',)))
        reset_policy()
        with prefer_backend('default', op=toy.op):
            pass
        with deny_backends('a', op=toy.op), use_backend('b', op=toy.op):
            pass

    def registration():
        toy.registry.register(guest).remove()

    def attributes():
        b.priority = 1
        type(b).devices = ('cpu',)
        del b.priority
        del type(b).devices

    def questions():
        assert explain(toy.f, Q, Q).winner in {'a', 'b', 'guest', 'default', None}
        toy.f.resolve(Q, Q)(Q, Q)
        list(toy.f.backends.items())
        with trace():
            toy.f(Q, Q)

    def again():
        refresh()
        time.sleep(0.002)

    for change in (environment, policy, registration, attributes, questions, again):
        crew.repeat(change.__name__, change)
    rounds = crew.work()
    assert {'a', 'b'} <= seen
    assert sum(n for name, n in rounds.items() if name.startswith('caller')) >= 100
    assert all(n > 2 for n in rounds.values()), rounds
    os.environ.pop('FLA_THREADS_A', None)
    assert toy.ran() == 'a'


@pytest.mark.usefixtures('restless')
def test_a_call_never_mixes_two_plans():
    """The verifier of one plan and the implementation of another would run a backend that has rejected the call."""
    toy = Toy()
    number = {'n': 0}

    def pair():
        number['n'] += 1
        mine = number['n']

        class Pair(BaseBackend):
            backend_type = 'pair'

            def f_verifier(self, q, flag):
                return (flag == mine % 2, 'not this one')

            def f(self, q, k, scale=None, flag=False):
                assert flag == mine % 2
                return 'pair'

        return Pair()

    toy.f(Q, Q)
    crew = Crew()

    def call(flag):
        result = toy.f(Q, Q, flag=flag)
        assert isinstance(result, str) or float(result[0, 0]) == 0

    crew.repeat('even', lambda: call(0))
    crew.repeat('odd', lambda: call(1))

    def swap():
        toy.registry.register(pair())

    crew.repeat('swap', swap)
    crew.work()
    assert len(toy.registry) == 1


@pytest.mark.usefixtures('restless')
def test_scopes_of_interleaved_threads_leave_nothing_behind():
    toy = Toy()
    for name in ('a', 'b', 'c'):
        toy.add(name)
    crew = Crew()

    def scope(name):
        with use_backend(name, op=toy.op):
            # another thread's preference may be the innermost scope
            assert toy.ran() in {'a', 'b', 'c', 'default'}
            with prefer_backend('default', op=toy.op):
                toy.ran()

    for name in ('a', 'b', 'c'):
        crew.repeat(name, lambda name=name: scope(name))
    crew.work()
    assert default_dispatcher().control.now.scopes == ()
    assert toy.ran() == 'a'


def test_scopes_left_in_another_order_than_entered():
    """A thread that leaves its scope must not restore the policy from when it entered."""
    toy = Toy()
    for name in ('a', 'b', 'c'):
        toy.add(name)
    first, second = use_backend('b', op=toy.op), use_backend('c', op=toy.op)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with second:
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert entered.wait(20)
        assert toy.ran() == 'c'
    assert toy.ran() == 'c'
    leave.set()
    thread.join()
    assert toy.ran() == 'a'


def test_entering_while_another_thread_holds_a_scope_warns_once(caplog):
    toy = Toy()
    toy.add('a')

    def enter():
        with prefer_backend('a', op=toy.op):
            return toy.ran()

    with use_backend('a', op=toy.op):
        for _ in range(2):
            all_at_once([enter])
    said = [r.getMessage() for r in caplog.records if 'another thread' in r.getMessage()]
    assert len(said) == 1
    assert 'bind' in said[0]


@pytest.mark.usefixtures('restless')
def test_a_write_is_seen_by_the_same_threads_next_call():
    """Each thread has its own function, so that other threads' writes do not matter."""
    crew = Crew()

    def own(n):
        toy = Toy()
        b = toy.add('b', env_var=f'FLA_THREADS_OWN_{n}', priority=6)
        a = toy.add('a')
        toy.ran()

        def write():
            assert toy.ran() == 'a'
            a.priority = 7
            assert toy.ran() == 'b'
            os.environ[f'FLA_THREADS_OWN_{n}'] = '0'
            assert toy.ran() == 'a'
            del os.environ[f'FLA_THREADS_OWN_{n}']
            with use_backend('default', op=toy.op):
                assert toy.ran() == 'default'
            handle = toy.registry.register(type('New', (BaseBackend,), {'backend_type': 'new', 'priority': 0, 'f': one})())
            assert toy.f(Q, Q) == 'new'
            handle.remove()
            assert toy.ran() == 'b'
            del a.priority
            assert b.priority == 6

        return write

    for n in range(4):
        crew.repeat(f'writer {n}', own(n))
    rounds = crew.work()
    assert min(rounds.values()) > 2


def one(self, q, k, scale=None, flag=False):
    return 'new'


@pytest.mark.usefixtures('restless')
def test_bound_functions_are_unmoved_by_scopes_of_other_threads():
    toy = Toy()
    toy.add('a')
    toy.add('b')
    bound = toy.f.bind('b')
    crew = Crew(1)

    def check():
        assert toy.name_of(bound(Q, Q)) == 'b'

    for n in range(3):
        crew.repeat(f'bound {n}', check)

    def scope():
        with use_backend('a', op=toy.op):
            assert toy.ran() == 'a'

    crew.repeat('scope', scope)
    crew.work()


@pytest.mark.usefixtures('restless')
def test_the_policy_in_force_decides_however_it_came_about():
    """A scope that is entered and left while another thread plans must not leave its plan in force."""
    rng = random.Random(3)
    for _ in range(60):
        toy = Toy()
        toy.add('a')
        toy.add('b')
        plan = toy.f.__fla_entry__.members
        started = threading.Event()

        def slow(entry=toy.f.__fla_entry__, plan=plan, started=started):
            started.set()
            return plan()

        toy.f.__fla_entry__.members = slow
        thread = threading.Thread(target=toy.f, args=(Q, Q))
        thread.start()
        started.wait(10)
        time.sleep(rng.random() * 1e-4)
        with use_backend('b', op=toy.op):
            pass
        thread.join()
        assert toy.ran() == 'a'


def test_an_is_enabled_is_remembered_for_the_values_it_saw(monkeypatch):
    """Another thread changes the environment after the variables are read and before the backend is asked."""
    toy = Toy()
    monkeypatch.setenv('FLA_THREADS_SEEN', 'no')
    other = ['yes']

    def is_enabled(cls):
        if other:
            os.environ['FLA_THREADS_SEEN'] = other.pop()
        return os.environ.get('FLA_THREADS_SEEN') == 'yes'

    toy.add('a', is_enabled=classmethod(is_enabled), extra_env=('FLA_THREADS_SEEN',))
    assert toy.ran() == 'a'
    for value in ('no', 'yes', 'no'):
        monkeypatch.setenv('FLA_THREADS_SEEN', value)
        assert toy.ran() == ('a' if value == 'yes' else 'default')


@pytest.mark.usefixtures('restless')
def test_a_race_on_the_first_call(library):
    body = 'def f_verifier(self, flag):\n    return flag is False, "flag"'
    for n in range(15):
        library.add(f'op{n}', backend_source('a', 'registry', body) + backend_source('b', 'registry'))
    for n in range(15):
        f = library.f(f'op{n}')
        assert all_at_once([f, lambda f=f: f(flag=True)] * 3) == ['a', 'b'] * 3
        assert library.loads(f'op{n}') == 1


@pytest.mark.usefixtures('restless')
def test_questions_while_operations_load(library):
    for n in range(12):
        library.add(f'op{n}', f'import time\ntime.sleep(0.005)\n{backend_source("a", "registry")}')
    dispatcher = library.dispatcher
    crew = Crew(1)
    functions = [library.f(f'op{n}') for n in range(12)]
    for n in range(3):
        crew.repeat(f'caller {n}', lambda: [f() for f in random.sample(functions, 12)])
    crew.repeat('validate', validate)
    crew.repeat('snapshot', snapshot)
    crew.repeat('functions', dispatcher.catalogue.functions)
    crew.repeat('declare', lambda: library.dispatcher.registry(f'new{random.random():.8f}'.replace('.', '_')))
    crew.work()
    assert [f() for f in functions] == ['a'] * 12
    assert [library.loads(f'op{n}') for n in range(12)] == [1] * 12


@pytest.mark.usefixtures('restless')
def test_functions_come_and_go_while_policies_change():
    """Bound functions are made and freed while all entry points get code for a new state."""
    toy = Toy()
    toy.add('a')
    toy.add('b')
    crew = Crew(1)

    def bind():
        assert toy.name_of(toy.f.bind('b')(Q, Q)) == 'b'

    def scope():
        with use_backend('a', op=toy.op):
            pass

    crew.repeat('bind', bind)
    crew.repeat('bind too', bind)
    crew.repeat('scope', scope)
    crew.repeat('attribute', lambda: setattr(toy.registry.get('a'), 'priority', random.randint(1, 9)))
    crew.work()


def test_a_call_that_nobody_serves_says_why_on_every_thread():
    toy = Toy(default_verifier=lambda q: (False, 'never'))
    toy.add('a', accepts=lambda self, q: (False, 'nor me'))

    def call():
        with pytest.raises(NoBackendError, match='nor me'):
            toy.f(Q, Q)
        return True

    assert all(all_at_once([call] * 4))


def test_validate_from_two_threads():
    toy = Toy()
    toy.add('a')
    one, two = all_at_once([validate, validate])
    assert one == two


def test_a_thread_that_plans_does_not_block_one_that_calls():
    """A backend whose availability check is slow delays only its own function."""
    slow, quick = Toy(), Toy()
    asked, go = threading.Event(), threading.Event()

    def is_available(cls):
        asked.set()
        return go.wait(20)

    slow.add('slow', is_available=classmethod(is_available))
    quick.add('a')
    thread = threading.Thread(target=slow.f, args=(Q, Q))
    thread.start()
    assert asked.wait(20)
    assert quick.ran() == 'a'
    with use_backend('default', op=quick.op):
        assert quick.ran() == 'default'
    quick.add('b', priority=1)
    assert quick.ran() == 'b'
    go.set()
    thread.join(20)
    assert not thread.is_alive()
    assert slow.ran() == 'slow'


@pytest.mark.parametrize('change', ['registration', 'removal', 'policy', 'scope', 'attribute'])
def test_what_changes_while_a_plan_is_made_is_not_lost(change):
    """A plan begun before a change must not be installed after it."""
    toy = Toy()
    late = toy.add('late', register=False, priority=1)
    b = toy.add('b', priority=6)
    scope = prefer_backend('b', op=toy.op)
    changes = {
        'registration': (lambda: toy.registry.register(late), 'late'),
        'removal': (lambda: toy.registry.unregister('a'), 'b'),
        'policy': (lambda: set_policy(Policy(prefer=('b',))), 'b'),
        'scope': (scope.__enter__, 'b'),
        'attribute': (lambda: setattr(b, 'priority', 0), 'b'),
    }
    change_it, expected = changes[change]
    changed = []

    def is_available(cls):
        if not changed:
            changed.append(change)
            all_at_once([change_it])
        return True

    toy.add('a', is_available=classmethod(is_available))
    assert toy.ran() == expected
    assert changed
    assert toy.ran() == explain(toy.f, Q, Q).winner == expected


def test_a_call_between_a_plan_and_its_code(monkeypatch):
    """Callers wait for a thread that is suspended in the middle of a swap. They used to ask again, which ended in a
    RecursionError a thousand calls deep."""
    toy = Toy()
    toy.add('a')
    half_way, found = threading.Event(), []

    def slow():
        if not half_way.is_set():
            half_way.set()
            time.sleep(0.3)
        return False

    monkeypatch.setattr('fla.backends.runtime.entry.another_thread_compiles', slow)
    first = threading.Thread(target=lambda: found.append(toy.ran()))
    first.start()
    assert half_way.wait(60)
    second = threading.Thread(target=lambda: found.append(toy.ran()))
    second.start()
    for thread in (first, second):
        thread.join(60)
    assert found == ['a', 'a']
