"""Measured choice: rules from timings, the file, the policy in force, several processes."""

import functools
import json
import platform
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Dispatcher,
    Policy,
    UnknownNameError,
    breaker,
    dispatch,
    explain,
    freeze_dispatch,
    on_error,
    prefer_backend,
    set_policy,
    strict_mode,
    telemetry,
    trace,
    use_backend,
)
from fla.backends.core import device_label
from fla.backends.core.errors import FrozenError
from fla.backends.observe import add_observer
from fla.backends.tuning import measuring, unload_measurements
from fla.backends.tuning.choices import choose
from fla.backends.tuning.measurements import Choice, MeasurementError, read
from fla.backends.tuning.measuring import load_measurements, measure
from fla.utils.devices import Device
from tests.backends.toy import Toy


def points(rows):
    return [({'q.shape[0]': 1, 'q.shape[1]': t, 'q.dtype': d, 'k is None': k}, order) for t, d, k, order in rows]


def test_one_winner_needs_no_condition():
    found = choose(points([(64, 'float32', True, ('a', 'b')), (4096, 'bfloat16', False, ('a',))]))
    assert found == (Choice(None, ('a',)),)


def test_borders_between_sizes_are_geometric_means():
    found = choose(points([(t, 'float32', True, ('a', 'b') if t < 1000 else ('b', 'a')) for t in (64, 512, 2048, 8192)]))
    assert set(found) == {Choice('q.shape[1] < 1024', ('a',)), Choice('q.shape[1] >= 1024', ('b',))}


def test_a_middle_range_gets_its_own_rule():
    found = choose(points([(t, 'float32', True, ('b',) if t == 100 else ('a',)) for t in (1, 100, 10000)]))
    assert Choice('q.shape[1] >= 10 and q.shape[1] < 1000', ('b',)) in found
    assert len(found) == 3


def test_only_features_that_matter_are_compared():
    rows = [
        (t, d, k, ('a',) if t < 1000 and d == 'float32' else ('b',))
        for t in (64, 4096)
        for d in ('float32', 'bfloat16')
        for k in (True, False)
    ]
    found = choose(points(rows))
    assert Choice('q.shape[1] < 512 and q.dtype == float32', ('a',)) in found
    assert not any('None' in (choice.when or '') for choice in found)
    rows = [(64, 'float32', k, ('a',) if k else ('b',)) for k in (True, False)]
    assert set(choose(points(rows))) == {Choice('k is None', ('a',)), Choice('k is not None', ('b',))}


@pytest.fixture
def toy():
    """Two backends: 'short' is slow on long inputs, 'long' on short ones."""
    made = Toy()

    def slow_when(condition, number):
        def f(self, q, k, scale=None, flag=False):
            if condition(q):
                time.sleep(0.004)
            return q * 0 + number

        return f

    made.add('short', f=slow_when(lambda q: q.shape[0] > 100, 1))
    made.add('long', f=slow_when(lambda q: q.shape[0] < 100, 2))
    return made


SHORT, LONG = torch.zeros(16, 2), torch.zeros(1024, 2)


def both(toy):
    return [functools.partial(toy.f, x, x) for x in (SHORT, LONG)]


def quick(toy, **options):
    return measure(both(toy), warmup=1, repeats=3, progress=False, **options)


@pytest.fixture
def two(toy):
    """Only the two are measured: the default is denied."""
    set_policy(Policy(deny=('default',)))
    return toy


def test_calls_follow_what_was_measured(two):
    assert two.ran(LONG, LONG) == 'short'  # by registration
    made = quick(two)
    assert two.ran(SHORT, SHORT) == 'short'
    assert two.ran(LONG, LONG) == 'long'
    (measured,) = made.functions.values()
    assert [timing.order[0] for timing in measured.timings] == ['short', 'long']
    text = str(explain(two.f, LONG, LONG))
    assert 'ms' in text
    assert 'q.shape[0] >= 128' in text


def test_compiled_callers_follow_too(two):
    quick(two)
    compiled = torch.compile(lambda x: two.f(x, x), backend='eager', fullgraph=True, dynamic=False)
    assert two.name_of(compiled(SHORT)) == 'short'
    assert two.name_of(compiled(LONG)) == 'long'


def test_explicit_choices_win(two):
    quick(two)
    with prefer_backend('short'):
        assert two.ran(LONG, LONG) == 'short'
    with use_backend('short', op=two.op):
        assert two.ran(LONG, LONG) == 'short'
    set_policy(Policy(prefer=('short',)))
    assert two.ran(LONG, LONG) == 'short'


def test_a_file_can_be_edited_and_loaded(two, tmp_path):
    path = tmp_path / 'measured.json'
    made = quick(two, path=path)
    assert read(path) == made
    from fla.backends import default_dispatcher

    default_dispatcher().policies.set_measured(None)
    assert two.ran(LONG, LONG) == 'short'
    load_measurements(path)
    assert two.ran(LONG, LONG) == 'long'
    content = json.loads(path.read_text())
    content['functions'][f'{two.op}.f']['rules'] = [{'when': None, 'use': ['long']}]
    path.write_text(json.dumps(content))
    load_measurements(path)
    assert two.ran(SHORT, SHORT) == 'long'


@pytest.mark.parametrize(
    ('change', 'error', 'words'),
    [
        (lambda c, f: c.update(device='cpu: abacus'), MeasurementError, 'measured on .cpu: abacus.'),
        (lambda c, f: c.update(device='cuda: none'), MeasurementError, 'measure\\(\\) again on this device'),
        (lambda c, f: f.update(rules=[{'when': None, 'use': ['lnog']}]), UnknownNameError, "Did you mean 'long'"),
        (lambda c, f: f.update(rules=[{'when': 'z.shape[0] > 1', 'use': ['long']}]), MeasurementError, "no parameter 'z'"),
        (lambda c, f: f.update(rules=[{'when': 'q.shape[', 'use': ['long']}]), ValueError, 'shape'),
        (lambda c, f: f.update(rules=[{'wen': None, 'use': ['long']}]), MeasurementError, 'unknown key .wen.'),
        (
            lambda c, f: f.update(rules=[{'when': 3, 'use': []}]),
            MeasurementError,
            r'rules\.0\.when: input should be a valid string, got 3',
        ),
        (lambda c, f: f.update(rules=[{'when': 'q =', 'use': ['long']}]), MeasurementError, r"f\.rules\.0\.when: 'q =' is"),
        (lambda c, f: f.update(rules=[{'when': None, 'use': 'long'}]), MeasurementError, r'rules\.0\.use must be a list'),
        (
            lambda c, f: f['timings'][0]['milliseconds'].update(long=10**400),
            MeasurementError,
            r'milliseconds\.long: input should be a',
        ),
        (lambda c, f: f['timings'][0].update(call=3), MeasurementError, r'timings\.0\.call must be a mapping, got 3'),
        (lambda c, f: c['versions'].update({'': '2'}), MeasurementError, r'versions\.: string should have at least 1'),
        (
            lambda c, f: c['versions'].update(torch=2),
            MeasurementError,
            r'versions\.torch: input should be a valid string, got 2',
        ),
        (lambda c, f: c.update(device='no cuda device'), MeasurementError, 'measure\\(\\) again on this device'),
        (lambda c, f: c.update(format='x'), MeasurementError, "format: input should be 'fla measurements 1', got 'x'"),
        (lambda c, f: c.pop('versions'), MeasurementError, 'versions is missing'),
        (lambda c, f: c['functions'].update({'nowhere.f': f}), UnknownNameError, 'nowhere'),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(two, tmp_path, change, error, words):
    path = tmp_path / 'measured.json'
    quick(two, path=path)
    content = json.loads(path.read_text())
    change(content, content['functions'][f'{two.op}.f'])
    path.write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        load_measurements(path)
    assert two.ran(SHORT, SHORT) == 'short'
    assert two.ran(LONG, LONG) == 'long'


def test_all_errors_of_a_file_come_at_once(two, tmp_path):
    path = tmp_path / 'measured.json'
    quick(two, path=path)
    content = json.loads(path.read_text())
    content['functions'][f'{two.op}.f']['rules'] = [{'when': 'q =', 'use': ['long']}, {'when': 'len(q) > 1', 'use': 'long'}]
    text = json.dumps(content)
    path.write_text(text[:-1] + ', "format": "x"}')
    with pytest.raises(MeasurementError) as caught:
        load_measurements(path)
    for words in (
        "'q =' is not an expression",
        "'len(q)' is not allowed",
        'rules.1.use must be a list',
        "key 'format' is a duplicate",
        "format: input should be 'fla measurements 1', got 'x'",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize('text', ['[' * 100_000, '', 'null', '{'])
def test_a_file_without_a_json_object_is_refused(two, tmp_path, text):
    path = tmp_path / 'measured.json'
    path.write_text(text)
    with pytest.raises(MeasurementError, match=r'measured\.json'):
        load_measurements(path)


def test_loading_without_pydantic_names_the_extra(two, tmp_path, monkeypatch):
    quick(two, path=tmp_path / 'measured.json')
    monkeypatch.setitem(sys.modules, 'pydantic', None)
    with pytest.raises(ImportError, match="a file of measurements needs pydantic, of the extra 'policy'"):
        load_measurements(tmp_path / 'measured.json')


def test_other_versions_are_a_warning(two, tmp_path, caplog):
    path = tmp_path / 'measured.json'
    quick(two, path=path)
    path.write_text(path.read_text().replace(torch.__version__, '1.0'))
    load_measurements(path)
    assert 'torch was 1.0, is ' in caplog.text
    assert two.ran(LONG, LONG) == 'long'


def test_a_backend_that_raises_is_not_chosen(two):
    def broken(self, q, k, scale=None, flag=False):
        raise RuntimeError('no')

    two.add('broken', f=broken)
    (measured,) = quick(two).functions.values()
    assert all(timing.milliseconds['broken'] is None for timing in measured.timings)
    assert two.ran(LONG, LONG) == 'long'


def test_with_gradients_the_backward_pass_is_timed(two):
    ran = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q * 1

        @staticmethod
        def backward(ctx, grad):
            ran.append(grad)
            return grad

    two.add('noted', f=lambda self, q, k, scale=None, flag=False: Noted.apply(q))
    q = torch.zeros(4, 2, requires_grad=True)
    measure([functools.partial(two.f, q, q)], warmup=1, repeats=2, progress=False)
    assert len(ran) == 3
    assert q.grad is None


def test_flags_are_compared():
    toy = Toy()

    def slow_where(flagged, number):
        def f(self, q, k, scale=None, flag=False):
            time.sleep(0.004 * (flag is flagged))
            return q * 0 + number

        return f

    toy.add('plain', f=slow_where(True, 1))
    toy.add('flagged', f=slow_where(False, 2))
    set_policy(Policy(deny=('default',)))
    measure([functools.partial(toy.f, SHORT, SHORT, flag=flag) for flag in (False, True)], repeats=5, progress=False)
    assert toy.ran(SHORT, SHORT) == 'plain'
    assert toy.ran(SHORT, SHORT, flag=True) == 'flagged'


def test_calls_with_equal_features_count_together():
    """b wins the first call by 3 ms, a the second by 20 ms."""
    toy = Toy()

    def slow_by(factors, number):
        def f(self, q, k, scale=None, flag=False):
            time.sleep(factors[scale])
            return q * 0 + number

        return f

    toy.add('a', f=slow_by({1.0: 0.003, 2.0: 0.0}, 1))
    toy.add('b', f=slow_by({1.0: 0.0, 2.0: 0.02}, 2))
    set_policy(Policy(deny=('default',)))
    measure([functools.partial(toy.f, SHORT, SHORT, scale=s) for s in (1.0, 2.0)], repeats=3, progress=False)
    assert toy.ran(SHORT, SHORT, scale=1.0) == 'a'


def test_an_unwritable_path_changes_nothing(two, tmp_path):
    before = two.ran(LONG, LONG)
    with pytest.raises(FileNotFoundError):
        quick(two, path=tmp_path / 'nowhere' / 'measured.json')
    for folder in (tmp_path, ''):
        with pytest.raises(IsADirectoryError, match='path must be a file'):
            quick(two, path=folder)
    assert two.ran(LONG, LONG) == before == 'short'


@pytest.fixture
def timed(monkeypatch):
    """A toy whose backends take the times that the test sets."""
    times = {}
    monkeypatch.setattr(measuring, '_time', lambda entry, name, *_: times[name])
    toy = Toy()
    toy.add('first', priority=1)
    toy.add('second', priority=2)
    toy.times = times

    def measure_with(**milliseconds):
        times.update({'default': 9.0, **milliseconds})
        return measure([functools.partial(toy.f, SHORT, SHORT)], progress=False, **toy.options)

    toy.options = {}
    toy.measure = measure_with
    return toy


@pytest.mark.parametrize(
    ('options', 'milliseconds', 'winner'),
    [
        ({}, {'first': 1.0, 'second': 0.99}, 'first'),  # noise
        ({}, {'first': 1.0, 'second': 0.97}, 'second'),
        ({}, {'first': 0.99, 'second': 1.0}, 'first'),
        ({}, {'first': None, 'second': 1.0}, 'second'),
        ({}, {'first': None, 'second': 9.0, 'default': 8.9}, 'second'),  # the first of the standing order runs
        ({}, {'first': 1.0, 'second': 0.999, 'default': 0.5}, 'default'),
        ({'margin': 0}, {'first': 1.0, 'second': 0.99}, 'second'),
        ({'margin': 0}, {'first': 1.0, 'second': 1.0}, 'first'),
        ({'margin': 0.5}, {'first': 1.0, 'second': 0.6}, 'first'),
    ],
)
def test_a_winner_needs_a_margin_over_the_standing_order(timed, options, milliseconds, winner):
    timed.options = options
    (measured,) = timed.measure(**milliseconds).functions.values()
    assert measured.rules == (Choice(None, (winner,)),)
    assert timed.ran(SHORT, SHORT) == winner
    ran = {name: time for name, time in {'default': 9.0, **milliseconds}.items() if time is not None}
    assert list(measured.timings[0].milliseconds)[: len(ran)] == sorted(ran, key=ran.get)  # the file has the measured times


def test_earlier_measurements_do_not_set_the_standard(timed):
    """Otherwise a choice made by noise would persist."""
    timed.measure(first=1.0, second=0.5)
    assert timed.ran(SHORT, SHORT) == 'second'
    timed.measure(first=1.0, second=0.99)
    assert timed.ran(SHORT, SHORT) == 'first'


def test_the_policys_order_sets_the_standard(timed):
    timed.measure(first=1.0, second=0.99)
    set_policy(Policy(boost={timed.op: {'second': -5}}))
    timed.measure(first=0.99, second=1.0)
    assert timed.ran(SHORT, SHORT) == 'second'


def test_each_function_keeps_its_last_measurement(timed, tmp_path):
    other = Toy()
    other.add('first', priority=1)
    other.add('second', priority=2)
    timed.measure(first=2.0, second=1.0)
    path = tmp_path / 'other.json'
    timed.times.update(first=1.0, second=2.0, default=0.1)
    measure([functools.partial(other.f, SHORT, SHORT)], progress=False, path=path)
    assert (timed.ran(), other.ran()) == ('second', 'default')
    timed.measure(first=1.0, second=2.0)
    load_measurements(path)
    assert (timed.ran(), other.ran()) == ('first', 'default')
    unload_measurements()
    assert (timed.ran(), other.ran()) == ('first', 'first')


def test_the_file_names_device_runtime_and_driver(timed, monkeypatch, tmp_path, caplog):
    made = timed.measure(first=1.0, second=2.0)
    assert made.device == device_label.device_label('cpu') != f'cpu: {platform.machine()}'
    assert set(made.versions) == {'torch', 'triton', 'fla-dispatch'}
    monkeypatch.setattr(measuring, 'platform_of_type', lambda device: 'cuda')
    monkeypatch.setattr(device_label, 'devices_of', lambda platform: (Device('cuda', 0, 'NVIDIA H100', (9, 0)),))
    monkeypatch.setattr(torch.version, 'cuda', '12.9')
    monkeypatch.setitem(device_label._DRIVER_FILES, 'cuda', str(tmp_path / 'driver'))
    driver = 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed\nGCC version:  gcc version 12.3.0\n'
    (tmp_path / 'driver').write_text(driver.format('580.65.06'))
    timed.options = {'path': tmp_path / 'measured.json'}
    made = timed.measure(first=1.0, second=2.0)
    assert made.device == 'cuda: NVIDIA H100'
    assert (made.versions['CUDA'], made.versions['driver']) == ('12.9', '580.65.06')
    load_measurements(tmp_path / 'measured.json')
    assert 'measure() again' not in caplog.text
    (tmp_path / 'driver').write_text(driver.format('590.1'))
    load_measurements(tmp_path / 'measured.json')
    assert 'driver was 580.65.06, is 590.1' in caplog.text


@pytest.mark.parametrize(
    ('text', 'name'),
    [
        ('processor\t: 0\nmodel name\t: AMD EPYC 7B13 64-Core\nflags\t\t: fpu\n', 'cpu: AMD EPYC 7B13 64-Core'),
        ('processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n', '0x41 0xd4f'),
    ],
)
def test_the_name_of_a_processor(monkeypatch, text, name):
    monkeypatch.setattr(device_label, '_text', lambda path: text)
    assert device_label.device_label('cpu').endswith(name)


def test_refused_while_frozen(two, tmp_path):
    path = tmp_path / 'measured.json'
    quick(two, path=path)
    freeze_dispatch()
    with pytest.raises(FrozenError):
        quick(two)
    with pytest.raises(FrozenError):
        load_measurements(path)


def test_invalid_calls_and_arguments_are_refused(toy):
    with pytest.raises(TypeError, match='partial'):
        measure([lambda: 0], progress=False)
    for wrong in (None, functools.partial(toy.f, SHORT, SHORT)):
        with pytest.raises(TypeError, match=r'calls is a list of functools\.partial'):
            measure(wrong, progress=False)
    with pytest.raises(ValueError, match='nothing to measure'):
        measure([], progress=False)
    meta = SHORT.to('meta')
    with pytest.raises(MeasurementError, match='meta tensors'):
        measure([functools.partial(toy.f, meta, meta)], progress=False)
    for wrong in ({'repeats': 0}, {'repeats': 1.5}, {'warmup': -1}, {'warmup': True}, {'margin': 1}, {'margin': True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            measure([functools.partial(toy.f, SHORT, SHORT)], progress=False, **wrong)
    set_policy(Policy(allow=()))
    with pytest.raises(MeasurementError, match='no backend can serve this call'):
        quick(toy)


def test_a_call_that_always_raises_changes_nothing(two):
    quick(two)
    with pytest.raises(MeasurementError, match='each backend that can serve this call raised'):
        measure([functools.partial(two.f, SHORT[0, 0], SHORT)], progress=False, repeats=1)  # it has no shape[0]
    assert two.ran(LONG, LONG) == 'long'


def test_measured_runs_are_not_counted_as_calls(two):
    seen = []
    end = add_observer(seen.append)
    with trace() as calls, telemetry() as counted, on_error('fallback', breaker={'threshold': 1}):
        quick(two)
        assert (len(calls), counted.snapshot()['calls'], seen) == (0, [], [])
        assert two.ran(LONG, LONG) == 'long'
    end()
    assert len(calls) == 1


def test_a_failure_while_measuring_opens_no_circuit():
    toy = Toy()

    def f(self, q, k, scale=None, flag=False):
        raise OSError

    toy.add('a', f=f, retryable=(OSError,))
    toy.add('b')
    set_policy(Policy(deny=('default',)))
    with on_error('fallback', breaker={'threshold': 1}):
        quick(toy)
        assert breaker(toy.f, 'a').state == 'closed'
        assert toy.ran() == 'b'


def test_bindings_are_refused(two):
    for bound in (two.f.bind('short'), two.f.bind(prefer='long')):
        with pytest.raises(ValueError, match='calls has a binding of'):
            measure([functools.partial(bound, SHORT, SHORT)], progress=False)


def test_a_grid_of_1156_sizes_is_merged():
    sizes = [2**n for n in range(34)]
    grid = [({'q.shape[0]': a, 'q.shape[1]': b}, ('a',) if a < b else ('b',)) for a in sizes for b in sizes]
    holding = {}
    for choice in choose(grid):
        for a, b in ((1, 2), (2**33, 2**32), (2**7, 2**9)):
            if eval(choice.when.replace('q.shape[0]', str(a)).replace('q.shape[1]', str(b))):
                holding[a, b] = choice.use
    assert holding == {(1, 2): ('a',), (2**33, 2**32): ('b',), (2**7, 2**9): ('a',)}


def test_explain_shows_the_timings_of_the_rule(monkeypatch):
    toy = Toy()
    for name in ('a', 'b'):
        toy.add(name)
    set_policy(Policy(deny=('default',)))
    calls = [functools.partial(toy.f, torch.zeros(2**n, 2), torch.zeros(2**n, 2)) for n in range(8)]
    times = {'a': iter([1.0] * 6 + [9.0] * 2), 'b': iter([5.0] * 8)}
    monkeypatch.setattr(measuring, '_time', lambda entry, name, *_: next(times[name]))
    measure(calls, progress=False)
    small, large = (str(explain(toy.f, *call.args)) for call in (calls[0], calls[-1]))
    assert 'float32[1, 2]' in small
    assert 'float32[128, 2] on cpu: b 5 ms, a 9 ms' in large


def test_the_device_is_that_of_the_calls(monkeypatch):
    cards = (Device('cuda', name='first'), Device('cuda', name='second'))
    monkeypatch.setattr(
        device_label, 'devices_of', lambda platform: cards if platform == 'cuda' else (Device(platform, name=platform),)
    )
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 1)
    assert [device_label.device_label('cuda', index) for index in (0, 1, None)] == [
        'cuda: first',
        'cuda: second',
        'cuda: second',
    ]
    assert device_label.device_label('xpu', 3) == 'xpu: xpu'
    monkeypatch.setattr(device_label, 'devices_of', lambda platform: ())
    assert device_label.device_label('cuda') == 'no cuda device'


def test_a_backend_with_an_open_circuit_is_measured(two):
    breaker(two.f, 'long').force_open()
    with on_error('fallback'):
        assert two.ran(LONG, LONG) == 'short'
        made = quick(two)
    assert all(set(timing.milliseconds) == {'short', 'long'} for timing in made.functions[f'{two.op}.f'].timings)


def test_changed_arguments_are_copied_and_restored():
    seen = []
    op = f'{Toy().op}changes'
    BackendRegistry(op)

    @dispatch(op, mutates=('cache', 'states'))
    def step(x: torch.Tensor, cache: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
        seen.append((float(cache), len(states), float(states[0])))
        cache += 1
        states[0] += 1
        states.append(x)
        return x

    cache, states = torch.zeros(()), [torch.zeros(())]
    call = functools.partial(step, torch.ones(2), cache, states)
    measure([call], warmup=1, repeats=3, progress=False)
    assert seen == [(0.0, 1, 0.0)] * 4
    assert (float(cache), len(states), float(states[0])) == (0.0, 1, 0.0)
    assert call.args[1] is cache


def test_a_reference_is_measured_only_if_alone(two, tmp_path):
    two.add('Plain', kind='reference')
    made = quick(two, path=tmp_path / 'measured.json')
    assert all(set(timing.milliseconds) == {'short', 'long'} for timing in made.functions[f'{two.op}.f'].timings)
    file = json.loads((tmp_path / 'measured.json').read_text())
    file['functions'][f'{two.op}.f']['rules'] = [{'when': None, 'use': ['PLAIN']}]
    (tmp_path / 'measured.json').write_text(json.dumps(file))
    load_measurements(tmp_path / 'measured.json')  # names ignore case
    assert two.ran() == 'Plain'


def test_conditions_check_that_optional_tensors_exist(monkeypatch):
    op = f'{Toy().op}optional'

    @dispatch(op)
    def scaled(x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
        return x

    class Other(BaseBackend):
        backend_type = 'other'

        def scaled(self, x, by=None):
            return x

    BackendRegistry(op).register(Other())
    quick_where = {'default': lambda size: size < 100, 'other': lambda size: size > 100}
    timed = lambda entry, name, bound, *_: 1.0 if quick_where[name](bound.arguments['by'].shape[0]) else 5.0  # noqa: E731
    monkeypatch.setattr(measuring, '_time', timed)
    x = torch.ones(2)
    calls = [functools.partial(scaled, x, torch.ones(size)) for size in (16, 1024)]
    made = measure(calls, warmup=1, repeats=3, progress=False).functions[f'{op}.scaled']
    assert {choice.when for choice in made.rules} == {
        'by is not None and by.shape[0] < 128',
        'by is not None and by.shape[0] >= 128',
    }
    with strict_mode():
        assert explain(scaled, x, torch.ones(16)).winner == 'default'
        assert scaled(x) is x


def test_calls_must_be_of_one_namespace():
    mine, other = Dispatcher('measured.ops', 'MEASURED'), Dispatcher('other.ops', 'OTHER')
    toy, others = Toy(dispatcher=mine), Toy(dispatcher=other)
    toy.add('a')
    calls = [functools.partial(toy.f, SHORT, SHORT)]
    assert list(measure(calls, progress=False, repeats=1).functions) == [f'{toy.op}.f']
    assert list(measure(calls, progress=False, repeats=1, dispatcher=mine).functions) == [f'{toy.op}.f']
    with pytest.raises(
        ValueError, match=r'dispatcher is <Dispatcher other\.ops>, and the calls are of <Dispatcher measured'
    ):
        measure(calls, progress=False, dispatcher=other)
    with pytest.raises(ValueError, match=r'of one namespace, got those of measured\.ops, other\.ops'):
        measure([*calls, functools.partial(others.f, SHORT, SHORT)], progress=False)


@pytest.mark.parametrize('rich', [True, False])
def test_progress_is_shown(two, capsys, monkeypatch, rich):
    if not rich:
        monkeypatch.setitem(sys.modules, 'rich.progress', None)
    measure(both(two), warmup=0, repeats=1)
    assert 'measuring' in capsys.readouterr().err


SCRIPT = """
    import functools, os, sys, time
    import torch, torch.distributed as dist
    from fla.backends import Policy, UnknownNameError, freeze_dispatch, set_policy, thaw_dispatch
    from fla.backends.core.errors import FrozenError
    from fla.backends.tuning.measuring import measure
    from fla.backends.tuning.measurements import MeasurementError
    from tests.backends.toy import Toy

    rank, rendezvous, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group('gloo', init_method=f'file://{rendezvous}', rank=rank, world_size=2)
    toy = Toy()

    def slow_on(where, number):
        def f(self, q, k, scale=None, flag=False):
            time.sleep(0.005 * (rank == where))
            return q * 0 + number
        return f

    toy.add('a', f=slow_on(0, 1))
    toy.add('b', f=slow_on(1, 2))  # on rank 1, a would win
    set_policy(Policy(deny=('default',)))
    call = functools.partial(toy.f, torch.zeros(2), torch.zeros(2))
    made = measure([call], group=dist.group.WORLD, path=f'{path}{rank}', warmup=1, repeats=3, progress=False)
    assert toy.ran() == 'b', made
    try:
        measure([call] if rank else [None], group=dist.group.WORLD, progress=False)
    except TypeError:
        assert rank == 0
    except MeasurementError as error:
        assert rank == 1 and 'rank 0 could not measure' in str(error)
    else:
        raise AssertionError
    try:
        measure([call], group=dist.group.WORLD, path='/nowhere/measured.json', progress=False)
    except FileNotFoundError:
        assert rank == 0
    except MeasurementError as error:
        assert rank == 1 and 'rank 0 could not measure' in str(error)
    else:
        raise AssertionError
    # one rank fails: none measures, and nothing changes on any rank
    set_policy(Policy(deny=('default', 'b')))
    for only in (0, 1):
        for wrong in ({'repeats': 0}, {'margin': 3}, {'dispatcher': 3}):
            try:
                measure([call], group=dist.group.WORLD, progress=False, **(wrong if rank == only else {}))
            except MeasurementError as error:
                assert rank != only and f'rank {only} could not measure' in str(error), error
            except (ValueError, TypeError):
                assert rank == only
            else:
                raise AssertionError
        if rank == only:
            freeze_dispatch()
        try:
            measure([call], group=dist.group.WORLD, progress=False)
        except FrozenError:
            assert rank == only
        except MeasurementError as error:
            assert rank != only and f'rank {only} could not measure: FrozenError' in str(error), error
        else:
            raise AssertionError
        if rank == only:
            thaw_dispatch()
    if rank == 0:
        toy.add('only0', f=slow_on(1, 1))
    set_policy(Policy(deny=('default', 'a', 'b')) if rank == 0 else Policy())
    try:
        measure([call], group=dist.group.WORLD, path=f'{path}refused', warmup=1, repeats=3, progress=False)
    except UnknownNameError:
        assert rank == 1
    except MeasurementError as error:
        assert rank == 0 and 'rank 1 could not use what was measured' in str(error), error
    else:
        raise AssertionError
    assert not os.path.exists(f'{path}refused'), 'a rank has changed'
    set_policy(Policy())
    assert toy.ran() == 'b'  # as measured first
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason='no torch.distributed')
def test_the_first_rank_decides_for_all(tmp_path):
    command = [sys.executable, '-c', textwrap.dedent(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / 'meet'), str(tmp_path / 'out')], stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    results = [(process.communicate(timeout=120)[1], process.returncode) for process in ranks]
    assert [code for _, code in results] == [0, 0], results
    assert sorted(p.name for p in tmp_path.glob('out*')) == ['out0']
