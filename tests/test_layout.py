"""Imports run down the list of rooms and close no circle, those inside functions and under TYPE_CHECKING included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fla

ROOT = Path(fla.__file__).parents[1]

# From the bottom up; a room may import those before it. A name stands for the package or module and what is inside it; the
# longest one that fits a module is its room.
ROOMS = (
    'fla.utils',
    'fla.opaque',
    'fla.backends.core',
    'fla.backends.backend',
    'fla.backends.policy',
    'fla.backends.registry',
    'fla.backends.plan',
    'fla.backends.codegen',
    'fla.backends.fallback',
    'fla.backends.runtime',
    'fla.backends.observe',
    'fla.backends.policy_files',
    'fla.backends.tuning',
    'fla.backends.lint',
    'fla.backends.cli',
    'fla.backends',  # the door
    'fla.ops.checks',
    'fla.ops.autocast',
    'fla.ops.launch',
    'fla.ops.recurrence',
    'fla.ops',
    'fla.modules',
    'fla.layers',
)
# These hand out names or start a command; nothing imports them for what they define.
FACES = ('fla', 'fla.ops', 'fla.backends.__main__')
# Rooms in which no operation may import another one.
OPERATIONS = 'fla.ops'


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / 'fla').rglob('*.py')):
        parts = path.relative_to(ROOT).with_suffix('').parts
        found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
    return found


MODULES = modules()


def imports(module: str, source: str) -> set[str]:
    """The modules of `fla` that a module's source imports, wherever in it."""
    package = module if MODULES[module].name == '__init__.py' else module.rpartition('.')[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {_known(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit('.', node.level - 1)[0] + (f'.{node.module}' if node.module else '')
            base = base if node.level else str(node.module)
            found |= {_known(f'{base}.{alias.name}') for alias in node.names}
    return found - {'', module}


def _known(name: str) -> str:
    """The longest prefix of a dotted name that is a module, '' if it is none of `fla`."""
    while name and name not in MODULES:
        name = name.rpartition('.')[0]
    return name


def room(module: str) -> int:
    fits = [name for name in ROOMS if f'{module}.'.startswith(f'{name}.')]
    assert fits, f'{module} is in no room: name its room in ROOMS'
    return ROOMS.index(max(fits, key=len))


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a higher room."""
    edges = [(a, b) for a, found in graph.items() if a not in FACES for b in found if b not in FACES]
    return [f'{a} imports {b}, which is above it' for a, b in edges if room(b) > room(a)]


def circle(graph: dict[str, set[str]]) -> str | None:
    """Modules that import each other in a circle, None if none do. A package's face only hands names on."""
    try:
        TopologicalSorter({name: found - {*FACES} for name, found in graph.items() if name not in FACES}).prepare()
    except CycleError as error:
        return ' imports '.join(reversed(error.args[1]))
    return None


def operation(module: str) -> str | None:
    parts = module.split('.')
    own = '.'.join(parts[:3])
    in_one = module.startswith(f'{OPERATIONS}.') and own not in (*ROOMS, 'fla.ops.utils')
    return own if in_one and MODULES[own].name == '__init__.py' else None


GRAPH = {name: imports(name, path.read_text(encoding='utf-8')) for name, path in MODULES.items()}


def test_imports_run_downward():
    assert not upward(GRAPH)


def test_imports_close_no_circle():
    assert circle(GRAPH) is None


def test_operations_do_not_import_each_other():
    pairs = [(a, b, operation(a), operation(b)) for a, found in GRAPH.items() for b in found]
    assert not [f'{a} imports {b}' for a, b, mine, other in pairs if mine and other and mine != other]


def test_the_framework_does_not_import_its_door():
    inside = {name: found for name, found in GRAPH.items() if name.startswith('fla.backends.') and name not in FACES}
    assert not [name for name, found in inside.items() if 'fla.backends' in found]


def test_a_wrong_import_is_seen():
    low, high = 'fla.backends.core.errors', 'fla.backends.runtime.dispatcher'
    hidden = f'def f():\n    from {high} import Dispatcher\n'
    typing = f'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {high}\n'
    relative = 'from ..runtime import dispatcher\n'
    for source in (hidden, typing, relative):
        assert imports(low, source) == {high}
        graph = {**GRAPH, low: GRAPH[low] | imports(low, source)}
        assert upward(graph) == [f'{low} imports {high}, which is above it']
        assert low in str(circle(graph))
        assert high in str(circle(graph))
