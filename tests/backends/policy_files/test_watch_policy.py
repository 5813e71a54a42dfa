"""A policy file that changes while an operation is called."""

import os
import threading

import pytest

pytest.importorskip('watchfiles')
pytest.importorskip('ruamel.yaml')
pytest.importorskip('pydantic')

from fla.backends import default_dispatcher, explain, freeze_dispatch, refresh, thaw_dispatch
from fla.backends.core.errors import DispatchError, FrozenError
from fla.backends.policy_files.watch import WatchError, watch_policy
from tests.backends.policy_files.test_watch import WAIT, Events
from tests.backends.toy import Q, Toy


@pytest.fixture
def toy():
    made = Toy()
    for name in ('a', 'b'):
        made.add(name)
    return made


@pytest.fixture
def file(tmp_path, toy):
    path = tmp_path / 'policy.yaml'
    path.write_text('prefer: [b]\n')
    return path


def replace(path, text):
    path.with_name('draft').write_text(text)
    os.replace(path.with_name('draft'), path)


def test_a_change_reaches_the_next_call(toy, file):
    reloads, errors = Events(), Events()
    with watch_policy(file, debounce=0.05, on_reload=reloads, on_error=errors) as watcher:
        assert toy.ran() == 'b'
        replace(file, 'prefer: [a]\n')
        reloads.wait(1)
        assert toy.ran() == 'a'
        file.write_text('prefer: [c]\nnonsense: 1\n')
        text = str(errors.wait(1).error)
        assert f'{file}:' in text
        assert 'nonsense' in text
        assert toy.ran() == 'a'
        watcher.rollback()
        assert toy.ran() == 'b'
        assert watcher.current_version().version == 1
        file.write_text(f'rules:\n  - ops: {toy.op}\n    when: q.shape[0] >= 2\n    use: [b]\nprefer: [a]\n')
        reloads.wait(3)
        assert toy.ran(Q, Q) == 'b'
        assert toy.ran(Q[:1], Q) == 'a'
    assert not watcher.running
    assert toy.ran(Q, Q) == 'b'  # the policy stays
    default_dispatcher().policies.unload_file()
    assert toy.ran() == 'a'


def test_a_file_that_leaves_no_backend_is_refused(toy, file):
    assert toy.ran() == 'a'
    errors = Events()
    with watch_policy(file, debounce=0.05, on_error=errors):
        replace(file, 'allow: []\n')
        error = errors.wait(1).error
        assert isinstance(error, DispatchError)
        assert f'leaves no backend for {toy.op}.f' in str(error)
        assert toy.ran() == 'b'


@pytest.mark.parametrize('change', [refresh, lambda: None])
def test_a_backend_that_is_off_does_not_count(toy, file, monkeypatch, change):
    toy.add('idle', env_var='FLA_TOY_SWITCHED_OFF')
    monkeypatch.setenv('FLA_TOY_SWITCHED_OFF', '0')
    assert toy.ran() == 'a'
    change()  # the function stays in use, without a plan now
    errors = Events()
    with watch_policy(file, debounce=0.05, on_error=errors):
        replace(file, 'allow: [idle]\n')
        assert f'leaves no backend for {toy.op}.f' in str(errors.wait(1).error)
        assert toy.ran() == 'b'


@pytest.mark.parametrize('emptied', ['', '# prefer: [b]\n', 'null', 'deny:\n'])
def test_an_empty_file_allows_nothing_new(toy, file, emptied):
    """A save that is read too early is an empty file."""
    file.write_text(f'deny: [a]\nlock:\n  {toy.op}: [b]\n')
    errors, reloads = Events(), Events()
    with watch_policy(file, debounce=0.05, on_error=errors, on_reload=reloads) as watcher:
        file.write_text(emptied)
        assert f'{file}:1: ' in str(errors.wait(1).error)
        assert watcher.current_version().version == 1
        assert toy.ran() == 'b'
        file.write_text('{}')
        reloads.wait(1)
        assert toy.ran() == 'a'


def test_a_refused_file_leaves_plans_and_code(toy, file):
    with watch_policy(file, debounce=60) as watcher:
        assert toy.ran() == 'b'
        code, plans = toy.f.__code__, explain(toy.f, Q, Q)
        file.write_text('allow: []\n')
        with pytest.raises(DispatchError, match='leaves no backend'):  # found by planning
            watcher.reload()
        assert toy.f.__code__ is code
        assert explain(toy.f, Q, Q) == plans


def test_frozen(toy, file):
    freeze_dispatch()
    with pytest.raises(FrozenError, match='thaw_dispatch'):
        watch_policy(file)
    thaw_dispatch()
    with watch_policy(file) as watcher:
        with pytest.raises(WatchError, match='already watched'):
            watch_policy(file)
        freeze_dispatch()
        with pytest.raises(FrozenError, match='thaw_dispatch'):
            watcher.reload()


def test_reset_ends_a_watcher(toy, file):
    watcher = watch_policy(file)
    default_dispatcher().reset()
    assert not watcher.running
    assert default_dispatcher().policies.now.file is None


def test_calls_in_flight_keep_their_plan(file, tmp_path):
    began, go = threading.Event(), threading.Event()
    toy = Toy()

    def held(self, q):
        began.set()
        assert go.wait(WAIT)
        return True, None

    toy.add('a', accepts=held)
    toy.add('b')
    file.write_text('deny: [b]\n')
    with watch_policy(file) as watcher:
        ran = []
        caller = threading.Thread(target=lambda: ran.append(toy.ran()))
        caller.start()
        assert began.wait(WAIT)
        file.write_text('deny: [a]\n')
        watcher.reload()
        go.set()
        caller.join(WAIT)
        assert ran == ['a']
        assert toy.ran() == 'b'
        assert explain(toy.f, Q, Q).winner == 'b'
