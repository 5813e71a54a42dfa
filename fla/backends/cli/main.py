"""The command line: `python -m fla.backends COMMAND`.

Exit codes: 0 no problems, 1 findings or problems, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError
from fla.backends.lint import REGISTRY_RULES, SOURCE_RULES
from fla.backends.lint.linter import run
from fla.backends.observe.describe import describe, problems, snapshot
from fla.backends.policy.environment import VARIABLES
from fla.backends.policy_files.load import PolicyFileError, read_version
from fla.backends.runtime.dispatcher import Dispatcher, default_dispatcher
from fla.backends.runtime.freeze import manifest
from fla.utils.devices import PLATFORMS
from fla.utils.owners import OURS, TOP, conflict


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    dispatcher = default_dispatcher()
    if dispatcher.baseline and options.command is not _env:
        name = dispatcher.environment.name('DISABLE_BACKEND_DISPATCH')
        parser.error(f'{name} is set, so nothing is dispatched; unset it')
    try:
        code: int = options.command(dispatcher, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has stopped, as in `… | head`; the rest of the output must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except DispatchError as error:
        parser.error(str(error))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m fla.backends',
        description='Look at backend dispatch: what is registered, what is wrong, what the environment sets.',
        epilog='Exit codes: 0 no problems, 1 findings or problems, 2 wrong usage.',
    )
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', required=True)

    def command(name: str, run: Any, text: str, more: str = '') -> argparse.ArgumentParser:
        description = f'{text[0].upper()}{text[1:]}.{more}'
        layout = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=text, description=description, formatter_class=layout)
        made.set_defaults(command=run)
        return made

    lint = command(
        'lint',
        _lint,
        'find mistakes in backends, for their authors',
        '\n\nA package is read, and imported to ask its registries; a path is only read.\n'
        'A comment on its line, or on a line of its own above it, allows a finding:\n'
        '    # lint: allow RULE because REASON',
    )
    lint.add_argument('targets', nargs='*', metavar='package-or-path', help='default: the package of fla itself')
    lint.add_argument('--json', action='store_true', help='findings as a JSON list')
    lint.add_argument('--rules', action='store_true', help='list the rules and stop')
    table = command('describe', _describe, 'show functions with their candidates by priority, and policies')
    table.add_argument('operation', nargs='?', help="such as 'kda'; default: all")
    command('validate', _validate, 'list problems that need no call; loads every operation and plugin')
    files = command('check', _check, 'check policy files as load_policy() would, and put none in force')
    files.add_argument('files', nargs='+', metavar='FILE')
    registries = command('snapshot', _snapshot, 'show every registry with its backends and where each was registered')
    registries.add_argument('--json', action='store_true', help='as JSON')
    command('plugins', _plugins, 'list the plugins that were found, with version and error')
    command('env', _env, 'list every environment variable with its value and effect, and other owners of files of fla')
    choices = command('manifest', _manifest, 'write what every function would choose, as JSON with a sha256')
    choices.add_argument('--out', metavar='FILE', help='default: standard output')
    text = 'platform to answer for, may be given several times; default: cpu'
    choices.add_argument('--platform', dest='platforms', action='append', choices=PLATFORMS, help=text)
    return parser


# -- commands --------------------------------------------------------------------------------------------------------------


def _lint(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    if options.rules:
        for title, rules in (('found in source', SOURCE_RULES), ('found by importing', REGISTRY_RULES)):
            print(f'{title}:')
            _print_table([(f'  {name}', text) for name, text in rules.items()])
        return 0
    # warnings of loading are among the findings; FLA_LOG_LEVEL shows them
    logs.set_threshold(logging.CRITICAL)
    found = run(options.targets or [dispatcher.namespace.split('.')[0]])
    if options.json:
        print(json.dumps([finding.to_dict() for finding in found], indent=1))
    else:
        for finding in found:
            print(finding)
    print(f'{len(found) or "no"} finding{"" if len(found) == 1 else "s"}', file=sys.stderr)
    return 1 if found else 0


def _describe(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    print(describe(dispatcher, options.operation))
    return 0


def _validate(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    logs.set_threshold(logging.CRITICAL)
    found = problems(dispatcher)
    for problem in found:
        print(problem)
    print(f'{len(found) or "no"} problem{"" if len(found) == 1 else "s"}', file=sys.stderr)
    return 1 if found else 0


def _check(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    bad = False
    for file in options.files:
        try:
            made = read_version(file, dispatcher)
        except PolicyFileError as error:
            bad = True
            print('\n'.join(error.errors))
        except (OSError, ImportError) as error:
            bad = True
            print(f'{file}: {error}')
        else:
            print(f'{file}: no problems, sha256 {made.sha256}', file=sys.stderr)
    return int(bad)


def _snapshot(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    dispatcher.discovery.load_all()
    picture = snapshot(dispatcher)
    if options.json:
        print(json.dumps(_plain(picture), indent=1))
        return 0
    for operation, backends in picture.items():
        print(operation)
        _print_table([(f'  {name}', *(f'{k}={v}' for k, v in facts.items())) for name, facts in backends.items()])
    return 0


def _plain(value: Any) -> Any:
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _plugins(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    found = dispatcher.plugins()
    if not found:
        where = f'entry points of group {dispatcher.discovery.group}, {dispatcher.environment.name("PLUGIN_MODULES")}'
        print(f'no plugins (looked for: {where})')
    _print_table([(p.name, p.version or '-', p.source, f'failed: {p.error}' if p.error else 'loaded') for p in found])
    return 1 if any(plugin.error for plugin in found) else 0


def _env(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    environment = dispatcher.environment
    rows = [('variable', 'read', 'value', 'effect')]
    for short, (when, effect) in VARIABLES.items():
        rows.append((environment.name(short), when, _value(environment.name(short)), effect))
    for old, new in environment.retired.items():
        rows.append((old, 'as its successor', _value(old), f'retired: set {new}'))
    if not dispatcher.baseline:
        dispatcher.discovery.load_all()
        rows += [(name, 'each call', _value(name), text) for name, text in sorted(_toggles(dispatcher).items())]
        dispatcher.policies.check_environment()
    _print_table(rows)
    # the version in the source: metadata may belong to another installation
    version = getattr(sys.modules[TOP], '__version__', 'of unknown version')
    print(f'{OURS} {version} at {Path(__file__).parents[3]}')
    other = conflict()
    print(other or f'no other distribution owns files under {TOP}/')
    return 1 if other else 0


def _toggles(dispatcher: Dispatcher) -> dict[str, str]:
    """Returns for each toggle the backends that it switches, and whether they are on while it is unset."""
    users: dict[str, list[str]] = {}
    for operation, registry in sorted(dispatcher.registries.items()):
        for backend in registry:
            for name in dispatcher.toggles.variables(backend):
                default = vars(type(backend)).get('default_enable', type(backend).default_enable)
                unset = 'by hardware' if callable(default) else 'on' if default else 'off'
                text = f'{operation}.{backend.backend_type}'
                users.setdefault(name, []).append(f'{text} (unset: {unset})' if name == backend.env_var else text)
    return {name: f'boolean: switches {", ".join(dict.fromkeys(backends))}' for name, backends in users.items()}


def _value(name: str) -> str:
    value = os.environ.get(name)
    return '(unset)' if value is None else repr(value)


def _manifest(dispatcher: Dispatcher, options: argparse.Namespace) -> int:
    made = manifest(dispatcher, platforms=tuple(options.platforms or ()))
    if options.out:
        try:
            made.save(options.out)
        except OSError as error:
            print(f'cannot write {options.out}: {error.strerror}', file=sys.stderr)
            return 2
        print(f'{options.out}: sha256 {made.sha256}', file=sys.stderr)
    else:
        print(json.dumps(made, indent=1, sort_keys=True))
    return 0


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    """Prints columns as wide as their widest cell; the last one is not padded."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print('  '.join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]))
