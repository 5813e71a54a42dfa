"""Runs tests marked `interpreted` in a child process with TRITON_INTERPRET=1, and reports each as if it had run here.

A kernel decides on import whether it is compiled or interpreted, so one process cannot do both. Each pytest process, xdist
workers included, starts one child at its first such test, and sends it one test after another until the end. If a child
dies, its test fails and the next test gets a new child. The test and its fixtures run in the child only.

To debug such a test, run it without a child: `TRITON_INTERPRET=1 pytest --pdb ...`, which skips all unmarked tests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'
_child = pytest.StashKey['_Child']()


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETING and importlib.util.find_spec('triton'):
        from tests.triton_support import interpreter

        interpreter.install()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker('interpreted'):
        item.add_marker('triton')


def pytest_runtest_setup(item: pytest.Item) -> None:
    if INTERPRETING and not item.get_closest_marker('interpreted'):
        pytest.skip('TRITON_INTERPRET=1: only tests marked interpreted')


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if INTERPRETING or not item.get_closest_marker('interpreted'):
        return None
    config = item.config
    if _child not in config.stash or not config.stash[_child].alive:
        config.stash[_child] = _Child(config, item.path)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    # Tears down fixtures that earlier tests of this process share with later ones.
    teardown = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when='teardown')
    reports = config.stash[_child].run(item, nextitem)
    if teardown.excinfo:
        reports.append(item.ihook.pytest_runtest_makereport(item=item, call=teardown))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if _child in config.stash:
        config.stash[_child].close()


class _Child:
    """The parent's end of the connection to a `_Server`."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config = config
        self.connection, theirs = Pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        options = [str(path), f'--rootdir={config.rootpath}', *(['-c', str(config.inipath)] if config.inipath else [])]
        options += [f'--tb={config.option.tbstyle}'] + ['-v'] * config.option.verbose
        options += ['--showlocals'] * config.option.showlocals + ['--runxfail'] * config.option.runxfail
        options += ['--grids=all'] * hasattr(config.option, 'grids')  # this process has chosen already
        environment = {name: value for name, value in os.environ.items() if name != 'PYTEST_ADDOPTS'}
        self.process = subprocess.Popen(
            [sys.executable, '-m', __name__, str(theirs.fileno()), *options],
            env={**environment, 'TRITON_INTERPRET': '1'},
            cwd=config.rootpath,
            pass_fds=[theirs.fileno()],
            stdout=self.errors,
            stderr=self.errors,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Returns the reports of one test. The child is sent its next test too, so that the two can share fixtures."""
        following = nextitem if nextitem is not None and nextitem.get_closest_marker('interpreted') else None
        try:
            self.connection.send([(str(i.path), i.nodeid) for i in (item, following) if i is not None])
            reports = self.connection.recv()
        except (EOFError, OSError):
            return [self._crash_report(item)]
        return [self.config.hook.pytest_report_from_serializable(config=self.config, data=data) for data in reports]

    def _crash_report(self, item: pytest.Item) -> pytest.TestReport:
        status = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read()[-4000:].decode(errors='replace')
        text = f'The interpreting process ended with status {status}. Its last output:\n{last}'
        return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), 'failed', text, 'call')

    def close(self) -> None:
        self.connection.close()
        self.process.wait()
        self.errors.close()


class _Server:
    """The child's pytest plugin, which collects a file at its first requested test."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.items: dict[str, pytest.Item] = {}
        self.collected: set[str] = set()
        self.reports: list[dict] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while True:
            try:
                wanted = self.connection.recv()
            except EOFError:
                return True
            self.reports = []
            item, nextitem = ([self._find(session, *one) for one in wanted] + [None])[:2]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self.connection.send(self.reports)

    def _find(self, session: pytest.Session, path: str, nodeid: str) -> pytest.Item:
        if path not in self.collected:
            self.collected.add(path)
            self.items.update((item.nodeid, item) for item in session.perform_collect([path]))
        return self.items[nodeid]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config


if __name__ == '__main__':
    descriptor, *options = sys.argv[1:]
    server = _Server(Connection(int(descriptor)))
    pytest.main(['-p', 'no:xdist', '-p', 'no:cacheprovider', *options], plugins=[server])
