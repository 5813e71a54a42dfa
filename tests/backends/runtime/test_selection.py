"""Which candidate takes a call: order, facts, verifiers, preferences, arguments, kinds of tensors."""

import itertools
import logging
import sys

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fla.utils.devices
from fla.backends import (
    BackendRegistry,
    BaseBackend,
    NoBackendError,
    Policy,
    check_tensors,
    default_dispatcher,
    deny_backends,
    dispatch,
    explain,
    policy_context,
    refresh,
    strict_mode,
    trace,
    use_backend,
)
from fla.backends.core.errors import BackendBugError
from fla.utils.devices import Device
from tests.backends.toy import Q, Toy


def said(caplog, level, *words):
    records = [r for r in caplog.records if r.levelno == level and all(word in r.getMessage() for word in words)]
    return records


def yes(self):
    return True, None


def no(self):
    return False, 'never'


# -- order ------------------------------------------------------------------------------------------------------------------


def test_lower_priority_wins_and_ties_keep_registration_order():
    toy = Toy()
    for name, priority in [('e', 5), ('c', 2), ('d', 5), ('a', 1), ('b', 2), ('f5', 5.5), ('late', 101)]:
        toy.add(name, priority=priority)
    assert toy.ran() == 'a'
    expected = ['a', 'c', 'b', 'e', 'd', 'f5', 'default', 'late']
    assert [c.name for c in explain(toy.f, Q, Q).candidates] == expected
    for gone, ran in itertools.pairwise(expected):
        if gone != 'late':
            with deny_backends(*expected[: expected.index(gone) + 1]):
                assert toy.ran() == ran


def test_the_default_is_at_100_and_a_reference_behind_it():
    toy = Toy(default_verifier=lambda flag: (not flag, 'no flag'))
    toy.add('plain', kind='reference')
    toy.add('at99', priority=99, accepts=lambda self, scale: (scale == 99, 'no'))
    toy.add('at101', priority=101, accepts=lambda self, scale: (scale == 101, 'no'))
    assert [c.name for c in explain(toy.f, Q, Q).candidates] == ['at99', 'default', 'at101', 'plain']
    assert toy.ran() == 'default'
    assert toy.ran(Q, Q, scale=99) == 'at99'
    assert toy.ran(Q, Q, scale=101, flag=True) == 'at101'
    assert toy.ran(Q, Q, flag=True) == 'plain'


def test_backends_of_every_operation_are_asked_last_among_equals():
    toy = Toy()
    everywhere = BackendRegistry('*')

    class Everywhere(BaseBackend):
        backend_type = 'everywhere'

        def f(self, q, k, scale=None, flag=False):
            return q * 0 + 50

    toy.names[50] = 'everywhere'
    everywhere.register(Everywhere())
    toy.add('own', accepts=lambda self, flag: (not flag, 'no flag'))
    toy.add('later', priority=6)
    assert [c.name for c in explain(toy.f, Q, Q).candidates] == ['own', 'everywhere', 'later', 'default']
    assert toy.ran() == 'own'
    assert toy.ran(Q, Q, flag=True) == 'everywhere'
    other = Toy()
    other.names[50] = 'everywhere'
    assert other.ran() == 'everywhere'


def test_a_backend_without_the_method_is_no_candidate():
    toy = Toy()
    toy.add('a', f=None)
    toy.add('b')
    assert toy.ran() == 'b'
    assert list(toy.f.backends) == ['b', 'default']


# -- prefers ----------------------------------------------------------------------------------------------------------------


def demoting():
    """Backends a and b are demoted when flag is set, c never is; plain is a reference."""
    toy = Toy(default_verifier=lambda scale: (scale is None, 'no scale'))
    toy.add('a', prefers=lambda self, flag: (not flag, 'slow with flag'))
    toy.add('b', prefers=lambda self, flag: (not flag, 'slower with flag'))
    toy.add('c', accepts=lambda self, scale: (scale is None, 'no scale'))
    toy.add('plain', kind='reference')
    return toy


@pytest.mark.parametrize(
    ('denied', 'scale', 'ran'),
    [
        ((), None, 'c'),
        (('c',), None, 'default'),  # the default is one of the other eligible candidates
        ((), 1.0, 'a'),  # only demoted candidates are left, which precede the reference
        (('a',), 1.0, 'b'),
        (('a', 'b'), 1.0, 'plain'),
    ],
)
def test_demotion(denied, scale, ran):
    toy = demoting()
    assert toy.ran() == 'a'
    with policy_context(Policy(deny=denied)):
        assert toy.ran(Q, Q, scale=scale, flag=True) == ran
        decision = explain(toy.f, Q, Q, scale=scale, flag=True)
        assert decision.winner == ran
        for name in {'a', 'b'} - {ran, *denied}:
            assert decision[name].verdict == 'demoted'
            assert 'with flag' in decision[name].reason
            assert decision[name].source == 'prefers'


def test_a_forced_backend_is_not_asked_whether_it_should():
    toy = demoting()
    with use_backend('a'):
        assert toy.ran(Q, Q, flag=True) == 'a'
    with use_backend('b', 'a'):
        assert toy.ran(Q, Q, flag=True) == 'b'
    assert toy.name_of(toy.f.bind(backend='b')(Q, Q, flag=True)) == 'b'


def test_a_demoted_backend_behind_a_preferred_reference_still_serves():
    toy = Toy(default_verifier=lambda: (False, 'never'))
    toy.add('a', prefers=no)
    toy.add('plain', kind='reference', accepts=lambda self, flag: (not flag, 'no flag'))
    with policy_context(Policy(prefer='reference')):
        assert toy.ran() == 'plain'
        assert toy.ran(Q, Q, flag=True) == 'a'
        assert explain(toy.f, Q, Q, flag=True).winner == 'a'


def test_every_demoted_one_keeps_its_place_among_the_demoted():
    toy = Toy(default_verifier=lambda: (False, 'never'))
    for name in 'abc':
        toy.add(name, prefers=no)
    toy.add('plain', kind='reference')
    assert toy.ran() == 'a'
    with deny_backends('a'):
        assert toy.ran() == 'b'


# -- the default's own facts -----------------------------------------------------------------------------------------------


class OnlyHalf(BaseBackend):
    dtypes = (torch.float16,)


@pytest.mark.parametrize(
    ('verifier', 'half', 'full', 'flagged'),
    [
        (None, 'default', 'default', 'default'),
        (OnlyHalf, 'default', None, 'default'),
        (lambda flag: (not flag, 'no flag'), 'default', 'default', None),
        ([OnlyHalf, lambda flag: (not flag, 'no flag')], 'default', None, None),
    ],
    ids=['none', 'facts', 'function', 'both'],
)
def test_default_verifier(verifier, half, full, flagged):
    toy = Toy(default_verifier=verifier)
    calls = {(half, False): Q.half(), (full, False): Q, (flagged, True): Q.half()}
    for (expected, flag), q in calls.items():
        if expected is None:
            with pytest.raises(NoBackendError, match='default'):
                toy.f(q, q, flag=flag)
            assert explain(toy.f, q, q, flag=flag).winner is None
        else:
            assert toy.ran(q, q, flag=flag) == expected


def test_no_backend_error_lists_everything(monkeypatch):
    toy = Toy(default_verifier=lambda q: (False, ('default needs rank 3, got %s', q.dim())))
    toy.add('absent', package_name='no_such_package_anywhere')
    toy.add('off', env_var='FLA_TOY_OFF', default_enable=False)
    toy.add('denied')
    toy.add('half', dtypes=(torch.float16,))
    toy.add('picky', accepts=lambda self, q: (False, ('K must be %s, got %s', 128, q.shape[-1])))
    toy.add('mute', accepts=lambda self: (False, None))
    toy.add('buggy', accepts=lambda self: 1 / 0)
    toy.add('plain', kind='reference', grad='none')
    q = Q.clone().requires_grad_()
    with deny_backends('denied'), pytest.raises(NoBackendError) as info:
        toy.f(q, Q, scale=0.5)
    lines = {line.split()[0]: line for line in str(info.value).splitlines()[1:]}
    for name, words in {
        'absent': "unavailable 'no_such_package_anywhere' is not installed",
        'off': 'disabled FLA_TOY_OFF',
        'denied': 'excluded deny_backends()',
        'half': "rejected 'q' must be float16, got torch.float32",
        'picky': 'rejected K must be 128, got 8',
        'mute': 'rejected no reason given',
        'buggy': 'bug ZeroDivisionError',
        'plain': 'rejected requires grad',
        'default': 'rejected default needs rank 3, got 2',
        'arguments:': 'q: float32[2, 8] on cpu, requires grad k: scale: 0.5',
        'What': 'install switch relax change',
    }.items():
        assert all(word in lines[name] for word in words.split(' ')), (name, lines[name])
    assert isinstance(info.value, NotImplementedError)
    assert {c.name for c in info.value.decision.candidates} == set(lines) - {'arguments:', 'What'}


# -- verifiers --------------------------------------------------------------------------------------------------------------

MALFORMED = {
    'None': None,
    'True': True,
    'False': False,
    'empty tuple': (),
    'one': (1, None),
    'zero': (0, 'no'),
    'none first': (None, 'no'),
    'numpy bool': numpy.True_,
    'numpy bool first': (numpy.True_, None),
    'numpy false first': (numpy.False_, 'no'),
    'tensor': torch.tensor(True),
    'tensors': torch.tensor([True, False]),
    'tensor first': (torch.tensor(True), None),
    'string': 'yes',
    'empty string': '',
    'string first': ('True', None),
    'dict': {},
    'number': 1,
    'object': object(),
    'class': bool,
}


@pytest.mark.parametrize('method', ['accepts', 'prefers'])
@pytest.mark.parametrize('answer', MALFORMED)
def test_a_malformed_answer_is_a_bug(caplog, method, answer):
    toy = Toy()
    toy.add('a', **{method: lambda self: MALFORMED[answer]})
    toy.add('b')
    for _ in range(3):
        assert toy.ran() == 'b'
    (record,) = said(caplog, logging.ERROR, "'a'", toy.op)
    assert {'accepts': 'verifier', 'prefers': 'prefers'}[method] in record.getMessage()
    assert 'test_selection.py:' in record.getMessage()
    report = explain(toy.f, Q, Q)['a']
    assert report.verdict == 'bug'
    assert report.reason
    with strict_mode():
        with pytest.raises(BackendBugError, match="'a'"):
            toy.f(Q, Q)
        assert explain(toy.f, Q, Q).winner is None


@pytest.mark.parametrize('method', ['accepts', 'prefers'])
@pytest.mark.parametrize('error', [ValueError, AttributeError, AssertionError, RuntimeError, StopIteration, KeyError])
def test_a_raising_verifier_is_a_bug(caplog, method, error):
    def boom(self, q):
        raise error('deliberate')

    toy = Toy()
    toy.add('a', **{method: boom})
    toy.add('b')
    for _ in range(3):
        assert toy.ran() == 'b'
    (record,) = said(caplog, logging.ERROR, "'a'", toy.op)
    assert record.exc_info[0] is error
    report = explain(toy.f, Q, Q)['a']
    assert report.verdict == 'bug'
    assert 'deliberate' in report.reason
    with strict_mode(), pytest.raises(BackendBugError) as info:
        toy.f(Q, Q)
    assert isinstance(info.value.__cause__, error)


def test_an_interrupt_is_not_swallowed():
    def interrupt(self):
        raise KeyboardInterrupt

    toy = Toy()
    toy.add('a', accepts=interrupt)
    with pytest.raises(KeyboardInterrupt):
        toy.f(Q, Q)


def test_a_bug_of_the_default_is_one_too(caplog):
    toy = Toy(default_verifier=lambda q: 1 / 0)
    toy.add('plain', kind='reference')
    assert toy.ran() == 'plain'
    assert len(said(caplog, logging.ERROR, "'default'")) == 1
    with strict_mode(), pytest.raises(BackendBugError):
        toy.f(Q, Q)


def test_an_error_of_the_implementation_is_its_own(caplog):
    def boom(self, q, k, scale=None, flag=False):
        raise ValueError('kernel')

    toy = Toy()
    toy.add('a', f=boom)
    toy.add('b')
    with pytest.raises(ValueError, match=r'^kernel$'):
        toy.f(Q, Q)
    assert said(caplog, logging.ERROR) == []


@pytest.mark.parametrize(
    ('reason', 'text'),
    [
        ('constant', 'constant'),
        (('K must be %d, got %s', 128, 8), 'K must be 128, got 8'),
        (('100% of it',), '100% of it'),
        (('%s and %s', 1), '%s and %s 1'),
        (('plain', 1), 'plain 1'),
        (None, 'no reason given'),
        ((), 'no reason given'),
        (3, '3'),
        ('100% sure', '100% sure'),
    ],
    ids=str,
)
def test_reasons(reason, text):
    toy = Toy()
    toy.add('a', accepts=lambda self: (False, reason))
    assert toy.ran() == 'default'
    assert explain(toy.f, Q, Q)['a'].reason == text


def test_a_lazy_reason_is_not_formatted_by_a_call():
    shown = []

    class Size:
        def __str__(self):
            shown.append(self)
            return '7'

    toy = Toy()
    toy.add('a', accepts=lambda self: (False, ('got %s', Size())))
    assert (toy.ran(), shown) == ('default', [])
    assert (explain(toy.f, Q, Q)['a'].reason, len(shown)) == ('got 7', 1)


def test_debug_reasons_are_generated_only_if_debug_was_on_at_plan_time(caplog):
    toy = Toy()
    toy.add('a', accepts=lambda self, q: (False, ('K is %s', q.shape[-1])))
    assert toy.ran() == 'default'
    with caplog.at_level(logging.DEBUG, 'fla'):
        toy.ran()
        assert said(caplog, logging.DEBUG, 'K is') == []
        refresh()
        for _ in range(2):
            assert toy.ran() == 'default'
        assert len(said(caplog, logging.DEBUG, 'K is 8')) == 1
        assert toy.ran(Q[:, :4], Q) == 'default'
        assert len(said(caplog, logging.DEBUG, 'K is 4')) == 1


def test_info_names_the_candidates_and_the_first_use(caplog):
    toy = Toy()
    toy.add('a', accepts=lambda self, flag: (not flag, 'no flag'))
    toy.add('gone', package_name='no_such_package_anywhere')
    with caplog.at_level(logging.INFO, 'fla'):
        for _ in range(2):
            assert (toy.ran(), toy.ran(Q, Q, flag=True)) == ('a', 'default')
    (plan,) = said(caplog, logging.INFO, toy.op, 'candidates')
    assert "['a', 'default']" in plan.getMessage()
    assert 'no_such_package_anywhere' in plan.getMessage()
    for name in ('a', 'default'):
        assert len(said(caplog, logging.INFO, f'backend {name!r} is used')) == 1


def test_verifiers_see_bound_and_defaulted_arguments():
    seen = []
    toy = Toy()
    toy.add('a', accepts=lambda self, flag, scale, **rest: seen.append((flag, scale, sorted(rest))) or (True, None))
    assert toy.ran() == 'a'
    assert toy.ran(Q, Q, 2.0, flag=True) == 'a'
    assert seen == [(False, None, ['k', 'q']), (True, 2.0, ['k', 'q'])]


@pytest.mark.parametrize('answer', [(True,), (True, 'ignored'), [True, None], (True, None, 'more')], ids=str)
def test_only_the_first_item_accepts(answer):
    toy = Toy()
    toy.add('a', accepts=lambda self: answer)
    assert toy.ran() == 'a'


def test_a_verifier_is_asked_on_every_call_and_stops_at_the_winner():
    asked = []
    toy = Toy()
    for name in 'abc':
        toy.add(name, accepts=lambda self, q: (asked.append(self.backend_type) or self.backend_type == 'b', 'no'))
    assert toy.ran() == 'b'
    asked.clear()
    for n in (1, 2, 3):
        assert toy.ran() == 'b'
        assert asked == ['a', 'b'] * n


# -- arguments that a method lacks ------------------------------------------------------------------------------------------


def lacking(default):
    """Returns a function with a parameter `extra` and its default, and a backend whose method lacks the parameter."""
    op = Toy().op + '_lacking'
    registry = BackendRegistry(op)

    @dispatch(op)
    def g(q: torch.Tensor, extra=default):
        return 'default'

    class Lacks(BaseBackend):
        backend_type = 'lacks'

        def g(self, q, **kwargs):
            return 'lacks'

    registry.register(Lacks())
    return g


NAN = float('nan')


@pytest.mark.parametrize(
    ('default', 'value', 'ran'),
    [
        (None, None, 'lacks'),
        (None, False, 'default'),
        (None, 0, 'default'),
        (None, Q, 'default'),
        (False, False, 'lacks'),
        (False, True, 'default'),
        (False, 0, 'default'),
        (False, None, 'default'),
        (True, True, 'lacks'),
        (True, False, 'default'),
        (True, 1, 'default'),
        (1, 1, 'lacks'),
        (1, 2, 'default'),
        (1, True, 'default'),
        (1, torch.tensor(1), 'default'),
        (64, 64, 'lacks'),
        (1e-5, 1e-5, 'lacks'),
        (1e-5, 1e-6, 'default'),
        (1.0, torch.ones(3), 'default'),
        (NAN, NAN, 'lacks'),
        ('silu', 'silu', 'lacks'),
        ('silu', 'relu', 'default'),
        ('silu', None, 'default'),
        ((1, 2), (1, 2), 'lacks'),
        ((1, 2), (1, 3), 'default'),
        (torch.float32, torch.float32, 'lacks'),
        (torch.float32, torch.float16, 'default'),
    ],
    ids=str,
)
def test_a_missing_argument_must_hold_its_default(default, value, ran):
    g = lacking(default)
    assert g(Q) == 'lacks'
    assert g(Q, value) == ran
    assert g(Q, extra=value) == ran
    decision = explain(g, Q, extra=value)
    assert decision.winner == ran
    if ran == 'default':
        assert decision['lacks'].reason == 'argument extra is not supported'


def test_a_default_that_cannot_be_compared_refuses_everything_else():
    default = Q.clone()
    g = lacking(default)
    assert g(Q, default) == 'lacks'
    assert g(Q, default.clone()) == 'default'


def rest_of(method):
    op = Toy().op + '_rest'
    registry = BackendRegistry(op)

    @dispatch(op)
    def g(q: torch.Tensor, k: torch.Tensor, *rest, scale=None, **kwargs):
        return 'default'

    registry.register(type('A', (BaseBackend,), {'backend_type': 'a', 'g': method})())
    return g


@pytest.mark.parametrize(
    ('method', 'takes'),
    [
        (lambda self, q, k, *rest, scale=None, **kwargs: 'a', {'plain', 'scale', 'rest', 'kwargs'}),
        (lambda self, q, k, scale=None, **kwargs: 'a', {'plain', 'scale', 'kwargs'}),
        (lambda self, q, k, scale=None: 'a', {'plain', 'scale'}),
        (lambda self, q, k, **kwargs: 'a', {'plain', 'kwargs'}),
        (lambda self, q, **kwargs: 'a', set()),  # a required argument that only **kwargs accepts is not used
        (lambda self, *, k, q: 'a', {'plain'}),
        (lambda self, k, q: 'a', {'plain'}),
        (lambda self, q, k, unknown=None: 'a', {'plain'}),
    ],
)
def test_signatures(method, takes):
    g = rest_of(method)
    calls = {'plain': ((Q, Q), {}), 'scale': ((Q, Q), {'scale': 1.0}), 'rest': ((Q, Q, 3), {}), 'kwargs': ((Q, Q), {'x': 1})}
    for name, (args, kwargs) in calls.items():
        assert g(*args, **kwargs) == ('a' if name in takes else 'default'), name
        decision = explain(g, *args, **kwargs)
        assert decision.winner == ('a' if name in takes else 'default')
        if name not in takes:
            assert 'not supported' in decision['a'].reason


def test_arguments_are_matched_by_name():
    toy = Toy()
    toy.add('a', f=lambda self, k, q, flag=False, scale=None: q * 0 + 1)
    assert toy.ran() == 'a'
    assert toy.f(Q[:1], Q).shape == (1, 8)


def test_a_method_that_needs_what_the_function_lacks_is_unavailable():
    toy = Toy()
    toy.add('a', f=lambda self, q, k, needed: q)
    assert toy.ran() == 'default'
    report = explain(toy.f, Q, Q)['a']
    assert report.verdict == 'unavailable'
    assert "'needed'" in report.reason


# -- availability -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('package', 'version', 'usable', 'word'),
    [
        (None, None, True, ''),
        ('torch', None, True, ''),
        ('torch.nn', None, True, ''),
        ('no_such_package_anywhere', None, False, "'no_such_package_anywhere' is not installed"),
        ('no_such_package_anywhere.sub', None, False, 'is not installed'),
        ('torch', '>=1.0', True, ''),
        ('torch', 'torch>=1.0,!=1.5', True, ''),
        ('torch', '>=999', False, '>=999 is needed'),
        ('torch', 'torch<1', False, '<1 is needed'),
        ('xdist', 'pytest-xdist>=1', True, ''),
        ('xdist', '>=1', True, ''),
        ('xdist', '>=999', False, '>=999 is needed'),
        ('json', '>=1', False, 'no version metadata'),
    ],
)
def test_package(package, version, usable, word):
    toy = Toy()
    toy.add('a', package_name=package, package_version=version)
    assert toy.ran() == ('a' if usable else 'default')
    report = explain(toy.f, Q, Q)['a']
    assert report.verdict == ('chosen' if usable else 'unavailable')
    assert word in (report.reason or '')


@pytest.mark.parametrize(
    ('answer', 'usable', 'word'),
    [
        (True, True, ''),
        (False, False, 'is_available() returned False'),
        ((True, None), True, ''),
        ((False, 'no compiler'), False, 'no compiler'),
        ((False, ('needs %s', 'nvcc')), False, 'needs nvcc'),
        (None, False, 'is_available()'),
        (ImportError('no tvm'), False, 'is_available() raised ImportError: no tvm'),
        (ModuleNotFoundError('no tvm'), False, 'no tvm'),
        (ZeroDivisionError('bad'), False, 'ZeroDivisionError: bad'),
    ],
    ids=str,
)
def test_is_available(answer, usable, word):
    asked = []

    def is_available(cls):
        asked.append(cls)
        if isinstance(answer, Exception):
            raise answer
        return answer

    toy = Toy()
    toy.add('a', is_available=classmethod(is_available))
    for _ in range(3):
        assert toy.ran() == ('a' if usable else 'default')
        assert word in (explain(toy.f, Q, Q)['a'].reason or '')
    assert len(asked) == 1
    refresh()
    assert toy.ran() == ('a' if usable else 'default')
    assert len(asked) == 2


def test_refresh_probes_again():
    there = []
    toy = Toy()
    toy.add('a', is_available=classmethod(lambda cls: bool(there)))
    assert toy.ran() == 'default'
    there.append(1)
    assert toy.ran() == 'default'
    refresh()
    assert toy.ran() == 'a'


@pytest.mark.parametrize(
    ('answer', 'usable', 'word'),
    [
        (True, True, ''),
        (False, False, 'probe() returned False'),
        ((False, 'kernel fails'), False, 'kernel fails'),
        (OSError('libcuda'), False, 'probe() raised OSError: libcuda'),
    ],
    ids=str,
)
def test_probe(answer, usable, word):
    asked = []

    def probe(self, device):
        asked.append(device)
        if isinstance(answer, Exception):
            raise answer
        return answer

    toy = Toy()
    toy.add('a', probe=probe)
    for _ in range(3):
        assert toy.ran() == ('a' if usable else 'default')
        assert word in (explain(toy.f, Q, Q)['a'].reason or '')
    assert [device.platform for device in asked] == ['cpu']


@pytest.mark.parametrize('compiled', [False, True])
def test_what_is_off_is_not_probed(monkeypatch, compiled):
    """A disabled backend is not probed, since a probe may import a package and compile for minutes."""
    asked = []
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A', default_enable=False, probe=lambda self, device: not asked.append(device))
    f = torch.compile(toy.f, fullgraph=True, backend='eager') if compiled else toy.f

    def serves(name):
        return toy.names[int(f(Q, Q).max())] == name

    assert serves('default')
    assert explain(toy.f, Q, Q)['a'].verdict == 'disabled'
    with deny_backends('a'):
        monkeypatch.setenv('FLA_TOY_A', '1')
        assert serves('default')
        monkeypatch.delenv('FLA_TOY_A')
    assert not asked
    for value, name in (('1', 'a'), ('0', 'default'), ('true', 'a'), ('1', 'a')):
        monkeypatch.setenv('FLA_TOY_A', value)
        assert serves(name)
    monkeypatch.delenv('FLA_TOY_A')
    with use_backend('a'):
        assert serves('a')
    assert len(asked) == 1


# -- devices, as far as this machine can pretend ---------------------------------------------------------------------------


def pretend(monkeypatch, *devices, rocm=False):
    """Makes the dispatcher see these devices."""
    monkeypatch.setattr(fla.utils.devices, 'is_rocm_build', lambda: rocm)
    monkeypatch.setattr(
        default_dispatcher(), 'device_facts', lambda platform: tuple(d for d in devices if d.platform == platform)
    )


def fake(device, dtype=torch.float32):
    if torch.cuda.is_available() and (torch.device(device).index or 0) >= torch.cuda.device_count():
        pytest.skip('where there is a real GPU, a fake tensor needs a real device of that index')
    with FakeTensorMode():
        return torch.empty(2, 8, device=device, dtype=dtype)


def ran(toy, *args, **kwargs):
    """Like `toy.ran`, for tensors without data."""
    with trace() as recorded:
        toy.f(*args, **kwargs)
    return recorded.last_backend(f'{toy.op}.f')


A100 = Device('cuda', 0, 'A100', (8, 0))
H100 = Device('cuda', 1, 'H100', (9, 0))
MI300 = Device('rocm', 0, 'MI300X', (9, 4))


def test_cuda_never_includes_rocm(monkeypatch):
    toy = Toy()
    toy.add('nvidia', devices=('cuda',), min_capability=(9, 0))
    toy.add('amd', devices=('rocm',), min_capability=(99, 0))  # compared on cuda only
    toy.add('host', devices=('cpu',))
    pretend(monkeypatch, MI300, rocm=True)
    q = fake('cuda')
    assert ran(toy, q, q) == 'amd'
    decision = explain(toy.f, q, q)
    assert decision.platform == 'rocm'
    assert decision['nvidia'].verdict == 'unavailable'
    assert "'q' is on rocm" in decision['nvidia'].reason
    pretend(monkeypatch, Device('cuda', 0, 'H100', (9, 0)))
    default_dispatcher().reset()
    toy.add('nvidia', devices=('cuda',), min_capability=(9, 0))
    toy.add('amd', devices=('rocm',))
    pretend(monkeypatch, Device('cuda', 0, 'H100', (9, 0)))
    assert ran(toy, q, q) == 'nvidia'
    assert toy.ran() == 'default'


def test_min_capability_of_unlike_devices(monkeypatch):
    toy = Toy()
    toy.add('hopper', devices=('cuda',), min_capability=(9, 0))
    pretend(monkeypatch, A100, H100)
    zero, one = fake('cuda:0'), fake('cuda:1')
    for _ in range(2):
        assert ran(toy, one, one) == 'hopper'
        assert ran(toy, zero, zero) == 'default'
    decision = explain(toy.f, zero, zero)
    assert decision.winner == 'default'
    assert decision['hopper'].verdict == 'unavailable'
    assert decision['hopper'].reason.endswith('needs compute capability 9.0, A100 has 8.0')
    assert explain(toy.f, one, one).winner == 'hopper'
    with policy_context(Policy(require_first=True)):  # unavailable on this device, hence not first
        assert ran(toy, zero, zero) == 'default'
        assert explain(toy.f, zero, zero).winner == 'default'


@pytest.mark.parametrize(('needed', 'ran_on'), [((8, 0), 'a'), ((8, 1), 'default'), ((9, 0), 'default')])
def test_min_capability_of_like_devices(monkeypatch, needed, ran_on):
    toy = Toy()
    toy.add('a', min_capability=needed)
    pretend(monkeypatch, A100, Device('cuda', 1, 'A100', (8, 0)))
    assert ran(toy, fake('cuda:1'), fake('cuda:1')) == ran_on
    assert toy.ran() == 'a'  # compared on cuda only
    if ran_on == 'default':
        report = explain(toy.f, fake('cuda'), fake('cuda'))['a']
        assert report.verdict == 'unavailable'
        assert 'this device' not in report.reason


def test_a_probe_is_asked_once_for_each_kind_of_device_and_only_where_a_call_is(monkeypatch):
    asked = []

    def probe(self, device):
        asked.append((device.platform, device.index))
        return device.index != 2, ('probe failed on %s', device.name)

    toy = Toy()
    toy.add('a', probe=probe)
    pretend(monkeypatch, A100, Device('cuda', 1, 'A100', (8, 0)), Device('cuda', 2, 'H100', (9, 0)))
    assert toy.ran() == 'a'
    assert asked == [('cpu', 0)]
    for _ in range(2):
        assert [ran(toy, fake(f'cuda:{i}'), fake(f'cuda:{i}')) for i in range(3)] == ['a', 'a', 'default']
    assert asked == [('cpu', 0), ('cuda', 0), ('cuda', 2)]
    assert 'probe failed on H100' in explain(toy.f, fake('cuda:2'), fake('cuda:2'))['a'].reason


def test_a_cpu_call_never_touches_an_accelerator_driver(monkeypatch):
    def refuse(*_):
        raise AssertionError('the driver was asked')

    toy = Toy(check=lambda q, k: check_tensors(q=q, k=k))
    toy.add('gpu', devices=('cuda', 'rocm', 'xpu'), min_capability=(9, 0), probe=lambda self, device: refuse())
    toy.add('both', devices=('cuda', 'cpu'), dtypes=(torch.float32,), grad='none')
    with monkeypatch.context() as patched:
        for name in ('_cuda_getDeviceCount', '_cuda_init', '_cuda_getDevice'):
            patched.setattr(torch._C, name, refuse, raising=False)
        patched.setattr(torch.cuda, 'is_available', refuse)
        patched.setattr(torch.cuda, 'device_count', refuse)
        assert toy.ran() == 'both'
        decision = explain(toy.f, Q, Q)
        assert decision['gpu'].reason == "runs on cuda, rocm, xpu; 'q' is on cpu"
        assert 'gpu' in toy.f.backends


def test_devices_of_the_first_tensor(monkeypatch):
    pretend(monkeypatch, A100)
    toy = Toy()
    toy.add('gpu', devices=('cuda',))
    toy.add('host', devices=('cpu',))
    assert toy.ran() == 'host'
    q = fake('cuda')
    assert ran(toy, q, q) == 'gpu'
    assert toy.ran() == 'host'


def test_devices_for_each_parameter(monkeypatch):
    pretend(monkeypatch, A100)
    op = Toy().op + '_devices'
    registry = BackendRegistry(op)

    @dispatch(op)
    def g(q: torch.Tensor, lengths: torch.Tensor | None = None):
        return 'default'

    class Needs(BaseBackend):
        backend_type = 'needs'
        devices = {'q': ('cuda',), 'lengths': ('cpu',)}

        def g(self, q, lengths=None):
            return 'needs'

    registry.register(Needs())
    gpu = fake('cuda')
    assert (g(gpu), g(gpu, Q), g(gpu, gpu), g(Q), g(Q, Q)) == ('needs', 'needs', 'default', 'default', 'default')
    assert explain(g, gpu, gpu)['needs'].reason == "'lengths' must be on cpu, is on cuda"
    assert explain(g, Q)['needs'].reason == "runs on cuda; 'q' is on cpu"


def test_dtypes():
    toy = Toy()
    toy.add('half', dtypes=(torch.float16, torch.bfloat16))
    toy.add('k64', dtypes={'k': (torch.float64,), 'nobody': (torch.int8,)})
    q16, q64 = Q.half(), Q.double()
    assert toy.ran(q16, Q) == 'half'
    assert toy.ran(Q.bfloat16(), Q) == 'half'
    assert toy.ran(Q, q64) == 'k64'
    assert toy.ran(Q, Q) == 'default'
    decision = explain(toy.f, Q, Q)
    assert decision['half'].reason == "dtype of 'q' must be torch.float16, torch.bfloat16, got torch.float32"
    assert decision['k64'].reason == "dtype of 'k' must be torch.float64, got torch.float32"


def test_an_optional_tensor_that_is_absent_has_every_dtype():
    op = Toy().op + '_optional'

    @dispatch(op)
    def g(q: torch.Tensor, bias: torch.Tensor | None = None):
        return 'default'

    class Needs(BaseBackend):
        backend_type = 'needs'
        dtypes = {'bias': (torch.float32,)}
        grad = 'none'

        def g(self, q, bias=None):
            return 'needs'

    BackendRegistry(op).register(Needs())
    assert (g(Q), g(Q, Q), g(Q, Q.half())) == ('needs', 'needs', 'default')
    assert g(Q, Q.clone().requires_grad_()) == 'default'


# -- grad -------------------------------------------------------------------------------------------------------------------


def inference_only():
    toy = Toy()
    toy.add('fast', grad='none')
    return toy


def test_inference_only_in_reverse_mode():
    toy = inference_only()
    leaf = Q.clone().requires_grad_()
    assert toy.ran() == 'fast'
    assert toy.ran(leaf, Q) == 'default'
    assert toy.ran(Q, leaf) == 'default'
    assert toy.ran(Q, torch.nn.Parameter(Q)) == 'default'
    assert explain(toy.f, Q, leaf)['fast'].reason == 'inference only, and a tensor argument requires grad'
    with torch.no_grad():
        assert toy.ran(leaf, leaf) == 'fast'
        with torch.enable_grad():
            assert toy.ran(leaf, leaf) == 'default'
    with torch.inference_mode():
        assert toy.ran(leaf, leaf) == 'fast'
    with torch.set_grad_enabled(False):
        assert explain(toy.f, leaf, leaf).winner == 'fast'


def test_inference_only_in_forward_mode():
    toy = inference_only()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, torch.ones_like(Q))
        assert toy.ran(dual, Q) == 'default'
        assert 'forward-mode' in explain(toy.f, dual, Q)['fast'].reason
        with torch.no_grad():  # does not disable forward mode
            assert toy.ran(dual, Q) == 'default'
    assert toy.ran() == 'fast'


@pytest.mark.parametrize('transform', ['grad', 'vjp', 'jvp', 'jacrev', 'jacfwd', 'grad in no_grad'])
def test_inference_only_in_functorch(transform):
    toy = inference_only()
    record = []

    def function(q):
        record.append(explain(toy.f, q, Q).winner)
        with trace() as recorded:
            toy.f(q, Q)
        record.append(recorded.last_backend(toy.op))
        return (q * q).sum()

    if transform == 'vjp':
        torch.func.vjp(function, Q)
    elif transform == 'jvp':
        torch.func.jvp(function, (Q,), (Q,))
    elif transform == 'grad in no_grad':
        with torch.no_grad():
            torch.func.grad(function)(Q)
    else:
        getattr(torch.func, transform)(function)(Q)
    assert set(record) == {'default'}


def test_inference_only_looks_into_lists_of_tensors():
    op = Toy().op + '_lists'

    @dispatch(op)
    def g(q: torch.Tensor, states: list[torch.Tensor] | None = None, pair: torch.Tensor | tuple = ()):
        return 'default'

    class Fast(BaseBackend):
        backend_type = 'fast'
        grad = 'none'

        def g(self, q, states=None, pair=()):
            return 'fast'

    BackendRegistry(op).register(Fast())
    leaf = Q.clone().requires_grad_()
    assert (g(Q), g(Q, [Q, Q]), g(Q, None, (Q, Q))) == ('fast', 'fast', 'fast')
    assert (g(Q, [Q, leaf]), g(Q, [Q], leaf), g(Q, [Q], (Q, leaf))) == ('default', 'default', 'default')


# -- kinds of tensors -------------------------------------------------------------------------------------------------------


class Plain(torch.Tensor):
    pass


class Offered(torch.Tensor):
    seen: list

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, '__name__', '')
        if name == 'f':
            cls.seen.append((function, len(args), dict(kwargs or {})))
            if cls.takes:
                return 'taken'
        return super().__torch_function__(function, types, args, kwargs or {})


def test_plain_subclasses_go_on():
    toy = Toy()
    toy.add('a', accepts=lambda self, q: (q.shape[-1] == 8, 'K must be 8'))
    for q in (torch.nn.Parameter(Q), Q.as_subclass(Plain), torch.nn.Buffer(Q)):
        assert toy.ran(q, Q) == 'a'
        assert explain(toy.f, q, Q).winner == 'a'


@pytest.mark.parametrize('checked', [True, False])
@pytest.mark.parametrize('kind', ['tensor', 'parameter', 'subclass', 'fake', 'meta'])
def test_the_very_first_call_of_a_function(kind, checked):
    """No platform has been seen yet, and the plan depends on the platform."""
    make = {
        'tensor': lambda: Q,
        'parameter': lambda: torch.nn.Parameter(Q),
        'subclass': lambda: Q.as_subclass(Plain),
        'fake': lambda: fake('cpu'),
        'meta': lambda: META,
    }
    toy = Toy(check=(lambda q: None) if checked else None)
    toy.add('a', devices=('cpu',))
    toy.add('plain', kind='reference')
    q = make[kind]()
    assert ran(toy, q, q) == ('plain' if kind == 'meta' else 'a')
    assert toy.f(q, q) is not None


@pytest.mark.parametrize('takes', [True, False])
def test_an_override_is_offered_the_call(takes):
    Offered.seen, Offered.takes = [], takes
    toy = Toy()
    toy.add('a')
    q = Q.as_subclass(Offered)
    result = toy.f(q, Q, flag=True)
    assert len(Offered.seen) == 1
    assert Offered.seen[0][0] is toy.f
    if takes:
        assert result == 'taken'
    else:
        assert toy.name_of(result) == 'a'
    assert explain(toy.f, q, Q).winner is None
    assert '__torch_function__' in explain(toy.f, q, Q).error


def test_a_dtensor_is_refused_with_advice():
    class DTensor(torch.Tensor):
        __module__ = 'torch.distributed.tensor'

    checked = []
    toy = Toy(check=lambda q: checked.append(q))
    toy.add('a')
    q = Q.as_subclass(DTensor)
    for call in (toy.f, lambda *args: explain(toy.f, *args)):
        with pytest.raises(TypeError, match=r"argument 'q' is a DTensor.*q\.to_local\(\).*local_map"):
            call(q, Q)
    assert checked == []
    assert toy.ran() == 'a'


def test_a_real_dtensor_is_recognised():
    tensor = pytest.importorskip('torch.distributed.tensor')
    from fla.backends.core import tensors

    assert tensors.classify(tensor.DTensor) == tensors.REFUSED


def test_a_fake_tensor_counts_as_its_fake_device(monkeypatch):
    pretend(monkeypatch, A100)
    toy = Toy()
    toy.add('gpu', devices=('cuda',))
    toy.add('host', devices=('cpu',))
    assert ran(toy, fake('cuda'), fake('cuda')) == 'gpu'
    assert ran(toy, fake('cpu'), fake('cpu')) == 'host'
    assert explain(toy.f, fake('cuda'), fake('cuda')).platform == 'cuda'


META = torch.empty(2, 8, device='meta')


def test_meta_tensors_go_to_the_reference():
    toy = Toy()
    toy.add('a')
    toy.add('own', kind='native')
    toy.add('plain', kind='reference')
    assert toy.ran() == 'a'
    assert ran(toy, META, META) == 'plain'
    decision = explain(toy.f, META, META)
    assert (decision.winner, decision.candidates[0].name) == ('plain', 'plain')
    for name in ('a', 'own'):
        assert decision[name].reason == 'meta tensors have no data to run on'
    with use_backend('a'), pytest.raises(NoBackendError, match='meta tensors'):
        toy.f(META, META)
    assert toy.ran() == 'a'


def test_a_backend_may_say_it_takes_meta_tensors():
    toy = Toy(default_verifier=lambda: (False, 'never'))
    toy.add('a', devices=('cpu', 'meta'))
    assert ran(toy, META, META) == 'a'


def test_without_a_reference_only_declared_devices_keep_meta_tensors_away():
    toy = Toy()
    toy.add('anywhere')
    assert ran(toy, META, META) == 'anywhere'
    toy.handle.remove()
    toy.add('somewhere', devices=('cpu', 'cuda'))
    assert (ran(toy, META, META), toy.ran()) == ('default', 'somewhere')


def test_a_reference_on_an_accelerator_is_a_warning(monkeypatch, caplog):
    pretend(monkeypatch, A100)
    toy = Toy(default_verifier=lambda: (False, 'never'))
    toy.add('plain', kind='reference')
    assert toy.ran() == 'plain'
    assert said(caplog, logging.WARNING) == []
    for _ in range(2):
        assert ran(toy, fake('cuda'), fake('cuda')) == 'plain'
    assert len(said(caplog, logging.WARNING, 'reference', 'cuda')) == 1


def test_the_first_tensor_decides_the_platform(monkeypatch):
    pretend(monkeypatch, A100)
    op = Toy().op + '_first'

    @dispatch(op)
    def g(q: torch.Tensor | None = None, k: torch.Tensor | None = None, n: int = 0):
        return 'default'

    def backend(name, *devices):
        body = {'backend_type': name, 'devices': devices, 'g': lambda self, q=None, k=None, n=0: name}
        BackendRegistry(op).register(type(name, (BaseBackend,), body)())

    backend('gpu', 'cuda')
    backend('host', 'cpu')
    gpu = fake('cuda')
    assert (g(gpu, Q), g(Q, gpu), g(None, gpu), g(None, Q)) == ('gpu', 'host', 'gpu', 'host')
    assert (g(), g(n=3)) == ('default', 'default')
    assert explain(g)['gpu'].reason == 'the call has no tensor argument'
    for args in ((gpu, Q), (Q, gpu), (None, gpu), (None, Q), ()):
        assert explain(g, *args).winner == g(*args)


# -- check ------------------------------------------------------------------------------------------------------------------


def test_check_comes_before_every_candidate_and_under_explain():
    events = []

    def check(q, scale):
        events.append('check')
        if scale is not None and scale <= 0:
            raise ValueError(f'scale must be positive, got {scale}')

    toy = Toy(check=check)
    toy.add('a', accepts=lambda self, q: (events.append('a') or True, None))
    assert toy.ran() == 'a'
    assert events[-2:] == ['check', 'a']
    events.clear()
    explain(toy.f, Q, Q)
    assert events == ['check', 'a']
    events.clear()
    for call in (toy.f, lambda *args, **kwargs: explain(toy.f, *args, **kwargs), toy.f.resolve, toy.f.bind(backend='a')):
        with pytest.raises(ValueError, match='scale must be positive, got -1'):
            call(Q, Q, scale=-1)
    assert 'a' not in events
    with use_backend('default'), pytest.raises(ValueError, match='scale must be positive'):
        toy.f(Q, Q, scale=0)


def test_check_values_is_asked_for_by_name():
    seen = []
    toy = Toy(check=lambda check_values, q: seen.append(check_values))
    toy.add('a')
    assert toy.ran() == 'a'
    with policy_context(Policy(check_values=True)):
        assert toy.ran() == 'a'
        explain(toy.f, Q, Q)
    assert toy.ran() == 'a'
    assert seen == [False, True, True, False]


def test_check_may_name_only_what_there_is():
    with pytest.raises(TypeError, match=r"names 'qq', which f .* does not have"):
        Toy(check=lambda qq: None)
    with pytest.raises(TypeError, match="'other'"):
        Toy(check=lambda q, other=None: None)


@pytest.mark.parametrize(
    ('tensors', 'error', 'text'),
    [
        ({'q': Q, 'k': Q, 'v': None}, None, ''),
        ({}, None, ''),
        ({'q': Q, 'k': META}, ValueError, "argument 'k' is on meta and 'q' on cpu"),
        ({'q': None, 'k': META, 'v': Q}, ValueError, "argument 'v' is on cpu and 'k' on meta"),
        ({'q': Q, 'k': 3}, TypeError, "argument 'k' must be a tensor, got int"),
        ({'q': [Q]}, TypeError, "argument 'q' must be a tensor, got list"),
    ],
    ids=str,
)
def test_check_tensors(tensors, error, text):
    toy = Toy(check=lambda q, k: check_tensors(**tensors))
    toy.add('a')
    if error is None:
        assert toy.ran() == 'a'
    else:
        with pytest.raises(error, match=text):
            toy.f(Q, Q)
        with pytest.raises(error, match=text):
            explain(toy.f, Q, Q)


def test_check_tensors_tells_two_cuda_devices_apart(monkeypatch):
    pretend(monkeypatch, A100, H100)
    toy = Toy(check=lambda q, k: check_tensors(q=q, k=k))
    with pytest.raises(ValueError, match="'k' is on cuda:1 and 'q' on cuda:0"):
        toy.f(fake('cuda:0'), fake('cuda:1'))


# -- what a call does, and does not do --------------------------------------------------------------------------------------


def test_a_warm_call_runs_no_code_of_the_framework():
    """It runs only its generated code, the verifiers up to the winner, and the implementation, for any number of backends
    and operations. It takes no lock, sorts nothing and asks for no availability."""
    toy = Toy()
    toy.add('gone', package_name='no_such_package_anywhere', accepts=yes)
    toy.add('off', default_enable=False, accepts=yes)
    toy.add('elsewhere', devices=('cuda',), accepts=yes)
    toy.add('toggled', env_var='FLA_TOY_A', accepts=no)
    toy.add('a', dtypes=(torch.float32,), accepts=lambda self, q: (q.shape[-1] == 8, 'K'))
    toy.add('behind', accepts=yes)
    for _ in range(20):
        Toy().add('other')
    assert toy.ran() == 'a'
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == 'call' else None)
    try:
        toy.f(Q, Q)
    finally:
        sys.setprofile(None)
    names = [code.co_name for code in called if '/torch/' not in code.co_filename]
    assert names == ['f', 'no', '<lambda>', 'implementation']
    assert called[0].co_filename.startswith('<fla dispatch')


def test_an_error_of_the_implementation_is_not_held_against_it():
    """Another backend must not change the arguments a second time, and the next call is served as before."""
    ran = []

    def doubles(self, q, k, scale=None, flag=False):
        ran.append(self.backend_type)
        q.mul_(2)
        if flag:
            raise RuntimeError('out of memory')
        return q

    toy = Toy()
    toy.add('a', f=doubles)
    toy.add('b', f=doubles)
    for _ in range(6):
        q = torch.ones(2, 8)
        with pytest.raises(RuntimeError, match='out of memory'):
            toy.f(q, Q, flag=True)
        assert torch.equal(q, torch.full((2, 8), 2.0))
    assert ran == ['a'] * 6
    assert explain(toy.f, Q, Q).winner == 'a'
    assert torch.equal(toy.f(torch.ones(2, 8), Q), torch.full((2, 8), 2.0))


@pytest.mark.parametrize('compiled', [False, True])
def test_a_verifier_may_ask_for_deterministic_algorithms(compiled):
    toy = Toy()
    toy.add('atomics', accepts=lambda self: (not torch.are_deterministic_algorithms_enabled(), 'is not deterministic'))
    function = torch.compile(lambda q: toy.f(q, q), backend='eager', fullgraph=True) if compiled else lambda q: toy.f(q, q)
    try:
        for wanted in (False, True, False, True):
            torch.use_deterministic_algorithms(wanted)
            assert toy.name_of(function(Q)) == ('default' if wanted else 'atomics')
    finally:
        torch.use_deterministic_algorithms(False)
