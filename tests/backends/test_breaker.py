"""The circuit breaker alone, with a clock of the test's own: states, one probe under many threads, listeners."""

import threading

import pytest

from fla.ops.backends.breaker import AS_USUAL, REFUSED, Breakers, BreakerSettings, as_settings
from fla.ops.backends.locking import lock

SETTINGS = BreakerSettings(threshold=3, cooldown=10, probe_timeout=100)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breakers(clock):
    made = Breakers()
    made.clock = clock
    return made


@pytest.fixture
def breaker(breakers):
    return breakers.of('kda.chunk_kda', 'flash_kda')


def fail(breaker, times=1, probe=0):
    for _ in range(times):
        breaker.failed(probe, 'RuntimeError: no', SETTINGS)


def test_failures_in_a_row_open_it(breaker):
    fail(breaker, 2)
    assert breaker.state == 'closed'
    breaker.succeeded(0)
    fail(breaker, 2)
    assert breaker.closed
    fail(breaker)
    assert breaker.state == 'open'
    health = breaker.health
    assert (health.failures, health.total_failures, health.opened, health.retry_in) == (3, 5, 1, 10.0)
    assert health.last_error == 'RuntimeError: no'


def test_an_undecided_call_counts_for_nothing(breaker):
    fail(breaker, 2)
    breaker.abandoned(0)
    assert breaker.failures == 2
    fail(breaker)
    assert breaker.state == 'open'


def test_no_probe_before_the_cooldown(breaker, clock):
    fail(breaker, 3)
    clock.now += 9.9
    assert breaker.admit() == REFUSED
    clock.now += 0.2
    assert breaker.admit() > 0
    assert breaker.state == 'half_open'
    assert breaker.admit() == REFUSED


def test_a_probe_that_succeeds_closes_it(breaker, clock):
    fail(breaker, 3)
    clock.now += 11
    breaker.succeeded(breaker.admit())
    assert breaker.state == 'closed'
    assert breaker.failures == 0
    assert breaker.admit() == AS_USUAL


def test_a_probe_that_fails_begins_the_cooldown_again(breaker, clock):
    fail(breaker, 3)
    clock.now += 11
    fail(breaker, probe=breaker.admit())
    assert breaker.state == 'open'
    clock.now += 9
    assert breaker.admit() == REFUSED
    clock.now += 2
    assert breaker.admit() > 0


def test_after_an_undecided_probe_the_next_call_probes(breaker, clock):
    fail(breaker, 3)
    clock.now += 11
    breaker.abandoned(breaker.admit())
    assert breaker.state == 'open'
    assert breaker.admit() > 0


def test_a_probe_that_never_ends_is_given_up(breaker, clock):
    fail(breaker, 3)
    clock.now += 11
    lost = breaker.admit()
    clock.now += 99
    assert breaker.admit() == REFUSED
    clock.now += 2
    second = breaker.admit()
    assert second > lost
    # what the lost one says later is about another time
    fail(breaker, probe=lost)
    breaker.succeeded(lost)
    assert breaker.state == 'half_open'
    breaker.succeeded(second)
    assert breaker.state == 'closed'


def test_a_probe_ends_with_its_thread(breaker, clock):
    fail(breaker, 3)
    clock.now += 11
    thread = threading.Thread(target=breaker.admit)
    thread.start()
    thread.join()
    assert breaker.state == 'half_open'
    assert breaker.admit() > 0


def test_one_probe_under_many_threads(breaker, clock):
    for _ in range(20):
        breaker.reset()
        fail(breaker, 3)
        clock.now += 11
        start, got, end = threading.Barrier(16), [], threading.Barrier(16)

        def call(start=start, got=got, end=end):
            start.wait()
            got.append(breaker.admit())
            end.wait()  # the thread of the probe lives on

        threads = [threading.Thread(target=call) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got)[:15] == [REFUSED] * 15
        assert max(got) > 0


def test_forced_states_stay(breaker, breakers, clock):
    breaker.force_open()
    clock.now += 1e9
    assert breaker.admit() == REFUSED
    assert breaker.health.retry_in is None
    assert breaker.health.forced
    breakers.clear('a policy')
    assert breaker.state == 'open'
    breaker.force_close()
    fail(breaker, 10)
    assert breaker.state == 'closed'
    breaker.reset()
    fail(breaker, 3)
    assert breaker.state == 'open'


def test_clearing_one_operation(breakers):
    one, other = breakers.of('kda.chunk_kda', 'a'), breakers.of('gla.chunk_gla', 'a')
    fail(one, 3)
    fail(other, 3)
    breakers.clear('a policy', 'kda')
    assert (one.state, other.state) == ('closed', 'open')
    breakers.clear('a policy')
    assert other.state == 'closed'


def test_listeners_hear_of_changes_outside_the_lock(breakers, breaker, clock):
    heard = []

    def listen(event):
        free = []
        thread = threading.Thread(target=lambda: free.append(lock.acquire(timeout=5)) or lock.release())
        thread.start()
        thread.join()
        heard.append((event.old, event.new, free == [True]))
        raise ValueError('a listener harms nobody')

    end = breakers.add_listener(listen)
    fail(breaker, 3)
    clock.now += 11
    breaker.succeeded(breaker.admit())
    assert heard == [('closed', 'open', True), ('open', 'half_open', True), ('half_open', 'closed', True)]
    end()
    fail(breaker, 3)
    assert len(heard) == 3


def test_opening_is_a_warning(breaker, caplog):
    fail(breaker, 3)
    assert "circuit of backend 'flash_kda' is open: 3 failures in a row, the last RuntimeError: no" in caplog.text


@pytest.mark.parametrize(
    'fields',
    [
        {'threshold': 0},
        {'threshold': True},
        {'threshold': 1.5},
        {'cooldown': -1},
        {'cooldown': float('nan')},
        {'cooldown': '3'},
    ],
)
def test_bad_settings_name_the_field(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        BreakerSettings(**fields)


def test_settings_in_several_forms():
    assert as_settings({'threshold': 2}) == as_settings((2,)) == BreakerSettings(2)
    assert as_settings(None) is None
    for bad in ({'thresold': 2}, 'three', 3):
        with pytest.raises(TypeError, match='breaker must be'):
            as_settings(bad)
