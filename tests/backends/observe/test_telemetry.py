"""Counters, times and observers of dispatched calls. Each count is compared with calls whose backend is known."""

import json
import math
import os
import re
import sys
import threading
from collections import Counter

import pytest
import torch

from fla.backends import (
    Dispatcher,
    DispatchError,
    NoBackendError,
    UnknownNameError,
    breaker,
    default_dispatcher,
    deny_backends,
    on_error,
    telemetry,
    trace,
    use_backend,
)
from fla.backends.observe import add_observer
from tests.backends.fallback.test_failure import Broken, failing_toy, raising
from tests.backends.runtime.test_fork import in_child
from tests.backends.toy import Q, Toy


def source(toy):
    entry = toy.f.__fla_entry__
    return re.sub(r'(?<=[a-z])\d+', '', entry._plans[entry.state()].source)


def outcomes(t):
    return {(row['backend'], row['outcome']): row['count'] for row in t.snapshot()['calls']}


# -- off costs nothing --------------------------------------------------------------------------------------------------


def test_off_is_the_same_code_as_if_it_had_never_existed():
    toy = Toy()
    toy.add('a')
    assert toy.ran() == 'a'
    before = source(toy)
    with telemetry(timing=True):
        assert toy.ran() == 'a'
        for word in ('_d_count', '_d_begin', '_d_elapsed'):
            assert word in source(toy)
    assert toy.ran() == 'a'
    assert source(toy) == before
    assert 'try' not in before
    for word in ('_d_count', '_d_begin', '_d_elapsed'):
        assert word not in before


# -- outcomes -----------------------------------------------------------------------------------------------------------


def test_served_and_raised():
    toy = Toy()
    toy.add('a', accepts=lambda self, flag: (not flag, 'no flag'))
    with telemetry() as t:
        ran = Counter(toy.ran(Q, Q, flag=flag) for flag in (False, True, False, False))
        assert ran == {'a': 3, 'default': 1}
        toy.registry.get('a').f = lambda *args, **kwargs: (_ for _ in ()).throw(Broken)
        with pytest.raises(Broken):
            toy.ran()
    assert outcomes(t) == {('a', 'served'): 3, ('default', 'served'): 1, ('a', 'raised'): 1}
    assert t.count(f'{toy.op}.f') == 5
    assert t.count(f'{toy.op}.f', 'a') == 4
    assert t.count(outcome='raised') == 1
    assert t.count(toy.f, 'default', 'served') == 1
    assert t.count(Toy().f) == 0
    assert t.count(backend='triton', outcome='served') == t.count(backend='default') == 1
    assert t.count(backend='flash_kda') == 0  # an operation that has not been loaded
    for wrong in (('other.f',), (None, 'none_such'), (None, None, 'srved')):
        with pytest.raises(UnknownNameError):
            t.count(*wrong)


def test_failed_open_and_no_backend():
    toy = failing_toy()
    with on_error('fallback'), telemetry() as t:
        assert [toy.ran() for _ in range(7)] == ['b'] * 7
        assert breaker(toy.f, 'a').state == 'open'
        with deny_backends('b', 'default', op=toy.op), pytest.raises(NoBackendError):
            toy.ran()
    assert outcomes(t) == {
        ('a', 'failed'): 5,
        ('a', 'open'): 3,
        ('b', 'served'): 7,
        ('none', 'no_backend'): 1,
    }


def test_a_call_that_raises_is_counted_as_raised_whoever_was_the_last():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))
    toy.add('a', f=raising(Broken), retryable=(Broken,))
    toy.add('b', f=raising(OSError), retryable=(Broken,))
    with on_error('fallback'), telemetry() as t:
        with pytest.raises(OSError):
            toy.ran()
        with deny_backends('b', op=toy.op), pytest.raises(Broken):
            toy.ran()
        with use_backend('a', op=toy.op), pytest.raises(Broken):
            toy.ran()
    assert outcomes(t) == {('a', 'failed'): 2, ('b', 'raised'): 1, ('none', 'raised'): 1, ('a', 'raised'): 1}
    assert t.count(outcome='raised') == 3


def test_interrupts_are_counted_as_raised():
    toy = Toy()
    toy.add('a', f=raising(KeyboardInterrupt))
    with telemetry() as t, pytest.raises(KeyboardInterrupt):
        toy.ran()
    assert outcomes(t) == {('a', 'raised'): 1}


def test_compiled_calls_are_counted_once_per_trace():
    toy = Toy()
    toy.add('a')
    compiled = torch.compile(lambda q: toy.f(q, q) + 10, backend='eager', fullgraph=True)
    with telemetry(timing=True) as t:
        for _ in range(4):
            assert compiled(Q)[0, 0] == 11
    assert outcomes(t) == {('a', 'compiled'): 1}


def test_only_while_it_counts():
    toy = Toy()
    toy.add('a')
    t = telemetry()
    toy.ran()
    with t:
        toy.ran()
        with pytest.raises(DispatchError, match='already'):
            t.start()
    toy.ran()
    assert t.count() == 1
    with t:  # continues
        toy.ran()
    assert t.count() == 2
    t.clear()
    assert t.count() == 0


def test_two_at_once_each_count_all():
    toy = Toy()
    toy.add('a')
    with telemetry() as outer:
        toy.ran()
        with telemetry() as inner, trace() as record:
            toy.ran()
    assert (outer.count(), inner.count(), len(record)) == (2, 1, 1)


def test_profiled_calls_count():
    toy = Toy()
    toy.add('a')
    with telemetry(timing=True) as t, torch.profiler.profile():
        toy.ran()
    assert outcomes(t) == {('a', 'served'): 1}
    assert t.snapshot()['timings'][0]['count'] == 1


def test_counts_are_exact_under_threads():
    toy = failing_toy()
    breaker(toy.f, 'a').force_close()
    calls, threads = 400, 8
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with on_error('fallback'), telemetry(timing=True) as t:
            workers = [threading.Thread(target=lambda: [toy.ran() for _ in range(calls)]) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    finally:
        sys.setswitchinterval(switch)
    assert outcomes(t) == {('a', 'failed'): calls * threads, ('b', 'served'): calls * threads}
    assert {row['backend']: row['count'] for row in t.snapshot()['timings']}['b'] == calls * threads


def test_a_namespace_counts_its_own(library):
    toy = Toy(dispatcher=Dispatcher('telemetrylib.ops', 'TELEMETRYLIB'))
    toy.add('a')
    with telemetry() as fla, telemetry(dispatcher=toy.dispatcher) as own:
        toy.ran()
    assert (fla.count(), own.count()) == (0, 1)
    assert 'telemetrylib_dispatch_calls_total{' in own.to_prometheus()


@pytest.mark.parametrize(('arguments', 'error'), [({'timing': 1}, TypeError), ({'pending': 0}, ValueError)])
def test_arguments(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        telemetry(**arguments)


# -- times --------------------------------------------------------------------------------------------------------------


def test_times_on_the_hosts_clock(monkeypatch):
    toy = Toy()
    toy.add('a')
    now = iter((1.0, 1.25, 2.0, 2.00002, 3.0, 103.0))
    with telemetry(timing=True) as t:
        toy.ran()  # plans
        t.clear()
        monkeypatch.setattr(sys.modules['fla.backends.runtime.recorders'].time, 'perf_counter', lambda: next(now))
        for _ in range(3):
            toy.ran()
    monkeypatch.undo()
    (row,) = t.snapshot()['timings']
    assert (row['function'], row['backend'], row['clock'], row['count']) == (f'{toy.op}.f', 'a', 'host', 3)
    assert row['seconds'] == pytest.approx(100.25002)
    assert (row['min'], row['max']) == (pytest.approx(2e-5), 100.0)
    filled = {bound for bound, n in row['buckets'] if n}
    assert filled == {2.5e-5, 0.25, None}


class FakeEvent:
    """A CUDA event that completes when the test says so."""

    made = 0

    def __init__(self, enable_timing=False):
        assert enable_timing
        FakeEvent.made += 1
        self.number, self.passed = FakeEvent.made, False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return FakeEvent.all_passed

    def elapsed_time(self, end):
        assert FakeEvent.all_passed
        return float(end.number - self.number)

    def synchronize(self):
        raise AssertionError('nothing may wait')


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.fixture
def cuda_events(monkeypatch):
    FakeEvent.made, FakeEvent.all_passed = 0, False
    monkeypatch.setattr(torch.cuda, 'Event', FakeEvent)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: f'stream of {device}')
    return torch.zeros(2).as_subclass(OnCuda)


def test_cuda_events_are_read_later_and_never_waited_for(cuda_events):
    from fla.backends import telemetry as make
    from fla.backends.runtime.recorders import begin, elapsed

    t = make(timing=True, pending=2)
    for _ in range(3):
        t.outcome(('op.f', 'a', 'served'), elapsed(begin(cuda_events), cuda_events), None)
    assert t.snapshot()['timings'] == []
    assert (t.snapshot()['pending'], t.snapshot()['dropped']) == (2, 1)
    FakeEvent.all_passed = True
    snapshot = t.snapshot()
    assert (snapshot['pending'], snapshot['dropped']) == (0, 1)
    (row,) = snapshot['timings']
    assert (row['clock'], row['count'], row['seconds']) == ('cuda', 2, 0.002)
    assert t.count() == 3


def test_in_a_capture_no_event_is_made_and_none_is_read(cuda_events, monkeypatch):
    from fla.backends import telemetry as make
    from fla.backends.runtime.recorders import begin, elapsed

    t = make(timing=True)
    t.outcome(('op.f', 'a', 'served'), elapsed(begin(cuda_events), cuda_events), None)
    FakeEvent.all_passed = True
    for room in ('observe.telemetry', 'runtime.recorders'):
        monkeypatch.setattr(sys.modules[f'fla.backends.{room}'], 'in_capture', lambda: True)
    assert begin(cuda_events) is None
    assert elapsed(None, cuda_events) is None
    assert FakeEvent.made == 2
    assert t.collect() == 1
    assert t.snapshot()['timings'] == []


@pytest.mark.gpu
def test_cuda_events_time_the_device():
    toy = Toy()
    toy.add('a')
    q = torch.zeros(2, 8, device='cuda')
    with telemetry(timing=True) as t:
        for _ in range(3):
            assert toy.name_of(toy.f(q, q)) == 'a'
    torch.cuda.synchronize()
    rows = [row for row in t.snapshot()['timings'] if row['clock'] == 'cuda']
    assert [row['count'] for row in rows] == [3]
    assert rows[0]['seconds'] > 0
    assert t.snapshot()['pending'] == 0


def test_only_served_calls_are_timed():
    """No event is recorded on a device that has just failed, and a failure's duration is not the backend's latency."""
    toy = failing_toy()
    with on_error('fallback'), telemetry(timing=True) as t:
        assert toy.ran() == 'b'
    assert {row['backend']: row['count'] for row in t.snapshot()['timings']} == {'b': 1}
    assert t.count(outcome='failed') == 1


def test_a_clock_that_fails_does_not_leave_a_probe_behind(monkeypatch):
    toy = failing_toy()
    clock = [0.0]
    default_dispatcher().breakers.clock = lambda: clock[0]
    with on_error('fallback'), telemetry(timing=True):
        for _ in range(5):
            toy.ran()
        clock[0] += 30
        with monkeypatch.context() as patch:

            def fail():
                raise OSError('no clock')

            patch.setattr(sys.modules['fla.backends.runtime.recorders'].time, 'perf_counter', fail)
            with pytest.raises(OSError, match='no clock'):
                toy.ran()
        assert breaker(toy.f, 'a').state == 'open'
        assert breaker(toy.f, 'a').admit() > 0


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
@pytest.mark.filterwarnings('ignore:This process.*multi-threaded:DeprecationWarning')
def test_a_child_counts_on_by_itself():
    toy = Toy()
    toy.add('a')
    with telemetry() as t:
        toy.ran()
        assert in_child(lambda: (toy.ran(), t.count())[1]) == 2
        assert t.count() == 1


def test_without_timing_no_clock_is_read(monkeypatch):
    toy = Toy()
    toy.add('a')
    with telemetry() as t:
        assert '_d_begin' not in source(toy) if toy.ran() else None
    assert t.snapshot()['timings'] == []


# -- observers ----------------------------------------------------------------------------------------------------------


def test_observers_hear_every_outcome_until_they_end():
    toy = failing_toy()
    heard = []
    with on_error('fallback'):
        end = add_observer(heard.append)
        assert toy.ran() == 'b'
        end()
        assert toy.ran() == 'b'
    assert [(e.function, e.backend, e.outcome) for e in heard] == [
        (f'{toy.op}.f', 'a', 'failed'),
        (f'{toy.op}.f', 'b', 'served'),
    ]
    assert isinstance(heard[0].error, Broken)
    assert heard[1].error is None
    assert heard[1].seconds is None


def test_an_observer_may_be_added_twice():
    toy = Toy()
    toy.add('a')
    heard = []
    end, _ = add_observer(heard.append), add_observer(heard.append)
    toy.ran()
    end()
    toy.ran()
    assert len(heard) == 3


def test_observers_get_times_where_they_are_taken():
    toy = Toy()
    toy.add('a')
    heard = []
    add_observer(heard.append)
    with telemetry(timing=True):
        toy.ran()
    assert heard[0].seconds >= 0


def test_an_observer_that_raises_harms_no_call(caplog):
    toy = Toy()
    toy.add('a')

    def observer(event):
        raise RuntimeError('observer bug')

    add_observer(observer)
    assert [toy.ran() for _ in range(3)] == ['a'] * 3
    assert len([r for r in caplog.records if 'observer' in r.getMessage() and r.exc_info]) == 1
    with pytest.raises(TypeError, match='observer'):
        add_observer('print')


# -- formats ------------------------------------------------------------------------------------------------------------

NAME, LABEL = r'[a-zA-Z_:][a-zA-Z0-9_:]*', r'[a-zA-Z_][a-zA-Z0-9_]*'
LABELS = re.compile(rf'({LABEL})="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
SAMPLE = re.compile(rf'({NAME})(?:\{{(.*)\}})? (\S+)')


def parse(text):
    """Parses Prometheus' text format strictly: family → (type, {(sample, labels): value})."""
    assert text.endswith('\n')
    families, current = {}, None
    for line in text[:-1].split('\n'):
        if line.startswith('# HELP '):
            current = line.split(' ', 3)[2]
            assert current not in families, 'a family is given once, in one piece'
            families[current] = [None, {}]
        elif line.startswith('# TYPE '):
            _, _, name, kind = line.split(' ')
            assert name == current
            assert families[current][0] is None
            families[current][0] = kind
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            suffix = name.removeprefix(current)
            assert suffix in (('_bucket', '_sum', '_count') if families[current][0] == 'histogram' else ('',))
            pairs = LABELS.findall(labels or '')
            assert ''.join(f'{k}="{v}",' for k, v in pairs).rstrip(',') == (labels or '')
            unescaped = tuple((k, re.sub(r'\\(.)', lambda m: {'n': '\n'}.get(m[1], m[1]), v)) for k, v in sorted(pairs))
            assert (name, unescaped) not in families[current][1], 'a series is given once'
            families[current][1][name, unescaped] = float(value)
    return families


def test_prometheus_text():
    toy = failing_toy()
    with on_error('fallback'), telemetry(timing=True) as t:
        for _ in range(6):
            toy.ran()
    families = parse(t.to_prometheus())
    assert {name: kind for name, (kind, _) in families.items()} == {
        'fla_dispatch_calls_total': 'counter',
        'fla_dispatch_duration_seconds': 'histogram',
        'fla_dispatch_timings_dropped_total': 'counter',
        'fla_dispatch_circuit_state': 'gauge',
        'fla_dispatch_circuit_failures_total': 'counter',
    }
    calls = families['fla_dispatch_calls_total'][1]
    function = ('function', f'{toy.op}.f')
    assert calls == {
        ('fla_dispatch_calls_total', (('backend', 'a'), function, ('outcome', 'failed'))): 5,
        ('fla_dispatch_calls_total', (('backend', 'a'), function, ('outcome', 'open'))): 1,
        ('fla_dispatch_calls_total', (('backend', 'b'), function, ('outcome', 'served'))): 6,
    }
    states = {
        dict(labels)['state']: v
        for (_, labels), v in families['fla_dispatch_circuit_state'][1].items()
        if dict(labels)['backend'] == 'a' and dict(labels)['function'] == function[1]
    }
    assert states == {'closed': 0, 'open': 1, 'half_open': 0}
    histogram = families['fla_dispatch_duration_seconds'][1]
    of_b = {
        (name.rpartition('_')[2], dict(labels).get('le')): v
        for (name, labels), v in histogram.items()
        if dict(labels)['backend'] == 'b'
    }
    bounds = sorted((float(le), v) for (what, le), v in of_b.items() if what == 'bucket')
    assert bounds[-1] == (math.inf, 6)
    assert [v for _, v in bounds] == sorted(v for _, v in bounds)
    assert of_b['count', None] == 6


def test_prometheus_escapes_what_labels_hold():
    from fla.backends.observe.telemetry import prometheus_text

    odd = 'a"b\\c\nd'
    snapshot = {
        'calls': [{'function': 'op.f', 'backend': odd, 'outcome': 'served', 'count': 2}],
        'timings': [],
        'dropped': 0,
        'breakers': [],
    }
    (labels,) = [dict(k[1]) for k in parse(prometheus_text(snapshot, 'FLA'))['fla_dispatch_calls_total'][1]]
    assert labels['backend'] == odd
    parse(prometheus_text(snapshot, '9é'))


def test_nothing_counted_is_valid_text_too():
    parse(telemetry().to_prometheus())


def test_json(tmp_path):
    toy = Toy()
    toy.add('a')
    with telemetry(timing=True) as t:
        toy.ran()
    text = t.to_json(tmp_path / 'calls.json')
    assert json.loads(text) == json.loads((tmp_path / 'calls.json').read_text())
    assert json.loads(text)['calls'] == [{'function': f'{toy.op}.f', 'backend': 'a', 'outcome': 'served', 'count': 1}]
    json.loads(text, parse_constant=lambda name: pytest.fail(f'{name} is no JSON'))
