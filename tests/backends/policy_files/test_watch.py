"""Changes of a policy file: seen, refused, reported. A stand-in replaces the file layer."""

import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fla.backends.core.errors import FrozenError
from fla.backends.policy.policy import Policy
from fla.backends.policy.version import PolicyVersion
from fla.backends.policy_files import file_changes, watch
from fla.backends.policy_files.watch import PolicyWatcher, WatchError
from tests import process

pytest.importorskip('watchfiles')

WAIT = 20.0


class Layer:
    """Stands in for a Dispatcher. A file contains a backend's name; 'bad' is an error."""

    namespace = 'mylib.ops'

    def __init__(self):
        self.frozen = None
        self.made = None
        self.count = self.changes = 0
        self.tried = []

    def refuse_if_frozen(self, what):
        if self.frozen is not None:
            raise FrozenError(f'cannot {what} while dispatch is frozen; call thaw_dispatch() first')

    def read(self, path):
        data = Path(path).read_bytes()
        if not data or data.startswith(b'bad'):
            raise ValueError(f'{path}:1: no policy')
        return PolicyVersion(0, hashlib.sha256(data).hexdigest(), str(path), time.time(), Policy(prefer=data.decode()))

    def try_policy(self, policy, path):
        self.tried.append(policy)

    def set_file(self, made):
        return self.swap_file(made)[0]

    def policy_changed(self):
        self.changes += 1

    def swap_file(self, made):
        self.refuse_if_frozen('change the policy')
        if made.version == 0:
            self.count += 1
            made = PolicyVersion(self.count, made.sha256, made.source, made.time, made.policy)
        before, self.made = self.made, made
        return made, before is None or before.policy != made.policy

    @property
    def policies(self):
        return self

    @property
    def now(self):
        return SimpleNamespace(file=self.made)

    def state_with_file(self, policy, path):
        return policy


class Events:
    """A callback that records its events."""

    def __init__(self):
        self.seen = []
        self.came = threading.Condition()

    def __call__(self, event):
        with self.came:
            self.seen.append(event)
            self.came.notify_all()

    def wait(self, count):
        with self.came:
            assert self.came.wait_for(lambda: len(self.seen) >= count, WAIT), self.seen
            return self.seen[count - 1]


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(watch, 'read_version', lambda path, layer: layer.read(path))
    monkeypatch.setattr(watch, 'require_backends', lambda layer, policy, path: layer.try_policy(policy, path))
    return Layer()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'policy.yaml'
    path.write_text('one')
    return path


@pytest.fixture(params=[False, 0.02], ids=['events', 'polling'])
def poll(request):
    return request.param


@pytest.fixture
def start(layer, file, poll):
    running = []

    def begin(path=file, **options):
        asked = {'debounce': 0.05, 'poll': poll, 'validators': (), 'on_reload': (), 'on_error': (), 'history': 4, **options}
        running.append(PolicyWatcher(path, dispatcher=layer, **asked))
        return running[-1]

    yield begin
    for one in running:
        one.stop(WAIT)


def seen_by(watcher, text):
    """Waits until the watcher has seen this content."""
    state = hashlib.sha256(text.encode()).hexdigest()
    deadline = time.monotonic() + WAIT
    while watcher._seen != state:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def replace(path, text):
    path.with_name('draft').write_text(text)
    os.replace(path.with_name('draft'), path)


def in_force(layer):
    return layer.made.policy.prefer[0]


def test_the_file_is_in_force_when_watching_begins(layer, start):
    watcher = start()
    assert in_force(layer) == 'one'
    assert watcher.running
    assert watcher.current_version() == layer.made
    assert [v.version for v in watcher.history()] == [1]
    assert layer.tried == [Policy(prefer='one')]


@pytest.mark.parametrize('write', [Path.write_text, replace], ids=['in place', 'replaced'])
def test_a_save_is_seen(layer, file, start, write):
    reloads = Events()
    start(on_reload=reloads)
    for count, text in enumerate(['two', 'three', 'four'], 1):
        write(file, text)
        event = reloads.wait(count)
        assert (event.kind, event.version.policy.prefer, event.error) == ('reload', (text,), None)
        assert event.previous.version == count
        assert in_force(layer) == text


def test_the_last_of_several_writes_counts(layer, file, start):
    reloads = Events()
    start(on_reload=reloads, debounce=0.3)
    first = time.monotonic()
    for number in range(20):
        (Path.write_text if number % 2 else replace)(file, f'draft{number}')
        time.sleep(0.01)
    file.write_text('final')
    began = time.monotonic()
    while in_force(layer) != 'final' and time.monotonic() < began + WAIT:
        time.sleep(0.01)
    assert in_force(layer) == 'final'
    # one for each pause of 0.3 s; a loaded machine may pause between the writes
    assert len(reloads.seen) <= 2 + (time.monotonic() - first) / 0.3


def test_a_file_that_never_settles_is_read(layer, file, start, monkeypatch):
    monkeypatch.setattr(watch, '_MAX_DEBOUNCES', 3)
    reloads = Events()
    start(on_reload=reloads, debounce=0.2)
    end = time.monotonic() + WAIT
    number = 0
    while not reloads.seen and time.monotonic() < end:
        number += 1
        replace(file, f'draft{number}')
        time.sleep(0.02)
    assert reloads.seen


def test_a_mounted_config_map_is_seen(layer, tmp_path, start):
    mount = tmp_path / 'config'
    mount.mkdir()
    for stamp in ('..1', '..2'):
        (mount / stamp).mkdir()
        (mount / stamp / 'policy.yaml').write_text('one' if stamp == '..1' else 'two')
    (mount / '..data').symlink_to('..1')
    (mount / 'policy.yaml').symlink_to('..data/policy.yaml')
    outer = tmp_path / 'elsewhere.yaml'
    outer.symlink_to(mount / 'policy.yaml')
    reloads = Events()
    start(outer, on_reload=reloads)
    assert in_force(layer) == 'one'
    (mount / '..data_tmp').symlink_to('..2')
    os.replace(mount / '..data_tmp', mount / '..data')
    assert reloads.wait(1).version.policy.prefer == ('two',)
    (mount / '..2' / 'policy.yaml').write_text('three')  # the new target is watched
    assert reloads.wait(2).version.policy.prefer == ('three',)


def test_a_recreated_directory_is_watched_again(layer, tmp_path, start, monkeypatch):
    monkeypatch.setattr(file_changes, 'LOOK_AGAIN_SECONDS', 0.1)
    folder = tmp_path / 'folder'
    folder.mkdir()
    (folder / 'p.yaml').write_text('one')
    reloads, errors = Events(), Events()
    start(folder / 'p.yaml', on_reload=reloads, on_error=errors)
    folder.rename(tmp_path / 'gone')
    assert isinstance(errors.wait(1).error, OSError)
    assert in_force(layer) == 'one'
    folder.mkdir()
    (folder / 'p.yaml').write_text('two')
    assert reloads.wait(1).version.policy.prefer == ('two',)
    (folder / 'p.yaml').write_text('three')
    assert reloads.wait(2).version.policy.prefer == ('three',)


def test_a_swapped_directory_link_is_seen(layer, tmp_path, start, monkeypatch):
    monkeypatch.setattr(file_changes, 'LOOK_AGAIN_SECONDS', 0.1)
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'p.yaml').write_text(name)
    (tmp_path / 'current').symlink_to('one')
    reloads = Events()
    start(tmp_path / 'current' / 'p.yaml', on_reload=reloads)
    (tmp_path / 'next').symlink_to('two')
    os.replace(tmp_path / 'next', tmp_path / 'current')
    assert reloads.wait(1).version.policy.prefer == ('two',)
    (tmp_path / 'two' / 'p.yaml').write_text('three')
    assert reloads.wait(2).version.policy.prefer == ('three',)


@pytest.mark.parametrize('around', [1, 2])
def test_circular_links_are_an_error(layer, file, start, around):
    """The path becomes a link to itself, directly or through another; then the file is back."""
    bad, good = Events(), Events()
    watcher = start(on_error=bad, on_reload=good)
    file.unlink()
    other = file.with_name('other')
    file.symlink_to(file if around == 1 else other)
    if around == 2:
        other.symlink_to(file)
    assert isinstance(bad.wait(1).error, OSError)
    replace(file, 'two')
    good.wait(1)
    assert layer.made.policy.prefer == ('two',)
    watcher.stop(WAIT)


@pytest.mark.parametrize('spoil', [lambda p: p.write_text('bad'), lambda p: p.write_text(''), Path.unlink])
def test_a_bad_file_changes_nothing_until_it_is_good(layer, file, start, spoil):
    reloads, errors = Events(), Events()
    watcher = start(on_reload=reloads, on_error=errors)
    spoil(file)
    event = errors.wait(1)
    assert event.kind == 'error'
    assert event.error is not None
    assert event.version == event.previous == layer.made
    assert in_force(layer) == 'one'
    file.write_text('one')  # as it was
    event = reloads.wait(1)
    assert event.version == event.previous == layer.made
    assert layer.made.version == 1
    file.write_text('two')
    reloads.wait(2)
    assert in_force(layer) == 'two'
    assert len(errors.seen) == 1
    assert watcher.running


def test_a_validator_refuses(layer, file, start):
    def no_two(policy):
        if 'two' in policy.prefer:
            raise RuntimeError('not two')

    errors, reloads = Events(), Events()
    start(on_error=errors, on_reload=reloads, validators=[no_two, lambda policy: 'three' not in policy.prefer])
    file.write_text('two')
    assert str(errors.wait(1).error) == 'not two'
    file.write_text('three')
    assert 'refuses' in str(errors.wait(2).error)
    assert in_force(layer) == 'one'
    file.write_text('four')
    reloads.wait(1)
    assert in_force(layer) == 'four'


def test_a_policy_that_leaves_no_backend_is_refused(layer, file, start):
    def none_left(policy, path):
        if 'two' in policy.prefer:
            raise ValueError('no backend is left')

    layer.try_policy = none_left
    errors = Events()
    start(on_error=errors)
    file.write_text('two')
    assert str(errors.wait(1).error) == 'no backend is left'
    assert in_force(layer) == 'one'


def test_callbacks_run_outside_every_lock(layer, file, start):
    reloads, hung, acts = Events(), [], []

    def from_another_thread(act):
        acts.append(act)
        other = threading.Thread(target=act, daemon=True)
        other.start()
        other.join(WAIT)
        hung.append(other.is_alive())

    def meddle(event):
        if len(acts) < 2:  # a reload calls this, too
            from_another_thread(watcher.reload)
        raise RuntimeError('an error in a callback is only logged')

    watcher = start(on_reload=[meddle, reloads])
    # the dispatcher notifies listeners, such as circuit breakers
    layer.policy_changed = lambda: from_another_thread(watcher.reload)
    file.write_text('two')
    reloads.wait(1)
    watcher.rollback()
    assert in_force(layer) == 'two'  # the listener's reload() came last
    assert len(hung) == len(acts) >= 3
    assert not any(hung)


def test_rollback_goes_back_version_by_version(layer, file, start):
    reloads = Events()
    watcher = start(on_reload=reloads)
    for count, text in enumerate(['two', 'three'], 1):
        file.write_text(text)
        reloads.wait(count)
    assert [v.version for v in watcher.history()] == [1, 2, 3]
    assert watcher.rollback().version == 2
    assert in_force(layer) == 'two'
    assert reloads.wait(3).kind == 'rollback'
    assert watcher.rollback() == watcher.current_version()
    assert in_force(layer) == 'one'
    with pytest.raises(WatchError, match='earlier versions kept are none'):
        watcher.rollback()
    file.write_text('four')  # the next change counts
    assert reloads.wait(5).version.version == 4
    assert watcher.rollback().version == 1  # the rolled-back versions are gone
    assert [v.version for v in watcher.history()] == [1]


def test_rollback_to_a_version(layer, file, start):
    reloads = Events()
    watcher = start(on_reload=reloads)
    for count, text in enumerate(['two', 'three', 'four', 'five'], 1):
        file.write_text(text)
        reloads.wait(count)
    assert [v.version for v in watcher.history()] == [2, 3, 4, 5]  # history=4
    with pytest.raises(WatchError, match='version 1: the earlier versions kept are 2, 3, 4'):
        watcher.rollback(to=1)
    for to in ('a', 2.0, True):
        with pytest.raises(TypeError, match='to is the number of a version'):
            watcher.rollback(to=to)
    assert in_force(layer) == 'five'
    assert watcher.rollback(to=2).policy.prefer == ('two',)


def test_a_rolled_back_version_stays_away(layer, file, start):
    reloads, errors = Events(), Events()
    watcher = start(on_reload=reloads, on_error=errors)
    file.write_text('two')
    reloads.wait(1)
    watcher.rollback()
    reloads.wait(2)
    os.utime(file)
    file.rename(file.with_name('away'))
    errors.wait(1)
    file.with_name('away').rename(file)
    file.with_name('other').write_text('x')
    time.sleep(0.3)
    assert in_force(layer) == 'one'
    assert watcher.reload().policy.prefer == ('two',)  # an explicit reload reads it


@pytest.mark.parametrize('between', ['one', 'bad'])
def test_a_rolled_back_version_can_be_saved_again(layer, file, start, between):
    """The file is repaired, then the rolled-back content is saved again."""
    reloads, errors = Events(), Events()
    watcher = start(on_reload=reloads, on_error=errors)
    file.write_text('two')
    reloads.wait(1)
    watcher.rollback()
    replace(file, between)
    if between == 'bad':
        errors.wait(1)
    else:
        seen_by(watcher, 'one')
    replace(file, 'two')
    reloads.wait(3)  # the second was the rollback
    assert in_force(layer) == 'two'


def test_two_rollbacks_hold_while_the_file_is_away(layer, file, start):
    reloads, errors = Events(), Events()
    watcher = start(on_reload=reloads, on_error=errors)
    for count, text in enumerate(['two', 'three'], 1):
        file.write_text(text)
        reloads.wait(count)
    assert [watcher.rollback().policy.prefer for _ in range(2)] == [('two',), ('one',)]
    file.rename(file.with_name('away'))
    errors.wait(1)
    file.with_name('away').rename(file)
    seen_by(watcher, 'three')
    assert in_force(layer) == 'one'


def test_rereading_the_same_content_makes_no_version(layer, file, start):
    reloads = Events()
    watcher = start(on_reload=reloads)
    file.write_text('two')
    reloads.wait(1)
    assert [watcher.reload().version for _ in range(5)] == [2] * 5
    assert [v.version for v in watcher.history()] == [1, 2]
    assert watcher.rollback().policy.prefer == ('one',)
    assert watcher.reload().policy.prefer == ('two',)  # an explicit reload reads it again


def test_an_error_is_reported_once_per_state(layer, file, start):
    errors = Events()
    watcher = start(on_error=errors)
    file.write_text('bad')
    errors.wait(1)
    for _ in range(2):
        with pytest.raises(ValueError, match='no policy'):
            watcher.reload()
    file.write_text('bad again')
    errors.wait(2)
    assert len(errors.seen) == 2


def test_sys_exit_in_callbacks_does_not_stop_watching(layer, file, start, caplog):
    reloads, errors = Events(), Events()
    exits = ['two', 'three']

    def validator(policy):
        if policy.prefer == ('two',):
            sys.exit('not that')

    def callback(event):
        if in_force(layer) == 'three':
            sys.exit(3)

    watcher = start(on_reload=[callback, reloads], on_error=errors, validators=validator)
    replace(file, exits[0])
    assert 'not that' in str(errors.wait(1).error)
    replace(file, exits[1])
    reloads.wait(1)
    replace(file, 'four')
    reloads.wait(2)
    assert in_force(layer) == 'four'
    assert watcher.running
    assert 'callback' in caplog.text


def test_rollback_takes_back_a_later_load_policy(layer, file, start):
    watcher = start()
    layer.set_file(PolicyVersion(0, 'x', 'other.yaml', 0.0, Policy(prefer='foreign')))
    watcher.rollback()
    assert in_force(layer) == 'one'


def test_frozen(layer, file, start, monkeypatch):
    monkeypatch.setattr(file_changes, 'LOOK_AGAIN_SECONDS', 0.05)
    reloads, errors = Events(), Events()
    watcher = start(on_reload=reloads, on_error=errors)
    layer.frozen = object()
    file.write_text('two')
    assert isinstance(errors.wait(1).error, FrozenError)
    with pytest.raises(FrozenError, match='thaw_dispatch'):
        watcher.reload()
    assert in_force(layer) == 'one'
    layer.frozen = None
    reloads.wait(1)
    assert in_force(layer) == 'two'


def test_a_bad_file_at_the_start_raises(layer, file, start, tmp_path):
    file.write_text('bad')
    with pytest.raises(ValueError, match='no policy'):
        start()
    with pytest.raises(FileNotFoundError):
        start(tmp_path / 'missing')
    file.write_text('one')
    assert start().running  # the failed starts left nothing behind


def test_one_watcher_for_a_namespace(layer, file, start, tmp_path):
    first = start()
    for path in (file, tmp_path / 'other'):
        with pytest.raises(WatchError, match=r'already watched for mylib\.ops'):
            start(path)
    first.stop()
    assert not first.running
    assert start().running


def test_stop(layer, file, start):
    watcher = start()
    thread = watcher._thread
    assert thread.daemon
    watcher.stop()
    watcher.stop()
    assert not thread.is_alive()
    assert 'stopped' in repr(watcher)
    file.write_text('two')
    for act in (watcher.reload, watcher.rollback):
        with pytest.raises(WatchError, match='stopped'):
            act()
    assert in_force(layer) == 'one'
    assert watcher.current_version() == layer.made


def test_a_callback_may_stop_it(layer, file, start):
    done = Events()

    def stop(event):
        watcher.stop()
        done(event)

    watcher = start(on_reload=stop)
    file.write_text('two')
    done.wait(1)
    watcher._thread.join(WAIT)
    assert not watcher._thread.is_alive()


def test_stop_names_a_callback_that_hangs(layer, file, start):
    go, began = threading.Event(), Events()

    def hang(event):
        began(event)
        go.wait(WAIT)

    watcher = start(on_reload=hang)
    file.write_text('two')
    began.wait(1)
    with pytest.raises(WatchError, match='does not return'):
        watcher.stop(0.05)
    go.set()


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork')
def test_a_forked_child_has_no_watcher(layer, file, start):
    watcher = start()
    watcher._turn.acquire()  # as if another thread were changing the policy
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert not watcher.running
            assert 'forked' in repr(watcher)
            assert watcher.current_version().version == 1
            for act in (watcher.reload, watcher.rollback):
                with pytest.raises(WatchError, match='call watch_policy\\(\\) here'):
                    act()
            watcher.stop()
            again = PolicyWatcher(file, 0.05, False, (), (), (), 4, layer)
            assert again.running
            again.stop()
            code = 0
        finally:
            os._exit(code)
    watcher._turn.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert watcher.running


@pytest.mark.parametrize(
    ('options', 'error', 'words'),
    [
        ({'debounce': -1}, ValueError, 'debounce must be a number of seconds, at least 0, got -1'),
        ({'debounce': True}, ValueError, 'debounce'),
        ({'poll': 0.0}, ValueError, 'poll must be a number of seconds'),
        ({'history': 0}, ValueError, 'history must be a number of versions, at least 1, got 0'),
        ({'validators': [3]}, TypeError, 'validators takes a callable or several, got 3'),
        ({'on_reload': [None]}, TypeError, 'on_reload'),
        ({'validators': 3}, TypeError, 'validators takes a callable or several, got 3'),
        ({'debounce': 10**400}, ValueError, 'debounce'),
        ({'path': b'policy.yaml'}, TypeError, 'named by a path'),
    ],
)
def test_bad_arguments(start, options, error, words):
    with pytest.raises(error, match=words):
        start(**options)


def test_without_inotify_the_file_is_polled(layer, file, start, monkeypatch, caplog):
    def none_left(*args, **kwargs):
        raise OSError(24, 'inotify instance limit reached')

    monkeypatch.setattr('watchfiles.watch', none_left)
    monkeypatch.setattr(watch, '_POLL_SECONDS', 0.02)
    reloads = Events()
    start(on_reload=reloads)
    file.write_text('two')
    reloads.wait(1)
    assert in_force(layer) == 'two'


def test_the_process_exits_cleanly_while_watching(tmp_path):
    """The thread inside watchfiles must end before the interpreter does."""
    (tmp_path / 'p').write_text('prefer: default')
    script = f"""
        from fla.backends import default_dispatcher
        from fla.backends.policy_files.watch import PolicyWatcher
        watcher = PolicyWatcher({str(tmp_path / 'p')!r}, 0.05, False, (), (), (), 4, default_dispatcher())
        import time; time.sleep(0.1)
    """
    done = process.run(script, timeout=60)
    assert (done.returncode, done.stderr) == (0, '')
