"""Runs Python code in a process of its own, forked from a server that has already imported torch.

`python -c` spends 1 s of CPU time on `import torch` before the first line of a test runs; a fork spends 10 ms. The server
imports torch and nothing else, so that the child imports `fla` itself and reads the environment as a new process would.
Each pytest process starts one server, on first use.

A test whose subject is a cold start (what an import loads, a console script, an entry point) uses `subprocess` instead: in
the child, torch's own imports are done, and Python's variables (PYTHONHASHSEED, PYTHONWARNINGS, …) are those of the server.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]

_server: _Server | None = None


def run(
    source: str, *arguments: str, cwd: str | os.PathLike[str] = ROOT, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs source as `python -c` would; returns its output and exit status.

    Args:
        source: Python source; common indentation is removed.
        arguments: `sys.argv[1:]`.
        cwd: working directory. Modules are found in it, in `$PYTHONPATH`, and in the repository.
        timeout: seconds, after which the child's process group is killed and `subprocess.TimeoutExpired` raised.
        variables: environment variables. The others are inherited, except those that begin with `FLA_`.
    """
    global _server
    if _server is None or _server.process.poll() is not None or _server.owner != os.getpid():
        _server = _Server()
    environment = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')} | variables
    return _server.run(dedent(source), ['-c', *arguments], os.fspath(cwd), environment, timeout)


def run_module(
    name: str, *arguments: str, cwd: str | os.PathLike[str] = ROOT, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a module as `python -m` would; see `run`."""
    source = f'import runpy; runpy.run_module({name!r}, run_name="__main__", alter_sys=True)'
    return run(source, *arguments, cwd=cwd, timeout=timeout, **variables)


def run_script(
    path: str | os.PathLike[str], *arguments: str, cwd: str | os.PathLike[str] = ROOT, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a file as `python FILE` would; see `run`."""
    path = os.path.abspath(path)
    source = f"""
        import runpy, sys
        sys.argv[0], sys.path[0] = {path!r}, {os.path.dirname(path)!r}
        runpy.run_path({path!r}, run_name='__main__')
    """
    return run(source, *arguments, cwd=cwd, timeout=timeout, **variables)


class _Server:
    """The server process, seen from the tests."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.connection, theirs = Pipe()
        environment = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')}
        environment['OMP_NUM_THREADS'] = '1'
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    def run(
        self, source: str, argv: list[str], cwd: str, environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, 'out'), Path(folder, 'err')
            self.connection.send((source, argv, cwd, environment, str(out), str(err)))
            pid = self.connection.recv()
            timed_out = not self.connection.poll(timeout)
            if timed_out:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            status = self.connection.recv()
            output = [path.read_text(errors='backslashreplace') if path.exists() else '' for path in (out, err)]
        if timed_out:
            raise subprocess.TimeoutExpired(source, timeout, *output)
        return subprocess.CompletedProcess([sys.executable, *argv], status, *output)

    def close(self) -> None:
        if os.getpid() == self.owner:
            self.connection.close()
            self.process.wait()


def _serve(connection: Connection) -> tuple[str, list[str], str, dict[str, str], str, str]:
    """Forks a child for each request and waits for it; returns only in a child, with its request."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            connection.close()
            return request
        connection.send(pid)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get('PYTHONPATH', '').split(os.pathsep) if folder]


def _become(argv: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> types.ModuleType:
    """Makes the forked child look like a new process; returns its `__main__`."""
    os.setsid()
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.path[: 1 + len(_folders(os.environ))] = ['', *_folders(environment), str(ROOT)]
    sys.argv = argv
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    return main


if __name__ == '__main__':
    import gc

    import torch  # noqa: F401

    gc.freeze()  # else the last collection of a child takes 0.3 s

    _source, *_rest = _serve(Connection(int(sys.argv[1])))
    _main = _become(*_rest)
    # Not in a function: an exception, SystemExit and the interpreter's end then do what they do in any program.
    exec(compile(_source, '<string>', 'exec'), vars(_main))
