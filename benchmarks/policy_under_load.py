"""Checks calls while policies, backends and processes change. Measures no times and needs no GPU.

    python benchmarks/policy_under_load.py [--seconds 30] [--threads 8] [--rewrites 50] [--seed 0] [--quick] [--json PATH]

Threads call a function that returns a new tensor and one that changes its argument in place. Meanwhile the policy file is
rewritten (by renaming or in place, every fifth time with an invalid policy), backends fail at random under
on_error='fallback', backends are registered and removed, and the process forks. Each call is checked: its result is right,
and exactly one backend finished it. The mutating function must change its argument once, or not at all if the call raised.

The exit status is 1 if a call was lost, doubled or wrong, if a thread or a child hangs, if an invalid file changed the
policy, or if the last file is not in force. The JSON holds `good`, the counts of calls, failures and events, and `notes`,
the first ten errors. --quick: 3 seconds, 2 threads, 6 rewrites.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _results import cores, parser, write_json

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Policy,
    default_dispatcher,
    dispatch,
    reset_policy,
    set_policy,
    watch_policy,
)

NAMES = ('steady', 'flaky', 'other')
BAD = (
    '',
    'prefer: [stedy]\n',
    'perfer: [steady]\n',
    'prefer: [steady\n',
    'allow: []\n',
    'rules:\n- ops: under_load\n  when: y.shape[0] < 3\n  use: [steady]\n',
)
local = threading.local()


class RetryableError(Exception):
    """The failure of a flaky backend; it is declared retryable."""


def make_operation(failing: float) -> tuple[Any, Any, BackendRegistry]:
    """Returns `loaded(x)`, which returns 2x, `doubled(x)`, which doubles x in place, and their registry.

    Each backend counts its runs and failures in `local`, per thread.
    """
    registry = BackendRegistry('under_load')

    @dispatch('under_load')
    def loaded(x: torch.Tensor) -> torch.Tensor:
        local.finished += 1
        return x * 2

    @dispatch('under_load', mutates=('x',))
    def doubled(x: torch.Tensor) -> None:
        local.finished += 1
        x.mul_(2)

    for name in NAMES:
        registry.register(make_backend(name, failing if name == 'flaky' else 0.0))
    return loaded, doubled, registry


def make_backend(name: str, failing: float) -> BaseBackend:
    """Returns a backend that fails with probability `failing`; the mutating function also fails after its change."""

    def fail() -> None:
        if failing and random.random() < failing:
            local.failed += 1
            raise RetryableError(name)

    def run(self: BaseBackend, x: torch.Tensor) -> torch.Tensor:
        fail()
        local.finished += 1
        return x * 2

    def in_place(self: BaseBackend, x: torch.Tensor) -> None:
        if random.random() < 0.5:
            fail()
        x.mul_(2)
        local.finished += 1
        fail()

    members = {'backend_type': name, 'retryable': (RetryableError,), 'loaded': run, 'doubled': in_place}
    return type(name, (BaseBackend,), members)()


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds, for at most 30 seconds."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


class Load:
    """The threads of a run, and their counts."""

    def __init__(self, seconds: float, threads: int, rewrites: int, seed: int) -> None:
        self.seconds, self.threads, self.rewrites = seconds, threads, rewrites
        self.random = random.Random(seed)
        self.function, self.mutating, self.registry = make_operation(failing=0.2)
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.counts = dict.fromkeys(
            (
                'calls',
                'failures',
                'mutating_calls',
                'mutating_calls_that_raised',
                'wrong',
                'lost_or_doubled',
                'errors',
                'plugins',
                'forks',
                'bad_forks',
                'bad_files',
                'bad_files_that_changed_something',
            ),
            0,
        )
        self.notes: list[str] = []

    def add(self, note: str = '', **counts: int) -> None:
        """Adds to the counts, and stores one of the first ten notes."""
        with self.lock:
            for name, count in counts.items():
                self.counts[name] += count
            if note and len(self.notes) < 10:
                self.notes.append(note)

    def call(self) -> None:
        """Calls both functions until the run stops (one thread)."""
        x = torch.arange(4.0)
        calls = failures = mutating = raised = 0
        while not self.stop.is_set():
            raised, mutating = raised + self.change(), mutating + 1
            local.finished = local.failed = 0
            try:
                result = self.function(x)
            except Exception as error:
                self.add(f'{type(error).__name__}: {error}', errors=1)
                continue
            calls, failures = calls + 1, failures + local.failed
            if not torch.equal(result, x * 2):
                self.add('wrong result', wrong=1)
            if local.finished != 1:
                self.add(f'{local.finished} runs in one call', lost_or_doubled=1)
        self.add(calls=calls, failures=failures, mutating_calls=mutating, mutating_calls_that_raised=raised)

    def change(self) -> int:
        """Calls the mutating function once; returns 1 if it raised. A failed call is not retried, as it may have
        changed x."""
        x = torch.ones(3)
        local.finished = local.failed = raised = 0
        try:
            self.mutating(x)
        except RetryableError:
            raised = 1
        except Exception as error:
            self.add(f'{type(error).__name__}: {error}', errors=1)
            return 0
        if not torch.equal(x, torch.full((3,), 2.0**local.finished)):
            self.add(f'changed to {x.tolist()} by {local.finished} runs', wrong=1)
        if local.finished > 1 or local.failed > 1 or local.failed != raised or local.finished + local.failed == 0:
            self.add(f'{local.finished} runs and {local.failed} failures in one mutating call', lost_or_doubled=1)
        return raised

    def plugins(self) -> None:
        """Registers and removes backends."""
        number = 0
        while not self.stop.wait(0.05):
            number += 1
            handle = self.registry.register(make_backend(f'guest{number % 4}', 0.1))
            time.sleep(0.02)
            handle.remove()
            self.add(plugins=1)

    def forks(self) -> None:
        """Forks children, which call the function and must end."""
        while not self.stop.wait(0.5):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    local.finished = local.failed = 0
                    x = torch.ones(2)
                    code = 0 if float((self.function(x) - 2 * x).abs().max()) == 0 and local.finished == 1 else 2
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            deadline, code = time.monotonic() + 30, None
            while code is None and time.monotonic() < deadline:
                done, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
                time.sleep(0.01)
            if code is None:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            self.add('' if code == 0 else f'child ended with {code}', forks=1, bad_forks=int(code != 0))

    def write(self, path: Path, number: int) -> str | None:
        """Writes a version of the file; returns the backend it prefers, or None for an invalid file."""
        first = NAMES[number % len(NAMES)]
        text = f'prefer: [{first}]\nrules:\n  - ops: under_load\n    when: x.shape[0] < {number + 2}\n    use: [{first}]\n'
        bad = 0 < number < self.rewrites and number % 5 == 0
        if bad:
            text = BAD[number // 5 % len(BAD)]
        if number % 2:
            path.write_text(text)
        else:
            path.with_suffix('.new').write_text(text)
            os.replace(path.with_suffix('.new'), path)
        return None if bad else first

    def run(self) -> dict[str, Any]:
        """Runs all threads at once and returns the counts."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / 'policy.yaml'
            last = self.write(path, 0)
            events: list[str] = []
            note = lambda event: events.append(event.kind)  # noqa: E731
            # not a scope: scopes of other threads end in a forked child
            set_policy(Policy(on_error='fallback'))
            with watch_policy(path, debounce=0.05, on_reload=note, on_error=note) as watcher:
                parts = [threading.Thread(target=self.call, daemon=True) for _ in range(self.threads)]
                parts += [threading.Thread(target=one, daemon=True) for one in (self.plugins, self.forks)]
                for part in parts:
                    part.start()
                for number in range(1, self.rewrites + 1):
                    time.sleep(self.seconds / self.rewrites)
                    if number % 5 == 0:  # a version still on its way would count as a change by the bad file
                        wait_for(lambda last=last: watcher.current_version().policy.prefer == (last,))
                    before, refused = watcher.current_version(), events.count('error')
                    last = self.write(path, number)
                    if last is None:
                        wait_for(lambda refused=refused: events.count('error') > refused)
                        changed = watcher.current_version() != before or events.count('error') == refused
                        self.add(bad_files=1, bad_files_that_changed_something=int(changed))
                wait_for(lambda: watcher.current_version().policy.prefer == (last,))
                self.stop.set()
                for part in parts:
                    part.join(60)
                hung = sum(part.is_alive() for part in parts)
                in_force = watcher.current_version().policy.prefer == (last,)
                served = self.function.explain(torch.ones(2)).winner
            default_dispatcher().policies.unload_file()
            reset_policy()
        return {
            **self.counts,
            'hung_threads': hung,
            'reloads': events.count('reload'),
            'refused': events.count('error'),
            'final_file_in_force': in_force,
            'last_served_by': served,
            'notes': self.notes,
        }


def is_good(found: dict[str, Any]) -> bool:
    """Whether nothing went wrong and each kind of event happened."""
    never = ('wrong', 'lost_or_doubled', 'errors', 'bad_forks', 'bad_files_that_changed_something', 'hung_threads')
    some = ('calls', 'mutating_calls', 'failures', 'refused')
    return found['final_file_in_force'] and all(found[name] for name in some) and not any(found[name] for name in never)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument('--seconds', type=float, default=30.0, help='length of the run (default: 30)')
    options.add_argument('--threads', type=int, default=8, help='threads that call (default: 8)')
    options.add_argument('--rewrites', type=int, default=50, help='rewrites of the policy file (default: 50)')
    options.add_argument('--seed', type=int, default=0, help='of the random choices (default: 0)')
    chosen = options.parse_args(argv)
    if chosen.quick:
        chosen.seconds, chosen.threads, chosen.rewrites = 3.0, 2, 6
    found = Load(chosen.seconds, chosen.threads, chosen.rewrites, chosen.seed).run()
    machine = {'cores': cores(), 'python': platform.python_version(), 'torch': torch.__version__}
    asked = {name: getattr(chosen, name) for name in ('seconds', 'threads', 'rewrites', 'seed')}
    result = {'benchmark': 'policy_under_load', 'machine': machine, 'options': asked, 'good': is_good(found), **found}
    print(json.dumps(result, indent=1))
    write_json(chosen.json, result)
    return 0 if result['good'] else 1


if __name__ == '__main__':
    sys.exit(main())
