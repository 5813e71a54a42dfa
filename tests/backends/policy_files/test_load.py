"""The policy file through the public API: every key, every error with its line, the policy in force afterwards."""

import json
import logging
import os
import pickle
import sys
import textwrap

import pytest
import torch

from fla.backends import (
    DispatchError,
    NoBackendError,
    Policy,
    Rule,
    UnknownNameError,
    breaker,
    default_dispatcher,
    explain,
    freeze_dispatch,
    get_policy,
    load_policy,
    manifest,
    policy_context,
    prefer_backend,
    refresh,
    reset,
    set_policy,
    thaw_dispatch,
    use_backend,
    watch_policy,
)
from fla.backends.core.errors import BackendBugError, FrozenError
from fla.backends.policy.precedence import Layer, refuse_if_locked
from fla.backends.policy_files import PolicyFileError, read_policy, unload_policy
from tests.backends.toy import Toy
from tests.tables import table

pytest.importorskip('ruamel.yaml')
pytest.importorskip('pydantic')

SHORT, LONG = torch.zeros(2, 8), torch.zeros(2, 64)


@pytest.fixture
def toy():
    made = Toy()
    made.add('a', priority=1)
    made.add('b', priority=2)
    made.add('c', priority=3)
    return made


@pytest.fixture
def write(tmp_path, toy):
    def write(text, name='policy.yaml'):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).replace('TOY', toy.op), encoding='utf-8')
        return path

    return write


@pytest.mark.parametrize(
    ('text', 'ran'),
    [
        ('{}', 'a'),
        ('# nothing\n{}', 'a'),
        ('prefer: b', 'b'),
        ('prefer: [c, b]', 'c'),
        ('allow: [b, default]', 'b'),
        ('deny: a', 'b'),
        ('deny: [vendor]', 'default'),
        ('order: {TOY: [c, a]}', 'c'),
        ('order: {TOY.f: [b], TOY: [c]}', 'b'),
        ('lock: {TOY: c}', 'c'),
        ('boost: {TOY: {b: -5}}', 'b'),
        ('boost: {"TOY*": {a: 1.5}}', 'b'),
        ('rules: [{ops: TOY, use: c}]', 'c'),
        ('rules: [{ops: "TOY.*", when: "q.shape[1] >= 8", use: [b]}]', 'b'),
        ('rules: [{ops: "*", when: "q.shape[1] > 8", use: [b]}]', 'a'),
        ('rules: [{ops: TOY, use: b}, {ops: TOY, use: c, priority: -1}]', 'c'),
        ('prefer: c\nrules: [{ops: TOY, when: flag, use: b}]', 'c'),
    ],
)
def test_keys_that_order_and_filter(write, toy, text, ran):
    version = load_policy(write(text))
    assert toy.ran() == ran == explain(toy.f, SHORT, SHORT).winner
    assert version.version == 1
    assert len(version.sha256) == 64
    unload_policy()
    assert toy.ran() == 'a'


def test_strict(write, toy):
    toy.add('broken', priority=0, accepts=lambda self: 1 / 0)
    assert toy.ran() == 'a'
    load_policy(write('strict: true'))
    with pytest.raises(BackendBugError, match='broken'):
        toy.ran()


def test_require_first(write, toy):
    toy.add('picky', priority=0, accepts=lambda self, flag: (flag, 'no flag'))
    assert toy.ran() == 'a'
    load_policy(write('require_first: true'))
    assert toy.ran(SHORT, SHORT, flag=True) == 'picky'
    with pytest.raises(NoBackendError, match='require_first'):
        toy.ran()


def test_check_values(write):
    seen = []
    toy = Toy(check=lambda q, check_values: seen.append(check_values))
    for text in ('prefer: default', 'check_values: true', 'check_values: false'):
        load_policy(write(text))
        assert toy.ran() == 'default'
    assert seen == [False, True, False]


def test_on_error_and_breaker_of_the_file_apply(write):
    toy = Toy()
    backend = toy.add('z', priority=0, retryable=(RuntimeError,))

    def fails(*args, **kwargs):
        raise RuntimeError('once more')

    backend.f = fails
    with pytest.raises(RuntimeError, match='once more'):
        toy.ran()
    load_policy(write('on_error: fallback\nbreaker: {threshold: 2, cooldown: 100}'))
    assert [toy.ran(), toy.ran()] == ['default'] * 2
    assert breaker(toy.f, 'z').state == 'open'


def test_json_is_read(write, toy):
    text = json.dumps({'rules': [{'ops': [f'{toy.op}.f'], 'when': 'flag', 'use': ['b']}], 'deny': ['a']}, indent=1)
    load_policy(write(text, 'policy.json'))
    assert toy.ran() == 'b'
    assert toy.ran(SHORT, SHORT, flag=True) == 'b'


@pytest.mark.parametrize('indent', [None, 1, '\t'])
def test_everything_that_json_dumps_writes_is_read(write, indent):
    """Covers tabs, exponents without a point, surrogate pairs and control characters."""
    toy = Toy()
    name = 'b\U0001f600\u2028\x7f"\\e1'
    toy.add('a', priority=0)
    content = {
        'breaker': {'cooldown': 1e-05, 'probe_timeout': 2e20},
        'boost': {toy.op: {'a': -1e22, 'default': 1.5e-7}},
        'rules': [{'ops': toy.op, 'when': f'scale == {name!r}', 'use': 'default'}],
    }
    policy = load_policy(write(json.dumps(content, indent=indent), 'policy.json')).policy
    assert policy.breaker.to_dict() == {'threshold': 5, **content['breaker']}
    assert policy.to_dict()['boost'] == content['boost']
    assert toy.ran() == 'a'
    assert toy.ran(SHORT, SHORT, name) == 'default'


def test_errors_in_json_name_their_lines(write):
    path = write('{\n\t"perfer": 1e5,\n\t"prefer": ["qqq"]\n}', 'policy.json')
    with pytest.raises(PolicyFileError) as caught:
        read_policy(path)
    first, second = caught.value.errors
    assert first.startswith(f"{path}:2: unknown key 'perfer'")
    assert second.startswith(f"{path}:3: unknown backend 'qqq'")


@pytest.mark.parametrize('path', [b'policy.yaml', 3, None, Policy(prefer='a')])
def test_a_path_of_another_type_is_refused(path):
    for door in (load_policy, read_policy):
        with pytest.raises(TypeError, match='named by a path.*' + ('set_policy' if isinstance(path, Policy) else '')):
            door(path)


@table(
    ('text', 'line', 'words'),
    [
        ('perfer: a', 1, "unknown key 'perfer'. Did you mean 'prefer'?"),
        ('rules:\n- ops: TOY\n  use: a\n  wen: flag', 4, "unknown key 'wen' in rules.0. Did you mean 'when'?"),
        ('breaker:\n  treshold: 3', 2, "Did you mean 'threshold'?"),
        ('on_error: fallbak', 1, "Did you mean 'fallback'?"),
        ('\n\nprefer: qqq', 3, "unknown backend 'qqq'"),
        ('order:\n  TOY: [bb]', 2, "unknown backend 'bb' of operation"),
        ('order:\n  TOY.ff: [b]', 2, "unknown function 'ff'"),
        ('lock:\n  nosuchop: [b]', 2, "unknown operation 'nosuchop'"),
        ('boost:\n  nosuch*: {a: 1}', 2, 'matches no operation and no function'),
        ('boost:\n  TOY: {zz: 1}', 2, "unknown backend 'zz'"),
        ('boost: {TOY: {a: .inf}}', 1, 'boost'),
        ('boost: {TOY: {a: b}}', 1, 'boost'),
        ('boost: {TOY: {triton: 1, default: 2}}', 1, 'twice'),
        ('rules:\n- ops: TOY\n  when: flga\n  use: a', 3, "no parameter 'flga'. Did you mean 'flag'?"),
        ('rules:\n- ops: TOY\n  when: q > 1\n  use: a', 3, "'q' is a tensor"),
        ('rules:\n- ops: TOY\n  when: len(q) > 1\n  use: a', 3, 'not allowed'),
        ('rules:\n- ops: TOY', 2, 'rules.0.use is missing'),
        ('rules: {ops: TOY}', 1, 'rules'),
        ('strict: "yes"', 1, 'strict'),
        ('breaker: {threshold: 0}', 1, 'threshold'),
        ('breaker: {probe_timeout: 0}', 1, 'probe_timeout'),
        ('prefer: []', 1, 'prefer'),
        ('prefer: [""]', 1, 'prefer'),
        ('deny: a\ndeny: b', 2, 'duplicate'),
        ('breaker: {cooldown: 190:20:30}', 1, "got '190:20:30'"),
        ('order: {TOY: a}\nlock:\n  TOY: b', 3, 'order has'),
        ('prefer: &x [a]\ndeny: *x', 2, 'aliases'),
        ('prefer: a\ndeny: &x [b]', 2, 'anchors and aliases'),
        ('prefer: [a', 1, 'not YAML'),
        ('- a', 1, 'the file'),
        ('prefer: !!python/object:os.system a', 1, 'cannot be read'),
        ('? [a]\n: b', 1, 'a key must be a word'),
        ('---\nprefer: a\n---\nprefer: b', 3, 'not YAML'),
        ('rules:\n- ops: TOY\n  use: a\n  when: yes', 4, "no parameter 'yes'"),
        ('rules:\n- ops: TOY\n  use: a\n  when: ""', 4, 'rules.0.when'),
        ('rules:\n- ops: TOY\n  use: a\n  when: [flag]', 4, 'rules.0.when'),
        ('', 1, 'is empty'),
        ('# prefer: a', 1, 'is empty'),
        ('null', 1, 'is empty'),
        ('3', 1, 'the file is not a mapping of keys'),
        ('deny: a\nallow:', 2, 'allow has no value'),
        ('prefer: []', 1, 'prefer is empty'),
        ('rules:\n- null', 2, 'rules.0 has no value'),
        ('rules:\n- 3', 2, 'rules.0 must be a mapping of keys'),
        ('breaker: [1, 2]', 1, 'breaker must be a mapping of keys'),
        ('order: [a]', 1, 'order must be a mapping'),
        ('order:\n  TOY: 3', 2, 'order.TOY must be a list'),
        ('on_error: off', 1, "'raise' or 'fallback', got 'off'"),
        ('deny: [no]', 1, "unknown backend 'no'"),
        ('strict: yes', 1, 'true and false only'),
        ('rules:\n- ops: TOY\n  use: a\n  priority: 1e3e', 4, 'priority'),
        ('rules:\n- ops: TOY\n  use: a\n  priority: ' + '9' * 400, 4, 'priority'),
        ('boost: {TOY: {a: ' + '9' * 400 + '}}', 1, 'boost'),
        ('breaker: {cooldown: ' + '9' * 400 + '}', 1, 'cooldown'),
        ('prefer: !!python/object/apply:os.system [a]', 1, 'tag'),
        ('boost: !!omap {TOY: {a: 1}}', 1, 'tag'),
        ('{"deny": "\\ud83d"}', 1, 'deny'),
    ],
)
def test_every_error_names_its_line_and_changes_nothing(write, toy, text, line, words):
    load_policy(write('prefer: b'))
    path = write(text, 'bad.yaml')
    for door in (read_policy, load_policy):
        with pytest.raises(PolicyFileError) as caught:
            door(path)
        words = words.replace('TOY', toy.op)
        assert any(one.startswith(f'{path}:{line}: ') and words in one for one in caught.value.errors), caught.value.errors
        assert 'Model' not in str(caught.value)
    assert toy.ran() == 'b'


def test_all_errors_come_at_once(write):
    with pytest.raises(PolicyFileError) as caught:
        read_policy(write('perfer: a\nstrict: 3\nrules:\n- ops: TOY\n  use: a\n  when: "1 < 2"\n'))
    assert len(caught.value.errors) == 3


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_policy(tmp_path / 'none.yaml')


def test_explain_names_file_line_and_rule(write, toy):
    path = write('deny: default\nrules:\n- ops: TOY\n  when: q.shape[1] >= 32\n  use: b\n')
    load_policy(path)
    decision = explain(toy.f, LONG, LONG)
    assert decision.order == f'rule at {path}:3'
    assert decision.rules == (f'rule at {path}:3 when q.shape[1] >= 32 → b: holds',)
    assert decision['default'].source == f'{path}:1'


def test_the_file_stands_below_code_and_environment(write, toy, monkeypatch):
    load_policy(write('prefer: c'))
    monkeypatch.setenv('FLA_PREFER', 'b')
    refresh()
    assert toy.ran() == 'b'
    set_policy(Policy(prefer='a'))
    assert toy.ran() == 'a'
    assert get_policy() == Policy(prefer='a')


def test_a_directory_is_refused_and_closed(tmp_path):
    before = len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 0
    for _ in range(20):
        with pytest.raises(OSError, match='regular file'):
            load_policy(tmp_path)
    if before:
        assert len(os.listdir('/proc/self/fd')) <= before + 2


@pytest.mark.parametrize('missing', ['pydantic', 'ruamel.yaml'])
def test_a_missing_package_is_named_with_the_extra(write, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"a policy file needs .* extra 'policy': pip install pydantic ruamel\.yaml"):
        load_policy(write('prefer: b'))


def test_numbers_follow_yaml_1_2(write):
    policy = read_policy(write('breaker: {cooldown: 017, probe_timeout: 1e3, threshold: 0o17}'))
    assert policy.breaker.to_dict() == {'cooldown': 17, 'probe_timeout': 1000.0, 'threshold': 15}


def test_quoted_and_tagged_numbers_are_words(write, toy):
    toy.add('010', priority=0)
    assert read_policy(write('prefer: ["010"]')).prefer == read_policy(write('prefer: [!!str 010]')).prefer == ('010',)


@pytest.mark.parametrize('ops', ['*', '*.*'])
def test_a_rule_for_all_functions_spares_a_locked_one(write, toy, ops):
    load_policy(write('lock: {TOY: [c]}'))
    set_policy(Policy(rules=[{'ops': ops, 'use': 'reference'}]))
    assert toy.ran() == 'c'


def test_a_lock_spares_rules_for_similar_names():
    policy = Policy(rules=[Rule(('kda*.chunk_kda',), ('reference',))])
    refuse_if_locked(policy, (Layer(Policy(lock={'kdax.f': 'a'}), 'a file'),), of_call=False)
    with pytest.raises(DispatchError, match='locked by a file'):
        refuse_if_locked(policy, (Layer(Policy(lock={'kda.chunk_kda': 'a'}), 'a file'),), of_call=False)


LOCKED_OUT = [
    lambda op: Policy(prefer='a', op=op),
    lambda op: Policy(order={f'{op}.f': 'a'}),
    lambda op: Policy(lock={op: ['a']}),
    lambda op: Policy(rules=[{'ops': op, 'use': 'a'}]),
    lambda op: Policy(rules=[{'ops': f'{op}.*', 'use': 'a'}]),
    lambda op: Policy(rules=[{'ops': f'{op[:-1]}[{op[-1]}].f', 'use': 'a'}]),
]


@pytest.mark.parametrize('make', LOCKED_OUT)
def test_another_order_of_a_locked_function_is_refused(write, toy, make):
    path = write('lock:\n  TOY: [c, default]\n')
    load_policy(path)
    with pytest.raises(DispatchError, match=f'locked by {path}:2'):
        set_policy(make(toy.op))
    with pytest.raises(DispatchError, match='use_backend'), policy_context(make(toy.op)):
        pass
    with pytest.raises(DispatchError, match=f'locked by {path}:2'):
        toy.f.bind(policy=make(toy.op))
    assert toy.ran() == 'c'


@pytest.mark.parametrize('make', LOCKED_OUT)
def test_a_lock_in_code_stands_against_scopes(toy, make):
    set_policy(Policy(lock={toy.op: ['c']}))
    with pytest.raises(DispatchError, match='locked by set_policy'), policy_context(make(toy.op)):
        pass
    with pytest.raises(DispatchError, match='locked by set_policy'):
        toy.f.bind(policy=make(toy.op))
    assert toy.ran() == 'c'
    set_policy(make(toy.op))  # replaces the lock
    assert toy.ran() == 'a'


def test_the_order_of_the_lock_itself_is_accepted(write, toy):
    load_policy(write('lock: {TOY: [c, default]}'))
    for same in (Policy(lock={toy.op: ('c', 'default')}), Policy(order={toy.op: ('c', 'default')})):
        set_policy(same)
        with policy_context(same):
            assert toy.ran() == 'c'
    for other in (
        Policy(order={toy.op: ('default', 'c')}),
        Policy(lock={toy.op: ('c', 'default')}, rules=[{'ops': toy.op, 'use': 'a'}]),
        Policy(lock={toy.op: ('c', 'default')}, order={f'{toy.op}.f': 'a'}),
    ):
        with pytest.raises(DispatchError, match='locked'):
            set_policy(other)


def test_only_forced_backends_override_a_lock(write, toy):
    load_policy(write('lock:\n  TOY: [c, default]\n'))
    with prefer_backend('a'):
        assert toy.ran() == 'c'
    with use_backend('a', op=toy.op):
        assert toy.ran() == 'a'
    with use_backend('a'):
        assert toy.ran() == 'a'
    with policy_context(Policy(use='a')):
        assert toy.ran() == 'a'
    assert toy.name_of(toy.f.bind('a')(SHORT, SHORT)) == 'a'
    for policy in (Policy(use='a'), Policy(use='a', op=toy.op)):
        with pytest.raises(DispatchError, match='locked'):
            set_policy(policy)


@pytest.mark.parametrize('make', [*LOCKED_OUT, lambda op: Policy(use='a', op=op), lambda op: Policy(use='a')])
def test_a_later_lock_holds(write, toy, make):
    set_policy(make(toy.op))
    assert toy.ran() == 'a'
    load_policy(write('lock:\n  TOY: [c, default]\n'))
    assert toy.ran() == 'c'


def test_a_lock_is_silent_about_general_orders(write, toy, caplog):
    load_policy(write('lock: {TOY: [c]}\norder: {TOY.f: [default]}\n'))
    set_policy(Policy(prefer='a'))
    with caplog.at_level(logging.WARNING, logger='fla'):
        assert toy.ran() == 'c'
    assert 'replaces' not in caplog.text  # no order named the function


@pytest.mark.parametrize('make', [*LOCKED_OUT, lambda op: Policy(use='a', op=op), lambda op: Policy(use='a')])
def test_a_lock_over_an_order_by_name_warns(write, toy, caplog, make):
    set_policy(make(toy.op))
    assert toy.ran() == 'a'
    path = write('lock: {TOY: [c]}\n')
    load_policy(path)
    with caplog.at_level(logging.WARNING, logger='fla'):
        assert toy.ran() == 'c'
    assert f'the lock of policy file {path} holds against set_policy()' in caplog.text


def test_a_policy_file_error_can_be_pickled(write, toy):
    with pytest.raises(PolicyFileError) as caught:
        load_policy(write('perfer: b'))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.path, copied.errors) == (str(caught.value), caught.value.path, caught.value.errors)


def test_a_file_that_is_too_large_is_refused(write, toy):
    path = write('prefer: b\n' + '# a redirected log\n' * 60_000)
    with pytest.raises(PolicyFileError, match=r'has \d+ bytes; a policy file has 1048576 at most'):
        load_policy(path)


def test_a_tilde_is_the_home_directory(write, toy, monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    write('prefer: b')
    assert load_policy('~/policy.yaml').policy.prefer == ('b',)
    assert toy.ran() == 'b'


def test_a_bad_file_under_strict_can_be_replaced(write, toy, monkeypatch):
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('perfer: b')))
    monkeypatch.setenv('FLA_STRICT', '1')
    refresh()
    for _ in range(2):
        with pytest.raises(DispatchError, match='is left out'):
            toy.ran()
    set_policy(Policy(prefer='c'))  # changes still take effect
    with pytest.raises(DispatchError, match='is left out'):
        toy.ran()
    load_policy(write('prefer: b', 'good.yaml'))
    assert toy.ran() == 'c'
    refresh()
    with pytest.raises(DispatchError, match='stays in force'):
        toy.ran()
    unload_policy()
    assert toy.ran() == 'c'


def test_refresh_respects_a_rollback(write, toy, monkeypatch):
    pytest.importorskip('watchfiles')
    path = write('prefer: b')
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(path))
    refresh()
    with watch_policy(path, debounce=60) as watcher:
        write('prefer: c')
        watcher.reload()
        assert toy.ran() == 'c'
        watcher.rollback()
        refresh()
        assert toy.ran() == 'b'


def test_the_environment_names_a_file(write, toy, monkeypatch, caplog):
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('prefer: b')))
    refresh()
    assert toy.ran() == 'b'
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('perfer: b', 'bad.yaml')))
    refresh()
    with caplog.at_level(logging.ERROR, logger='fla'):
        assert toy.ran() == 'b'
    assert "Did you mean 'prefer'?" in caplog.text
    monkeypatch.setenv('FLA_STRICT', '1')
    refresh()
    with pytest.raises(DispatchError, match='is left out'):
        toy.ran()
    monkeypatch.delenv('FLA_DISPATCH_CONFIG')
    monkeypatch.delenv('FLA_STRICT')
    refresh()
    assert toy.ran() == 'a'


def test_a_number_too_large_breaks_no_call(write, toy, monkeypatch, caplog):
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('rules:\n- {ops: TOY, use: b, priority: ' + '9' * 400 + '}')))
    refresh()
    with caplog.at_level(logging.ERROR, logger='fla'):
        assert toy.ran() == 'a'
    assert 'is left out' in caplog.text


def test_a_tilde_in_the_environment_is_the_home(write, toy, monkeypatch):
    monkeypatch.setenv('HOME', str(write('prefer: b').parent))
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', '~/policy.yaml')
    refresh()
    assert toy.ran() == 'b'


def test_names_in_the_environments_file_are_checked(write, toy, monkeypatch, caplog):
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('prefer: qqq')))
    refresh()
    with caplog.at_level(logging.WARNING, logger='fla'):
        assert toy.ran() == 'a'
    assert "unknown backend 'qqq'" in caplog.text


def test_frozen_and_manifest(write, toy):
    path = write('prefer: b\nrules: [{ops: TOY, when: flag, use: c}]')
    version = load_policy(path)
    made = freeze_dispatch()
    assert made['policy_file'] == {'file': 'policy.yaml', 'sha256': version.sha256}
    assert made['selections'][f'{toy.op}.f']['any when flag'][0]['backend'] == 'c'
    assert str(path.parent) not in json.dumps(made)
    with pytest.raises(FrozenError):
        load_policy(path)
    with pytest.raises(FrozenError):
        unload_policy()
    thaw_dispatch()
    unload_policy()
    assert 'policy_file' not in manifest()


def test_the_manifest_lists_the_first_rule(write, toy):
    load_policy(write('rules:\n- {ops: TOY, when: flag, use: b}\n- {ops: TOY, when: flag, use: c}'))
    assert toy.ran(SHORT, SHORT, flag=True) == 'b'
    assert manifest()['selections'][f'{toy.op}.f']['any when flag'][0]['backend'] == 'b'


def test_the_manifest_does_not_depend_on_the_directory(write, toy, tmp_path):
    hashes = set()
    for folder in ('one', 'an other', 'x/y'):
        (tmp_path / folder).mkdir(parents=True)
        load_policy(write('deny: a\nlock: {TOY: [b, c]}\nboost: {TOY: {b: 1}}', f'{folder}/policy.yaml'))
        toy.ran()
        hashes.add(manifest().sha256)
        assert str(tmp_path) not in json.dumps(manifest())
    assert len(hashes) == 1
    load_policy(write('deny: b', 'policy.yaml'))
    assert manifest().sha256 not in hashes


def test_refresh_keeps_a_later_load(write, toy, monkeypatch):
    named = write('prefer: b', 'named.yaml')
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(named))
    refresh()
    assert toy.ran() == 'b'
    load_policy(write('prefer: c'))
    refresh()
    assert toy.ran() == 'c'
    named.write_text('prefer: default')  # the variable's file has changed
    refresh()
    assert toy.ran() == 'default'
    load_policy(write('prefer: c'))
    monkeypatch.delenv('FLA_DISPATCH_CONFIG')
    refresh()
    assert toy.ran() == 'c'
    unload_policy()
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(named))
    refresh()
    assert toy.ran() == 'default'
    unload_policy()
    assert toy.ran() == 'a'
    refresh()
    assert toy.ran() == 'default'


def test_an_equal_policy_leaves_breakers_alone(write):
    toy = Toy()
    toy.add('z', priority=0, retryable=(RuntimeError,), f=fails)
    text = 'on_error: fallback\nbreaker: {threshold: 2, cooldown: 100}\n'
    load_policy(write(text))
    assert [toy.ran(), toy.ran()] == ['default'] * 2
    load_policy(write(text + '# a remark\n'))
    assert breaker(toy.f, 'z').state == 'open'
    load_policy(write(text + 'strict: false\n'))
    assert breaker(toy.f, 'z').state == 'closed'


def fails(self, *args, **kwargs):
    raise RuntimeError('once more')


def test_code_and_file_may_hold_the_same_policy(write, toy):
    version = load_policy(write('deny: a'))
    set_policy(version.policy)
    dispatcher = default_dispatcher()
    without = dispatcher.policies.state_with_file(None)
    assert [layer.source for layer in without.layers] == ['set_policy()']


def test_reset_unloads_the_file(write, toy):
    load_policy(write('prefer: b'))
    assert default_dispatcher().policies.now.file.version == 1
    reset()
    assert default_dispatcher().policies.now.file is None


def test_compiled_callers_follow_the_file(write, toy):
    compiled = torch.compile(lambda q: toy.f(q, q), backend='eager', fullgraph=True)
    load_policy(write('rules: [{ops: TOY, when: "q.shape[1] >= 32", use: b}]'))
    for q in (SHORT, LONG):
        assert toy.name_of(compiled(q)) == toy.ran(q, q)
    assert toy.ran(LONG, LONG) == 'b'
    load_policy(write('rules: [{ops: TOY, when: "q.shape[1] >= 32", use: c}]'))
    assert [toy.name_of(compiled(q)) for q in (SHORT, LONG)] == ['a', 'c']
    unload_policy()
    assert [toy.name_of(compiled(q)) for q in (SHORT, LONG)] == ['a', 'a']


def test_operations_are_imported_to_check_names(write):
    path = write("""\
        order: {kda: [default], kda.chunk_kda: [reference, default]}
        rules: [{ops: kda.*, when: "q.shape[1] > 4", use: default}]
        """)
    assert read_policy(path).order[0] == ('kda', ('default',))


EVERYTHING = """\
perfer: a
prefer:
  - b
  - qqq
allow: [{}, zzz]
order:
  TOY.ff: [a]
  TOY: [bb]
boost:
  TOY: {aa: 1, b: much}
rules:
- ops: [TOY, nosuchop]
  use: a
  when: flga and scael > 1
- ops: TOY.f
  when: len(q) > 1 and q.shape > 3
- use: xx
  wen: 3
- ops: TOY
  use: [yy]
  when: "1 <"
strict: 3
on_error: fallbak
"""


def test_one_reading_lists_every_error(write):
    """Unknown keys, wrong values, bad conditions and unknown names come together."""
    path = write(EVERYTHING)
    with pytest.raises(PolicyFileError) as caught:
        read_policy(path)
    found = [one.removeprefix(f'{path}:').split(': ', 1) for one in caught.value.errors]
    expected = [
        (1, "unknown key 'perfer'"),
        (4, "unknown backend 'qqq'"),
        (5, 'allow.0'),
        (5, "unknown backend 'zzz'"),
        (7, "unknown function 'ff'"),
        (8, "unknown backend 'bb' of operation"),
        (10, 'boost'),
        (10, "unknown backend 'aa' of operation"),
        (12, "unknown operation 'nosuchop'"),
        (14, "no parameter 'flga'. Did you mean 'flag'?"),
        (14, "no parameter 'scael'. Did you mean 'scale'?"),
        (15, 'rules.1.use is missing'),
        (16, "'len(q)' is not allowed; 'q.shape' is not allowed"),
        (17, 'rules.2.ops is missing'),
        (17, "unknown backend 'xx'"),
        (18, "unknown key 'wen'"),
        (20, "unknown backend 'yy' of operation"),
        (21, 'is not an expression'),
        (22, 'strict'),
        (23, "Did you mean 'fallback'?"),
    ]
    assert [int(line) for line, _ in found] == [line for line, _ in expected]
    for line, words in expected:
        assert any(int(at) == line and words in text for at, text in found), (line, words, found)


@pytest.mark.parametrize(
    ('text', 'lines'),
    [
        ('prefer: qqq\nprefer: [zzz]', {1: ["'qqq'"], 2: ['duplicate', "'zzz'"]}),
        (
            'rules:\n- ops: TOY\n  use: qq\n  use: 3\n  ops: nope',
            {3: ["'qq'"], 4: ['duplicate', 'use'], 5: ['duplicate', "'nope'"]},
        ),
        ('prefer: &x [qqq]\ndeny: *x', {1: ["'qqq'"], 2: ['aliases']}),
        ('prefer: qqq\ndeny: !!python/name:os.system a', {1: ["'qqq'"], 2: ['cannot be read']}),
        ('? [a]\n: b\nprefer: qqq', {1: ['a key must be a word'], 3: ["'qqq'"]}),
        ('rules:\n- 3\n- ops: TOY\n  use: qq', {2: ['rules.0'], 4: ["'qq'"]}),
        ('prefer: [qqq]\nrules: {ops: nope}', {1: ["'qqq'"], 2: ['rules']}),
        ('boost:\n  TOY:\n    triton: 1\n    default: 2\n    zz: 1', {4: ['triton and default'], 5: ["'zz'"]}),
        ('boost:\n  nope:\n    zz: 1', {2: ["'nope'"], 3: ["'zz'"]}),
        ('order: {"": [a], TOY: [qq]}', {1: ['order', "'qq'"]}),
    ],
)
def test_no_error_hides_another(write, text, lines):
    path = write(text)
    with pytest.raises(PolicyFileError) as caught:
        read_policy(path)
    found = [one.removeprefix(f'{path}:').split(': ', 1) for one in caught.value.errors]
    assert {int(line) for line, _ in found} == set(lines)
    for line, words in lines.items():
        for word in words:
            assert any(int(at) == line and word in said for at, said in found), (line, word, found)


def test_one_operation_of_a_rule_needs_the_backend(write, toy):
    other = Toy()
    other.add('elsewhere')
    path = write(f'rules:\n- ops: [TOY, {other.op}]\n  use: [elsewhere, a]')
    assert load_policy(path).policy.rules[0].use == ('elsewhere', 'a')
    assert (toy.ran(), other.ran()) == ('a', 'elsewhere')
    with pytest.raises(PolicyFileError, match=f"3: unknown backend 'elsewhere' of operation '{toy.op}'"):
        read_policy(write('rules:\n- ops: TOY\n  use: [elsewhere, a]'))


def test_a_broken_operation_is_one_error_of_several(write, library):
    library.write('ops/broken/__init__.py', 'raise RuntimeError("this package is broken")')
    path = write('order:\n  broken.f: [default]\nprefer: qqq')
    with pytest.raises(PolicyFileError) as caught:
        read_policy(path, library.dispatcher)
    assert len(caught.value.errors) == 2
    assert 'this package is broken' in caught.value.errors[0]


def test_errors_of_the_environments_file_are_logged(write, toy, monkeypatch, caplog):
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('strict: 3\nprefer: qqq\ndeny: zzz')))
    refresh()
    with caplog.at_level(logging.WARNING, logger='fla'):
        assert toy.ran() == 'a'
    for words in ('strict', "unknown backend 'qqq'", "unknown backend 'zzz'"):
        assert words in caplog.text


def test_strict_raises_all_unknown_names_at_once(write, toy, monkeypatch):
    path = write('prefer: qqq\ndeny: zzz')
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(path))
    monkeypatch.setenv('FLA_STRICT', '1')
    refresh()
    for _ in range(2):
        with pytest.raises(UnknownNameError) as caught:
            toy.ran()
        assert f"{path}:1: unknown backend 'qqq'" in str(caught.value)
        assert f"{path}:2: unknown backend 'zzz'" in str(caught.value)
