"""Circuit breakers: when they open and close, which call may probe, and what does not affect them. The clock is a fake."""

import itertools
import json
import logging
import os
import sys
import threading

import pytest
import torch

from fla.backends import (
    DispatchError,
    NoBackendError,
    Policy,
    UnknownNameError,
    add_breaker_listener,
    breaker,
    default_dispatcher,
    deny_backends,
    explain,
    freeze_dispatch,
    health,
    on_error,
    policy_context,
    prefer_backend,
    refresh,
    reset_policy,
    set_policy,
    thaw_dispatch,
    trace,
    use_backend,
)
from fla.backends.core.locking import lock
from fla.backends.policy.on_error import BreakerSettings
from tests.backends.fallback.test_failure import Broken
from tests.backends.runtime.test_fork import in_child
from tests.backends.toy import Q, Toy

COOLDOWN = BreakerSettings().cooldown


class Clock:
    """A clock that a test advances."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    made = Clock()
    default_dispatcher().breakers.clock = made
    return made


@pytest.fixture
def toy(clock):
    """a fails while `toy.fails` is an exception, and b then serves; `toy.attempts` counts runs of a."""
    made = Toy()
    made.fails, made.attempts = Broken, 0

    def f(self, q, k, scale=None, flag=False):
        made.attempts += 1
        if made.fails is not None:
            raise made.fails()
        return q * 0 + 1

    made.add('a', f=f, retryable=(Broken,))
    made.add('b')
    with on_error('fallback'):
        yield made


def fail(toy, times=5):
    toy.fails = Broken
    for _ in range(times):
        assert toy.ran() == 'b'


def state(toy):
    return breaker(toy.f, 'a').state


# -- the circle ---------------------------------------------------------------------------------------------------------


def test_closed_open_half_open_closed(toy, clock):
    fail(toy, 4)
    assert state(toy) == 'closed'
    fail(toy, 1)
    assert state(toy) == 'open'
    assert toy.attempts == 5
    assert [toy.ran() for _ in range(10)] == ['b'] * 10
    assert toy.attempts == 5  # unchanged
    clock.now += COOLDOWN - 0.001
    assert toy.ran() == 'b'
    assert toy.attempts == 5
    clock.now += 0.001
    toy.fails = None
    assert toy.ran() == 'a'
    assert state(toy) == 'closed'
    assert toy.ran() == 'a'
    assert health()[f'{toy.op}.f', 'a'].failures == 0


def test_only_failures_in_a_row_open_it(toy):
    for _ in range(6):
        fail(toy, 4)
        toy.fails = None
        assert toy.ran() == 'a'
    assert state(toy) == 'closed'


def test_a_call_that_began_before_it_opened_says_nothing_of_an_open_one(clock):
    toy = Toy()

    def f(self, q, k, scale=None, flag=False):
        if not flag:
            raise Broken
        for _ in range(5):  # meanwhile the backend fails in other calls
            assert toy.ran() == 'b'
        return q * 0 + 1

    toy.add('a', f=f, retryable=(Broken,))
    toy.add('b')
    with on_error('fallback'):
        assert toy.ran(flag=True) == 'a'
        known = health()[f'{toy.op}.f', 'a']
        assert (known.state, known.failures) == ('open', 5)
        assert '5 failures in a row' in str(explain(toy.f, Q, Q))


def test_what_raises_on_the_way_to_a_probe_ends_it(toy, clock, monkeypatch):
    fail(toy)
    clock.now += COOLDOWN
    monkeypatch.setattr(sys.modules['fla.backends.observe.trace'], 'record_of', lambda *_: 1 / 0)
    with trace(), pytest.raises(ZeroDivisionError):
        toy.ran()
    assert state(toy) == 'open'
    toy.fails = None
    assert toy.ran() == 'a'


def test_a_listener_that_exits_ends_no_call(toy, caplog):
    end = add_breaker_listener(lambda event: sys.exit(3))
    fail(toy)
    end()
    assert state(toy) == 'open'
    assert 'breaker listener' in caplog.text


def test_a_probe_that_fails_begins_the_cooldown_again(toy, clock):
    fail(toy)
    clock.now += COOLDOWN
    fail(toy, 3)
    assert toy.attempts == 6
    assert state(toy) == 'open'
    clock.now += COOLDOWN
    fail(toy, 1)
    assert toy.attempts == 7


@pytest.mark.parametrize('error', [KeyboardInterrupt, TypeError, torch.OutOfMemoryError])
def test_a_probe_that_says_nothing_of_the_backend_leaves_the_next_call_to_probe(toy, clock, error):
    fail(toy)
    clock.now += COOLDOWN
    toy.fails = error
    with pytest.raises(error):
        toy.ran()
    assert state(toy) == 'open'
    toy.fails = None
    assert toy.ran() == 'a'
    assert state(toy) == 'closed'


def test_errors_of_the_caller_between_failures_neither_count_nor_reset(toy):
    fail(toy, 4)
    toy.fails = ValueError
    for _ in range(10):
        with pytest.raises(ValueError):
            toy.ran()
    assert state(toy) == 'closed'
    fail(toy, 1)
    assert state(toy) == 'open'


def test_each_function_and_backend_has_its_own(toy):
    other = Toy()
    other.add('a')
    fail(toy)
    assert state(toy) == 'open'
    assert other.ran() == 'a'
    assert breaker(other.f, 'a').state == 'closed'
    assert breaker(toy.f, 'b').state == 'closed'


@pytest.mark.parametrize('breaker_of', [BreakerSettings(threshold=2, cooldown=7), {'threshold': 2, 'cooldown': 7}])
def test_settings(toy, clock, breaker_of):
    set_policy(Policy(on_error='fallback', breaker=breaker_of))
    fail(toy, 2)
    assert state(toy) == 'open'
    assert health()[f'{toy.op}.f', 'a'].retry_in == 7
    clock.now += 7
    toy.fails = None
    assert toy.ran() == 'a'


@pytest.mark.parametrize('breaker_of', [BreakerSettings(threshold=2, cooldown=7), {'threshold': 2, 'cooldown': 7}])
def test_settings_of_a_scope(toy, clock, breaker_of):
    with on_error('fallback', breaker=breaker_of):
        fail(toy, 2)
        assert state(toy) == 'open'
        assert health()[f'{toy.op}.f', 'a'].retry_in == 7
    with pytest.raises(TypeError, match='breaker must be'):
        on_error('fallback', breaker=5)


@pytest.mark.parametrize(
    ('bad', 'error'),
    [
        ({'threshold': 0}, ValueError),
        ({'threshold': True}, ValueError),
        ({'threshold': 2.5}, ValueError),
        ({'cooldown': -1}, ValueError),
        ({'cooldown': float('nan')}, ValueError),
        ({'cooldown': float('inf')}, ValueError),
        ({'probe_timeout': '5'}, ValueError),
        ({'probe_timeout': 0}, ValueError),
        ({'treshold': 5}, TypeError),
        (5, TypeError),
    ],
)
def test_settings_that_cannot_be_right(bad, error):
    with pytest.raises(error, match=r'breaker|threshold|cooldown|probe_timeout'):
        Policy(breaker=bad)


# -- probes under threads -----------------------------------------------------------------------------------------------


class Probed:
    """A backend whose runs wait until the test releases them; counts concurrent runs."""

    def __init__(self, toy):
        self.toy, self.running, self.most, self.runs = toy, 0, 0, 0
        self.go, self.arrived, self.error = threading.Event(), threading.Event(), None
        self.guard = threading.Lock()

    def __call__(self):
        with self.guard:
            self.running += 1
            self.runs += 1
            self.most = max(self.most, self.running)
        self.arrived.set()
        assert self.go.wait(30)
        with self.guard:
            self.running -= 1
        return self.error if self.error is not None else _Served()


class _Served(Exception):
    """Marks a successful run; never raised."""


@pytest.fixture
def waiting(clock):
    """A toy whose backend a blocks in `toy.probed` while `toy.waits` is set."""
    toy = Toy()
    toy.waits, toy.probed = False, Probed(toy)

    def f(self, q, k, scale=None, flag=False):
        if not toy.waits:
            raise Broken
        outcome = toy.probed()
        if isinstance(outcome, _Served):
            return q * 0 + 1
        raise outcome

    toy.add('a', f=f, retryable=(Broken,))
    toy.add('b')
    with on_error('fallback'):
        for _ in range(5):
            toy.ran()
        toy.waits = True
        yield toy


@pytest.mark.parametrize('error', [None, Broken])
def test_exactly_one_probe_under_any_number_of_threads(waiting, clock, error):
    toy, probed = waiting, waiting.probed
    probed.error = error() if error else None
    clock.now += COOLDOWN
    results = []
    barrier = threading.Barrier(16)

    def work():
        barrier.wait()
        for _ in range(20):
            results.append(toy.ran())

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    assert probed.arrived.wait(30)
    while len(results) < 15 * 20:  # other calls were served while the probe hung
        assert set(results) <= {'b'}
        threading.Event().wait(0.001)
    assert probed.runs == 1
    assert breaker(toy.f, 'a').state == 'half_open'
    probed.go.set()
    for thread in threads:
        thread.join()
    assert probed.most == 1 or error is None
    assert breaker(toy.f, 'a').state == ('open' if error else 'closed')
    assert probed.runs == (1 if error else 20)


def test_a_probe_that_hangs_is_given_up_after_its_time_and_has_no_say_later(waiting, clock):
    toy, probed = waiting, waiting.probed
    clock.now += COOLDOWN
    hung = threading.Thread(target=toy.ran)
    hung.start()
    assert probed.arrived.wait(30)
    clock.now += BreakerSettings().probe_timeout - 1
    assert toy.ran() == 'b'
    clock.now += 1
    probed.error = Broken()
    toy.waits = False
    assert toy.ran() == 'b'  # the new probe, which failed
    assert breaker(toy.f, 'a').state == 'open'
    assert health()[f'{toy.op}.f', 'a'].opened == 2
    probed.error = None
    probed.go.set()
    hung.join()  # the old probe succeeds, too late
    assert breaker(toy.f, 'a').state == 'open'


def test_a_probe_whose_thread_is_gone_is_given_up_after_its_time(toy, clock):
    fail(toy)
    clock.now += COOLDOWN
    numbers = []
    dying = threading.Thread(target=lambda: numbers.append(breaker(toy.f, 'a').admit()))
    dying.start()
    dying.join()
    assert numbers[0] > 0
    toy.fails = None
    assert toy.ran() == 'b'
    assert state(toy) == 'half_open'
    assert health()[f'{toy.op}.f', 'a'].retry_in == BreakerSettings().probe_timeout
    clock.now += BreakerSettings().probe_timeout
    assert toy.ran() == 'a'
    assert state(toy) == 'closed'


def test_a_call_that_began_before_it_opened_changes_nothing_when_it_ends(waiting, clock):
    toy, probed = waiting, waiting.probed
    breaker(toy.f, 'a').reset()
    slow = threading.Thread(target=toy.ran)
    slow.start()
    assert probed.arrived.wait(30)
    toy.waits = False
    for _ in range(5):
        toy.ran()
    assert breaker(toy.f, 'a').state == 'open'
    probed.go.set()
    slow.join()
    assert breaker(toy.f, 'a').state == 'open'


def test_no_probe_in_a_capture_or_in_a_backward_pass(toy, clock, monkeypatch):
    fail(toy)
    clock.now += COOLDOWN
    toy.fails = None
    ran = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            ran.append(toy.ran())
            return grad

    Function.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert ran == ['b']
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules['fla.backends.fallback.breaker'], 'in_capture', lambda: True)
        assert toy.ran() == 'b'
        assert explain(toy.f, Q, Q).winner == 'b'
    assert toy.ran() == 'a'


# -- listeners ----------------------------------------------------------------------------------------------------------


def test_listeners_hear_every_change_outside_the_lock(toy, clock):
    heard = []

    def listener(event):
        free = []

        def try_lock():
            free.append(lock.acquire(timeout=10))
            lock.release()

        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        heard.append((event.function, event.backend, event.old, event.new, free[0]))

    end = add_breaker_listener(listener)
    fail(toy)
    clock.now += COOLDOWN
    fail(toy, 1)
    clock.now += COOLDOWN
    toy.fails = None
    toy.ran()
    key = f'{toy.op}.f', 'a'
    circle = ['closed', 'open', 'half_open', 'open', 'half_open', 'closed']
    assert heard == [(*key, old, new, True) for old, new in itertools.pairwise(circle)]
    end()
    breaker(toy.f, 'a').force_open()
    assert len(heard) == 5


def test_a_listener_may_call_the_function_and_the_breaker(toy):
    ran = []
    add_breaker_listener(lambda event: ran.append((toy.ran(), breaker(toy.f, 'a').state)))
    fail(toy)
    assert ran == [('b', 'open')]


def test_a_listener_that_raises_harms_no_call(toy, caplog):
    def listener(event):
        raise RuntimeError('listener bug')

    add_breaker_listener(listener)
    fail(toy)
    assert state(toy) == 'open'
    assert any(r.levelno == logging.ERROR and r.exc_info and 'listener' in r.getMessage() for r in caplog.records)
    with pytest.raises(TypeError, match='listener'):
        add_breaker_listener(5)


def test_opening_is_a_warning(toy, caplog):
    fail(toy)
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("circuit of backend 'a' is open: 5 failures in a row, the last Broken" in text for text in texts)


# -- by hand ------------------------------------------------------------------------------------------------------------


def test_force_open_holds_until_it_is_lifted(toy, clock):
    toy.fails = None
    breaker(toy.f, 'a').force_open()
    clock.now += 1e9
    assert toy.ran() == 'b'
    set_policy(Policy(prefer='a'))
    refresh()
    assert toy.ran() == 'b'
    assert health()[f'{toy.op}.f', 'a'].forced is True
    assert health()[f'{toy.op}.f', 'a'].retry_in is None
    breaker(toy.f, 'a').reset()
    assert toy.ran() == 'a'


def test_force_open_works_for_a_backend_that_declares_nothing(toy):
    assert toy.attempts == 0
    toy.fails = None
    with prefer_backend('b', op=toy.op):
        assert toy.ran() == 'b'
        breaker(toy.f, 'b').force_open()
        assert toy.ran() == 'a'


def test_force_close_lets_every_call_through(toy):
    breaker(toy.f, 'a').force_close()
    fail(toy, 20)
    assert toy.attempts == 20
    assert 'forced closed' in ' '.join(explain(toy.f, Q, Q)['a'].notes)
    breaker(toy.f, 'a').reset()
    fail(toy, 20)
    assert toy.attempts == 25


def test_reset_closes_and_counts_from_zero(toy):
    fail(toy)
    breaker(toy.f, 'a').reset()
    fail(toy, 4)
    assert state(toy) == 'closed'
    assert health()[f'{toy.op}.f', 'a'].total_failures == 4


def test_force_open_warns_where_nothing_reads_it(caplog):
    toy = Toy()
    toy.add('a')
    breaker(toy.f, 'a').force_open()
    assert toy.ran() == 'a'
    texts = [r.getMessage() for r in caplog.records]
    assert any('force_open' in text and "on_error='fallback'" in text and 'deny_backends' in text for text in texts)


def test_names(toy):
    assert breaker(f'{toy.op}.f', 'A') is breaker(toy.f, 'a')
    assert breaker(toy.f, 'triton') is breaker(toy.f, 'default')
    assert breaker(toy.f.bind(prefer='a'), 'a') is breaker(toy.f, 'a')
    with pytest.raises(UnknownNameError, match=r"Did you mean 'a'|Known: a"):
        breaker(toy.f, 'aa')
    with pytest.raises(UnknownNameError):
        breaker(f'{toy.op}.g', 'a')
    with pytest.raises(TypeError):
        breaker(print, 'a')


def test_health_is_json_ready(toy):
    fail(toy)
    rows = {'/'.join(key): one.to_dict() for key, one in health().items()}
    row = json.loads(json.dumps(rows))[f'{toy.op}.f/a']
    assert row['state'] == 'open'
    assert row['failures'] == row['total_failures'] == 5
    assert row['opened'] == 1
    assert row['retry_in'] == COOLDOWN
    assert row['last_error'] == 'Broken: '


# -- policy -------------------------------------------------------------------------------------------------------------


def clear_by_set_policy():
    set_policy(Policy(check_values=False))


def clear_by_reset_policy():
    reset_policy()


@pytest.mark.parametrize('change', [clear_by_set_policy, clear_by_reset_policy, refresh])
def test_a_policy_change_clears_it(toy, change):
    fail(toy)
    change()
    assert state(toy) == 'closed'
    toy.fails = None
    assert toy.ran() == 'a'


def test_a_scope_is_no_change_of_policy(toy):
    fail(toy)
    with prefer_backend('a', op=toy.op), deny_backends('default', op=toy.op):
        assert toy.ran() == 'b'
    assert state(toy) == 'open'


def test_registration_and_attributes_clear_it(toy):
    fail(toy)
    toy.add('c')
    assert state(toy) == 'closed'
    fail(toy)
    toy.registry.get('a').priority = 4
    assert state(toy) == 'closed'


def test_a_forced_choice_does_not_ask_it(toy):
    fail(toy)
    toy.fails = None
    with use_backend('a', op=toy.op):
        assert toy.ran() == 'a'
        assert explain(toy.f, Q, Q).winner == 'a'
    assert toy.f.bind('a')(Q, Q)[0, 0] == 1
    assert state(toy) == 'open'


def test_without_fallback_nothing_asks_it(toy):
    fail(toy)
    toy.fails = None
    with on_error('raise'):
        assert toy.ran() == 'a'


def test_require_first_raises_rather_than_pass_it_over(toy):
    fail(toy)
    with policy_context(Policy(require_first=True)), pytest.raises(NoBackendError):
        toy.ran()


def test_it_works_while_frozen(toy):
    freeze_dispatch()
    try:
        fail(toy)
        assert state(toy) == 'open'
        assert toy.ran() == 'b'
    finally:
        thaw_dispatch()
    assert state(toy) == 'open'


# -- explain ------------------------------------------------------------------------------------------------------------


def test_explain_shows_it_and_changes_nothing(toy, clock):
    fail(toy)
    decision = explain(toy.f, Q, Q)
    assert decision.winner == 'b'
    assert decision['a'].verdict == 'open'
    assert decision['a'].source == 'breaker'
    assert '5 failures in a row, the last Broken' in decision['a'].reason
    assert '30.0 s' in decision['a'].reason
    assert toy.f.resolve(Q, Q)(Q, Q)[0, 0] == 2
    clock.now += COOLDOWN
    for _ in range(3):
        decision = explain(toy.f, Q, Q)
        assert decision.winner == 'a'
        assert 'would be the probe' in ' '.join(decision['a'].notes)
    assert state(toy) == 'open'
    assert explain(toy.f, Q, Q, platform='h100').winner == 'a'


def test_a_call_that_only_an_open_backend_could_serve_says_so(clock):
    toy = Toy(default_verifier=lambda q: (False, 'not today'))

    def f(self, q, k, scale=None, flag=False):
        raise Broken

    toy.add('a', f=f, retryable=(Broken,))
    with on_error('fallback'):
        for _ in range(5):
            with pytest.raises(Broken):
                toy.ran()
        with pytest.raises(NoBackendError, match=r'circuit is open.*\n(.*\n)*.*reset\(\)') as caught:
            toy.ran()
    assert isinstance(caught.value, DispatchError)
    assert caught.value.decision['a'].verdict == 'open'


# -- fork ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
@pytest.mark.filterwarnings('ignore:This process.*multi-threaded:DeprecationWarning')
def test_a_child_gives_the_parents_probe_up_after_its_time(waiting, clock):
    toy, probed = waiting, waiting.probed
    clock.now += COOLDOWN
    hung = threading.Thread(target=toy.ran)
    hung.start()
    assert probed.arrived.wait(30)

    def child():
        states = [breaker(toy.f, 'a').state]
        toy.waits = False
        states.append(toy.ran())
        clock.now += BreakerSettings().probe_timeout
        states.append(toy.ran())  # the child's own probe, which fails
        states.append(breaker(toy.f, 'a').state)
        return states

    assert in_child(child) == ['half_open', 'b', 'b', 'open']
    assert breaker(toy.f, 'a').state == 'half_open'
    probed.go.set()
    hung.join()
    assert breaker(toy.f, 'a').state == 'closed'
