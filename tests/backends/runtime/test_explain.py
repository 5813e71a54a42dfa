"""explain, describe, trace, resolve, bind, freeze and manifest."""

import copy
import inspect
import json
import os
import pickle
import threading

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    DispatchError,
    NoBackendError,
    Policy,
    UnknownNameError,
    call_op,
    default_dispatcher,
    deny_backends,
    describe,
    dispatch,
    explain,
    freeze_dispatch,
    get_policy,
    manifest,
    policy_context,
    prefer_backend,
    refresh,
    require_manifest,
    reset,
    reset_policy,
    resolve_op,
    runs_on_triton,
    set_log_level,
    set_policy,
    strict_mode,
    thaw_dispatch,
    trace,
    use_backend,
    validate,
)
from fla.backends.core.errors import FrozenError, ManifestMismatchError
from fla.backends.observe import counters, last_backend, snapshot
from fla.backends.runtime.freeze import is_frozen
from tests.backends.toy import Q, Toy


@pytest.fixture
def toy():
    """Backend a accepts only K = 8, b has the toggle FLA_TOY_B, gone is not installed."""
    made = Toy()
    made.add('a', accepts=lambda self, q: (q.shape[-1] == 8, ('K must be 8, got %s', q.shape[-1])))
    made.add('b', env_var='FLA_TOY_B', default_enable=False, kind='native')
    made.add('gone', package_name='no_such_package_anywhere', verified=False)
    made.add('plain', kind='reference')
    return made


# -- explain ----------------------------------------------------------------------------------------------------------------


def test_a_decision(toy):
    decision = explain(toy.f, Q[:, :4], Q, flag=True)
    assert (decision.function, decision.winner, decision.error) == (f'{toy.op}.f', 'default', None)
    assert (decision.order, decision.platform) == ('priority', 'cpu')
    assert decision.arguments == {'q': 'float32[2, 4] on cpu', 'k': 'float32[2, 8] on cpu', 'flag': 'True'}
    rows = [(c.name, c.verdict, c.reason, c.source, c.priority) for c in decision.candidates]
    assert rows == [
        ('a', 'rejected', 'K must be 8, got 4', 'verifier', 5),
        ('b', 'disabled', 'switched off by FLA_TOY_B', 'FLA_TOY_B', 5),
        ('gone', 'unavailable', "package 'no_such_package_anywhere' is not installed", 'availability', 5),
        ('default', 'chosen', None, 'priority', 100),
        ('plain', 'eligible', None, 'accepts every call', 1000),
    ]
    assert [c.impl_id for c in decision.candidates][:2] == ['vendor.a', 'native.b']
    assert [c.kind for c in decision.candidates] == ['vendor', 'native', 'vendor', 'default', 'reference']
    assert decision['gone'].notes == ('unverified: never run against its real package',)
    assert json.loads(json.dumps(decision.to_dict()))['candidates'][0]['reason'] == 'K must be 8, got 4'
    text = str(decision)
    assert text.startswith(f'{toy.op}.f on cpu: default (order: priority)')
    assert all(c.name in text and (c.reason or '') in text for c in decision.candidates)
    with pytest.raises(UnknownNameError, match=r"unknown candidate 'gonne'.*Did you mean 'gone'"):
        decision['gonne']
    assert toy.ran(Q[:, :4], Q) == 'default'


def test_every_candidate_is_explained_also_behind_the_winner(toy):
    decision = explain(toy.f, Q, Q)
    assert [c.verdict for c in decision.candidates] == ['chosen', 'disabled', 'unavailable', 'eligible', 'eligible']
    assert toy.f.explain(Q, Q) == decision


def test_explain_runs_no_implementation():
    toy = Toy()
    toy.add('a', f=lambda self, q, k, scale=None, flag=False: pytest.fail('ran'))
    assert explain(toy.f, Q, Q).winner == 'a'


@pytest.mark.parametrize('thing', [len, Toy, None, lambda q: q])
def test_explain_takes_dispatched_functions(thing):
    with pytest.raises(TypeError, match='is not a dispatched function'):
        explain(thing, Q)


@pytest.mark.parametrize(
    ('args', 'kwargs'), [((), {}), ((Q,), {}), ((Q, Q), {'wrong': 1}), ((Q,) * 5, {}), ((Q, Q), {'q': Q})]
)
def test_a_bad_call_is_the_same_type_error(toy, args, kwargs):
    for call in (toy.f, toy.f.explain, toy.f.resolve, toy.f.__wrapped__):
        with pytest.raises(TypeError):
            call(*args, **kwargs)


class Kernel(BaseBackend):
    """A backend that needs a Hopper GPU and a package that does not exist."""

    backend_type = 'kernel'
    package_name = 'no_such_package_anywhere'
    devices = ('cuda',)
    min_capability = (9, 0)
    dtypes = (torch.bfloat16,)

    def f(self, q, k, scale=None, flag=False):
        raise AssertionError('ran')

    def f_verifier(self, q):
        return q.is_cuda and q.shape[-1] == 8, 'K must be 8 on cuda'


@pytest.mark.parametrize(
    ('platform', 'winner', 'verdict', 'word'),
    [
        ('h100', 'kernel', 'chosen', ''),
        ('H200 ', 'kernel', 'chosen', ''),
        ('b200', 'kernel', 'chosen', ''),
        ('a100', 'default', 'unavailable', 'needs compute capability 9.0, NVIDIA A100 has 8.0'),
        ('mi300x', 'default', 'unavailable', "runs on cuda; 'q' is on rocm"),
        ('rocm', 'default', 'unavailable', "runs on cuda; 'q' is on rocm"),
        ('cpu', 'plain', 'unavailable', "runs on cuda; 'q' is on cpu"),
        ('xpu', 'default', 'unavailable', "runs on cuda; 'q' is on xpu"),
        ('npu', 'plain', 'unavailable', "runs on cuda; 'q' is on npu"),
        ('meta', 'plain', 'unavailable', 'meta'),
    ],
)
def test_explain_for_another_platform(platform, winner, verdict, word):
    toy = Toy(default_verifier=runs_on_triton)
    toy.registry.register(Kernel())
    toy.add('plain', kind='reference')
    q = Q.bfloat16()
    assert toy.ran(q, q) == 'plain'
    decision = explain(toy.f, q, q, platform=platform)
    assert decision.winner == winner
    assert decision['kernel'].verdict == verdict
    assert word in (decision['kernel'].reason or '')
    assert 'assumed to be installed' in decision['kernel'].notes
    if winner == 'kernel':
        assert explain(toy.f, q[:, :4], q, platform=platform).winner == 'default'
        assert explain(toy.f, Q, Q, platform=platform).winner == 'default'
    assert toy.ran(q, q) == 'plain'


def test_every_parameter_is_on_the_other_platform():
    toy = Toy()
    toy.add('amd', devices={'q': ('rocm',), 'k': ('rocm',)})
    toy.add('mixed', devices={'q': ('rocm',), 'k': ('cpu',)})
    decision = explain(toy.f, Q, Q, platform='mi300x')
    assert decision.winner == 'amd'
    assert decision['mixed'].reason == "'k' must be on cpu, is on rocm"
    assert toy.ran() == 'default'


def test_an_unknown_platform_is_an_error(toy):
    with pytest.raises(UnknownNameError, match=r"unknown platform 'h1000'.*Did you mean 'h100'"):
        explain(toy.f, Q, Q, platform='h1000')


# -- what there is ----------------------------------------------------------------------------------------------------------


def test_backends_view(toy, monkeypatch):
    view = toy.f.backends
    assert list(view) == ['a', 'b', 'gone', 'default', 'plain']
    assert dict(view) == {
        'a': 'available',
        'b': 'disabled: switched off by FLA_TOY_B',
        'gone': "unavailable: package 'no_such_package_anywhere' is not installed",
        'default': 'available',
        'plain': 'available',
    }
    assert len(view) == 5
    assert 'b' in view
    assert f'{toy.op}.f' in repr(view)
    monkeypatch.setenv('FLA_TOY_B', '1')
    assert view['b'] == 'available'
    toy.add('later')
    assert view['later'] == 'available'
    with pytest.raises(KeyError):
        view['nobody']


def test_describe(toy, monkeypatch):
    set_policy(Policy(deny='plain'))
    monkeypatch.setenv('FLA_PREFER', 'b')
    refresh()
    text = describe(toy.op)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith('  ')}
    assert list(lines) == ['a', 'b', 'gone', 'default', 'plain']
    assert 'disabled' in lines['b']
    assert 'FLA_TOY_B' in lines['b']
    assert 'unverified' in lines['gone']
    assert 'not installed' in lines['gone']
    assert all('.py:' in line for line in lines.values())
    assert 'set_policy()' in text
    assert 'FLA_PREFER' in text
    assert f'{toy.op}.f (' in text
    assert f'{toy.op}.f (' in describe()
    with pytest.raises(UnknownNameError, match='unknown operation'):
        describe('no_such_operation')
    assert toy.ran() == 'a'


def test_snapshot_is_an_immutable_picture(toy):
    picture = snapshot()
    assert set(picture[toy.op]) == {'a', 'b', 'gone', 'plain'}
    entry = picture[toy.op]['gone']
    assert (entry['impl_id'], entry['priority'], entry['by'], entry['verified']) == ('vendor.gone', 5, 'user', False)
    assert '.py:' in entry['origin']
    with pytest.raises(TypeError):
        picture[toy.op] = {}
    with pytest.raises(TypeError):
        picture[toy.op]['gone']['priority'] = 1
    toy.add('later')
    assert 'later' not in picture[toy.op]
    assert 'later' in snapshot()[toy.op]


def test_validate_reports_what_needs_no_call(toy):
    def problems():
        return [text for text in validate() if toy.op in text]

    assert problems() == []
    toy.add('lonely', f=None, g_verifier=lambda self, q: (True, None))
    toy.add('drifting', f=lambda self, q, k, scale=1.0, flag=False, extra=None: q)
    toy.registry.register('no_such_package_anywhere.module:Backend')
    found = '\n'.join(problems())
    assert 'lonely: g_verifier has no method g beside it' in found
    assert 'lonely: no such function is known (yet): g' in found
    assert "drifting.f: parameter 'extra' is unknown" in found
    assert "default of 'scale' is 1.0, in the public function None" in found
    assert 'no_such_package_anywhere.module:Backend' in found
    assert toy.ran() == 'a'


def test_listeners_hear_of_every_change_until_they_end(toy):
    here, everywhere = [], []
    end_here = toy.registry.add_listener(lambda event, registry, entry: here.append((event, entry.name)))
    end_everywhere = default_dispatcher().add_listener(lambda event, r, entry: everywhere.append((r.operation, entry.name)))
    other = Toy()
    other.add('x')
    toy.add('first', priority=1)
    assert toy.ran() == 'first'
    toy.handle.remove()
    assert toy.ran() == 'a'
    assert here == [('registered', 'first'), ('removed', 'first')]
    assert everywhere == [(other.op, 'x'), (toy.op, 'first'), (toy.op, 'first')]
    end_here()
    end_everywhere()
    toy.add('second')
    assert (len(here), len(everywhere)) == (2, 3)


def test_a_failing_listener_harms_nobody(toy, caplog):
    default_dispatcher().add_listener(lambda *_: 1 / 0)
    heard = []
    default_dispatcher().add_listener(lambda event, registry, entry: heard.append(entry.name))
    toy.add('first', priority=1)
    assert toy.ran() == 'first'
    assert heard == ['first']
    assert any('listener' in r.getMessage() and r.exc_info for r in caplog.records)


# -- trace ------------------------------------------------------------------------------------------------------------------


def test_trace(toy, tmp_path, monkeypatch):
    monkeypatch.setenv('FLA_TOY_B', '1')
    assert toy.ran() == 'a'
    with trace() as t:
        assert toy.ran(Q, Q, 0.5, flag=True) == 'a'
        assert toy.ran(Q[:, :4], Q) == 'b'
        assert last_backend(f'{toy.op}.f') == last_backend(toy.op) == 'b'
        assert counters() == {(f'{toy.op}.f', 'a'): 1, (f'{toy.op}.f', 'b'): 1}
        with trace() as inner:
            assert toy.ran() == 'a'
        with pytest.raises(LookupError, match='no call of'):
            last_backend('no_such')
    assert toy.ran() == 'a'
    assert [record.backend for record in t] == ['a', 'b', 'a']
    assert (len(t), len(inner)) == (3, 1)
    first = next(iter(t))
    assert first.tensors == {'q': ('float32', (2, 8), 'cpu'), 'k': ('float32', (2, 8), 'cpu')}
    assert (first.flags, first.compiled) == ({'scale': 0.5, 'flag': True}, False)
    assert t.last_backend(toy.op) == 'a'
    file = tmp_path / 'trace.json'
    loaded = json.loads(t.to_json(file))
    assert json.loads(file.read_text()) == loaded
    assert loaded['records'][1]['backend'] == 'b'
    assert {(c['backend'], c['calls']) for c in loaded['counters']} == {('a', 2), ('b', 1)}
    assert toy.op in t.summary()


def test_without_a_trace_counters_raise_and_nothing_is_generated(toy):
    assert toy.ran() == 'a'
    before = toy.f.__code__
    assert not any('record' in name for name in before.co_names)
    for question in (counters, lambda: last_backend(toy.op)):
        with pytest.raises(DispatchError, match=r'with trace\(\).*FLA_DISPATCH_TRACE'):
            question()
    with trace():
        toy.ran()
        assert any('record' in name for name in toy.f.__code__.co_names)
    assert toy.f.__code__ is before
    with pytest.raises(DispatchError):
        counters()


def test_a_trace_keeps_the_newest_and_counts_all(toy):
    with trace(limit=2) as t:
        for k in (8, 4, 4):
            toy.f(Q[:, :k], Q[:, :k])
    assert [r.backend for r in t] == ['default', 'default']
    assert t.counters == {(f'{toy.op}.f', 'a'): 1, (f'{toy.op}.f', 'default'): 2}
    with pytest.raises(ValueError, match='limit'):
        trace(limit=0)


def test_a_compiled_region_is_recorded_once(toy):
    compiled = torch.compile(lambda q: toy.f(q, q), backend='eager', fullgraph=True)
    with trace() as t:
        for _ in range(3):
            assert toy.name_of(compiled(Q)) == 'a'
    assert [(r.backend, r.compiled) for r in t] == [('a', True)]


def test_profiler_ranges(toy):
    assert toy.ran() == 'a'
    with torch.profiler.profile() as profile:
        assert toy.ran() == 'a'
        assert toy.ran(Q[:, :4], Q) == 'default'
        with use_backend('plain'):
            assert toy.ran() == 'plain'
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith('fla::')}
    assert counts == {'fla::f[a]': 1, 'fla::f[default]': 1, 'fla::f[plain]': 1}
    assert toy.ran() == 'a'


@pytest.mark.parametrize('known', [False, True], ids=['first call', 'first call on that device'])
def test_a_profiler_meets_a_new_platform(toy, known):
    """Code with profiler ranges stands in for a plan, and requests another plan under its name: no code would answer its own
    request."""
    if known:
        toy.ran()
    meta = torch.empty(2, 16, device='meta')
    with torch.profiler.profile() as profile:
        for q in (meta, Q) if known else (Q, meta):
            toy.f(q, q)
            toy.f(q, q)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith('fla::')}
    assert counts == {'fla::f[a]': 2, 'fla::f[plain]': 2}  # the second serves tensors without data


# -- resolve, bind, by name -------------------------------------------------------------------------------------------------


def test_resolve_is_the_callable_this_call_would_run(toy, monkeypatch):
    asked = []
    toy.add('first', priority=1, accepts=lambda self, flag: (asked.append(flag) or flag, 'needs flag'))
    chosen = toy.f.resolve(Q, Q, flag=True)
    count = len(asked)
    with deny_backends('first'):
        for _ in range(3):
            assert toy.name_of(chosen(Q, Q, flag=False)) == 'first'
    assert len(asked) == count
    assert toy.name_of(toy.f.resolve(Q, Q)(Q, Q)) == 'a'
    assert toy.name_of(toy.f.resolve(Q[:, :4], Q)(Q, Q)) == 'default'
    assert toy.f.resolve(Q[:, :4], Q) is toy.f.__wrapped__  # equal signatures: there is no wrapper
    with use_backend('gone', op=toy.op), pytest.raises(NoBackendError, match='not installed'):
        toy.f.resolve(Q, Q)


def test_resolve_speaks_the_public_signature():
    toy = Toy()
    toy.add('other', f=lambda self, k, q, **rest: q * 0 + 1)
    chosen = toy.f.resolve(Q, Q)
    assert list(inspect.signature(chosen).parameters) == ['q', 'k', 'scale', 'flag']
    assert toy.name_of(chosen(Q, Q)) == 'other'
    assert chosen(Q[:1], Q).shape == (1, 8)
    assert toy.name_of(chosen(k=Q, q=Q, scale=None)) == 'other'


def test_a_bound_function_is_a_function_like_the_first(toy):
    bound = toy.f.bind(backend='plain')
    assert toy.name_of(bound(Q, Q)) == 'plain'
    assert inspect.signature(bound) == inspect.signature(toy.f)
    assert (bound.__name__, bound.__doc__) == ('f', 'The toy function.')
    assert bound.explain(Q, Q).order == 'bind()'
    assert toy.name_of(bound.resolve(Q, Q)(Q, Q)) == 'plain'
    assert toy.name_of(bound.bind(backend='a')(Q, Q)) == 'a'
    with pytest.raises(NoBackendError, match='K must be 8, got 4'):
        toy.f.bind(backend='a')(Q[:, :4], Q)
    assert toy.ran() == 'a'


def test_by_name(toy):
    assert toy.name_of(call_op(f'{toy.op}.f', Q, Q)) == 'a'
    assert toy.name_of(call_op(f'{toy.op}.f', Q[:, :4], k=Q)) == 'default'
    assert resolve_op(f'{toy.op}.f') is toy.f
    assert toy.name_of(resolve_op(f'{toy.op}.f', Q, Q)(Q, Q)) == 'a'
    for act in (call_op, resolve_op):
        for name, text in [
            (f'{toy.op}.ff', "unknown function 'ff'.*Did you mean 'f'"),
            ('no_such.f', "unknown operation 'no_such'"),
            ('f', 'unknown operation'),
            ('', 'unknown operation'),
        ]:
            with pytest.raises(UnknownNameError, match=text):
                act(name, Q, Q)


@dispatch('explain_module_level')
def module_level(q: torch.Tensor, flag: bool = False) -> str:
    """Documented."""
    return 'default'


def test_a_dispatched_function_is_a_function():
    BackendRegistry('explain_module_level')
    assert module_level(Q) == 'default'
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level) is module_level
    assert str(inspect.signature(module_level)) == '(q: torch.Tensor, flag: bool = False) -> str'
    assert (module_level.__name__, module_level.__doc__, module_level.__module__) == (
        'module_level',
        'Documented.',
        __name__,
    )
    assert module_level.__defaults__ == (False,)


# -- freeze -----------------------------------------------------------------------------------------------------------------


def test_frozen_plans_read_no_environment(toy, monkeypatch):
    assert not is_frozen()
    freeze_dispatch()
    assert is_frozen()
    monkeypatch.setenv('FLA_TOY_B', '1')
    assert toy.ran(Q[:, :4], Q) == 'default'
    assert '_d_env' not in toy.f.__code__.co_names
    assert explain(toy.f, Q[:, :4], Q).winner == 'default'
    thaw_dispatch()
    assert not is_frozen()
    assert toy.ran(Q[:, :4], Q) == 'b'
    thaw_dispatch()


def test_what_was_frozen_holds_on_a_platform_seen_later(monkeypatch):
    def is_enabled(cls):
        return os.environ.get('FLA_TOY_EXTRA', '1') == '1'

    toy = Toy()
    toy.add('a', is_enabled=classmethod(is_enabled), devices=('cpu', 'meta'))
    toy.add('b', env_var='FLA_TOY_B', devices=('cpu', 'meta'))
    monkeypatch.setenv('FLA_TOY_EXTRA', '0')
    freeze_dispatch()
    monkeypatch.setenv('FLA_TOY_EXTRA', '1')
    monkeypatch.setenv('FLA_TOY_B', '0')
    meta = torch.empty(2, 8, device='meta')
    with trace() as t:
        toy.f(meta, meta)
        assert toy.ran() == 'b'
    assert [r.backend for r in t] == ['b', 'b']


def test_what_was_frozen_outlives_the_scope_it_was_frozen_in(toy):
    with use_backend('plain'):
        freeze_dispatch()
        assert toy.ran() == 'plain'
    assert toy.ran() == 'plain'
    thaw_dispatch()
    assert toy.ran() == 'a'


CHANGES = {
    'register': lambda toy: toy.add('later'),
    'register by path': lambda toy: toy.registry.register('some.module:Backend'),
    'remove': lambda toy: toy.handle.remove(),
    'unregister': lambda toy: toy.registry.unregister('a'),
    'set_policy': lambda toy: set_policy(Policy(prefer='b')),
    'reset_policy': lambda toy: reset_policy(),
    'refresh': lambda toy: refresh(),
    'use_backend': lambda toy: use_backend('b').__enter__(),
    'prefer_backend': lambda toy: prefer_backend('b').__enter__(),
    'deny_backends': lambda toy: deny_backends('a').__enter__(),
    'strict_mode': lambda toy: strict_mode().__enter__(),
}


@pytest.mark.parametrize('change', CHANGES)
def test_changes_raise_while_frozen(toy, change):
    freeze_dispatch()
    with pytest.raises(FrozenError, match=r'while dispatch is frozen; call thaw_dispatch\(\) first'):
        CHANGES[change](toy)
    assert toy.ran() == 'a'
    assert len(toy.registry) == 4
    assert get_policy() is None
    thaw_dispatch()
    assert toy.ran() == 'a'


def test_what_chooses_nothing_is_allowed_while_frozen(toy):
    freeze_dispatch()
    set_log_level('WARNING')
    with trace() as t:
        assert toy.ran() == 'a'
    assert t.last_backend(toy.op) == 'a'
    assert toy.name_of(toy.f.bind(backend='plain')(Q, Q)) == 'plain'
    assert toy.f.backends['a'] == 'available'


def test_the_manifest_says_what_is_chosen(toy, tmp_path, monkeypatch):
    toy.ran()
    found = freeze_dispatch()
    rows = {row['backend']: row['out'] for row in found['selections'][f'{toy.op}.f']['cpu']}
    assert list(rows) == ['a', 'b', 'gone', 'default', 'plain']
    assert rows['a'] is None
    assert rows['b'] == 'disabled: switched off by FLA_TOY_B'
    assert rows['gone'].startswith('unavailable: ')
    assert found['versions']['torch'] == torch.__version__
    assert found.sha256 == manifest().sha256
    path = tmp_path / 'manifest.json'
    found.save(path)
    assert require_manifest(path) == found
    assert require_manifest(dict(found)) == found
    assert toy.ran() == 'a'


@pytest.mark.parametrize('change', ['toggle', 'policy', 'registration', 'priority'])
def test_another_choice_is_another_manifest(toy, monkeypatch, change):
    before = manifest()
    act = {
        'toggle': lambda: monkeypatch.setenv('FLA_TOY_B', '1'),
        'policy': lambda: set_policy(Policy(prefer='b')),
        'registration': lambda: toy.add('later'),
        'priority': lambda: monkeypatch.setattr(type(toy.registry.get('b')), 'priority', 1),
    }[change]
    act()
    assert manifest().sha256 != before.sha256
    with pytest.raises(ManifestMismatchError, match='differs from the manifest') as info:
        require_manifest(before)
    assert {'policy': 'policy', 'toggle': 'FLA_TOY_B'}.get(change, f'selections.{toy.op}.f') in str(info.value)


def test_a_manifest_fits_the_process_that_wrote_it_whatever_platforms_it_saw(toy):
    other = Toy()
    other.add('x', devices=('cpu',))
    other.add('plain', kind='reference')
    meta = torch.empty(2, 8, device='meta')
    toy.f(meta, meta)
    assert toy.ran() == 'a'
    assert other.ran() == 'x'
    found = freeze_dispatch()
    assert set(found['selections'][f'{toy.op}.f']) == {'cpu', 'meta'}
    assert require_manifest(found) == found


@pytest.mark.parametrize('edited', [True, False])
def test_what_is_no_manifest_is_refused(toy, tmp_path, edited):
    if edited:
        wrong = {**manifest(), 'namespace': 'other'}
        with pytest.raises(ManifestMismatchError, match='edited'):
            require_manifest(wrong)
    else:
        path = tmp_path / 'x.json'
        path.write_text('{"selections": {}}')
        for wrong in (path, {}, {'sha256': ''}):
            with pytest.raises(ValueError, match='must be a manifest'):
                require_manifest(wrong)


# -- reset ------------------------------------------------------------------------------------------------------------------


def test_reset_is_a_fresh_process(toy, monkeypatch):
    set_policy(Policy(prefer='b'))
    prefer_backend('plain').__enter__()
    running = trace()
    running.__enter__()
    default_dispatcher().device_facts = lambda platform: ()
    heard = []
    default_dispatcher().add_listener(lambda *_: heard.append(1))
    assert toy.ran() == 'plain'
    freeze_dispatch()
    reset()
    assert not is_frozen()
    assert get_policy() is None
    assert default_dispatcher().policies.state.layers == ()
    assert toy.ran() == 'default'
    assert list(toy.f.backends) == ['default']
    with pytest.raises(DispatchError):
        counters()
    assert [record.backend for record in running] == ['plain']
    toy.add('a')
    assert heard == []
    assert toy.ran() == 'a'


def test_frozen_attributes_that_plans_read_cannot_be_set():
    toy = Toy()
    toy.add('a')
    late = toy.add('b')
    freeze_dispatch()
    with pytest.raises(FrozenError, match='priority'):
        late.priority = 1
    with pytest.raises(FrozenError, match='f_verifier'):
        type(late).f_verifier = lambda self, q: (True, None)
    assert (late.priority, hasattr(late, 'f_verifier'), toy.ran()) == (5, False, 'a')
    late.workspace = 'its own business'
    thaw_dispatch()
    late.priority = 1
    assert toy.ran() == 'b'


def test_a_manifest_names_no_place_with_a_space(tmp_path):
    toy = Toy()
    toy.add('a')
    found = []
    for folder in ('one place', 'another'):
        file = tmp_path / folder / 'scopes.py'
        file.parent.mkdir()
        text = "with policy_context(Policy(deny='a', prefer='default')):\n    found.append(manifest())\n"
        file.write_text(text)
        exec(compile(text, str(file), 'exec'), {**globals(), 'found': found})
    assert found[0] == found[1]
    assert 'place' not in str(found[0]['policy'])


@pytest.mark.parametrize('platform', ['npu', 'xpu', 'cuda', 'rocm', 'cpu'])
def test_conditions_on_the_device_hold_for_the_one_that_is_asked_about(platform):
    toy = Toy()
    toy.add('a')
    kind = 'cuda' if platform == 'rocm' else platform
    other = 'cuda' if kind == 'npu' else 'npu'
    for when, winner in ((f"q.device.type == '{kind}'", 'default'), (f"q.device.type == '{other}'", 'a')):
        with policy_context(Policy(rules=[{'ops': toy.op, 'use': 'default', 'when': when}])):
            assert explain(toy.f, Q, Q, platform=platform).winner == winner


def test_a_trace_is_asked_while_calls_go_on():
    toy = Toy()
    stop = threading.Event()

    def call():
        while not stop.is_set():
            toy.ran()

    with trace(limit=1000) as t:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(50):
                with pytest.raises(LookupError, match='no call of'):
                    t.last_backend('no_such')
                t.to_json()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert t.last_backend(toy.op) == 'default'
