"""Lists the test files that depend on changed files, one per line.

    pytest $(python scripts/find_dependent_tests.py fla/ops/kda/chunk.py)
    pytest $(python scripts/find_dependent_tests.py --since main)          # what differs from main, new files included
    git diff --name-only | python scripts/find_dependent_tests.py -        # names from standard input

A test depends on a file if it can run a function of that file. Prints nothing if no test depends on the changes (pytest then
runs everything).

The search follows names, not files. A test depends on its own file, on each top-level name that it uses, and on the names
which the definition of that name uses. `from fla.backends import measure` therefore leads to the file that defines
`measure`, and not to the rest of the framework. Rules:

1. A re-exported name leads through the re-exporting file to the definition.
2. A module whose names are not written out (`import_module(...)`, a module passed as a value) counts with all its names.
3. A method of a class in a `backends` folder counts if its class counts and its name occurs anywhere: as an attribute, as a
   function or in a string. Methods of other classes count with their class.
4. The packages above a module count, without their names. So do the `conftest.py` files above a test, as a whole.
5. A string is a use if it names a module (`'pkg.mod:Name'`, `f'pkg.{name}'`: every module that fits), an operation (its
   backends, which dispatch imports by name), a file or folder (`ROOT / 'docs'`), or holds code, as for `python -c`.
6. In Markdown, links, files in backticks, and code count.
7. `validate()` and others in `LOADS_EVERYTHING` load every operation; what walks packages, such as the lint, imports all.
8. A file that the door hands in to a lower room (`HANDED_IN`) counts with that room's file.

A file that is imported but not used does not select a test: if it fails to import, the tests that use it show that.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

PACKAGE, TESTS = 'fla', 'tests'
CORE = f'{PACKAGE}/backends/'
FOLDERS = (PACKAGE, TESTS, 'scripts', 'benchmarks', 'examples', 'docs')
# Files that shape the environment of every test.
EVERYTHING = ('pyproject.toml', 'Makefile', 'constraints.txt', '.ci/run')
# Operations whose backends are not in `fla.ops.<operation>.backends`: `_OPERATION_BACKEND_MODULES` of fla.backends.
ELSEWHERE = {'modules': f'{PACKAGE}.modules'}
# Names of fla.backends that import the backends of every operation. An unknown name is answered with all known ones.
LOADS_EVERYTHING = {
    'UnknownNameError',
    'describe',
    'freeze_dispatch',
    'load_all',
    'manifest',
    'require_manifest',
    'validate',
}
WALKS = {'iter_modules', 'walk_packages'}
# What the door hands in to a lower room, which may not import it: `Dispatcher.policy_reader` and `Dispatcher.before_reset`.
HANDED_IN = {f'{CORE}runtime/policy_stack.py': (f'{CORE}policy_files/load.py', f'{CORE}policy_files/watch.py')}
IMPORTS_ALL = f'{PACKAGE}.backends.lint.'  # in a test: the lint may run on the package

_SUFFIX = re.compile('_(verifier|prefers)$')  # dispatch finds these methods by the name of the function
_HOLE = '\0'  # where an f-string has a value
_DOTTED = re.compile(rf'[A-Za-z_]\w*(?:\.[\w{_HOLE}]+)*\.?')
_NAMED = re.compile(r'([A-Za-z_][\w.]*):(\w+)')
_IMPORT = re.compile(r'(?:^|[\n;\'"])\s*(?:from|import)\s+([A-Za-z_][\w.]*)')
_CODE = re.compile(r'^```python[^\n]*\n(.*?)^```', re.DOTALL | re.MULTILINE)
_MENTION = re.compile(r'\]\(([^)#\s]+)|`([\w./-]+\.\w+)')


class Use(NamedTuple):
    """A name of a file; the file as a whole (`*`); or the file alone, without its names (empty)."""

    file: str
    name: str = ''


WHOLE = '*'
Uses = frozenset[Use]


class Piece(NamedTuple):
    """The uses of one definition or statement, and the words in it that may name a method."""

    uses: Uses
    words: frozenset[str]


class Tree:
    """The files under a root, and which tests use which files. Paths are relative to the root, with slashes.

    Args:
        root: the folder that holds `fla` and `tests`.
        gone: deleted files; a file that still names one uses it.
    """

    def __init__(self, root: Path, gone: Iterable[str] = ()) -> None:
        self.root, self.gone = root, set(gone)
        found = [path for folder in FOLDERS for path in (root / folder).rglob('*') if path.is_file()]
        found += [path for path in root.iterdir() if path.is_file()]
        names = (path.relative_to(root).as_posix() for path in found)
        self.files = {name for name in names if '__pycache__' not in name} | self.gone
        self.modules = {_module_name(name): name for name in sorted(self.files) if name.endswith('.py')}
        self.tests = {name for name in self.files if _is_test(name) and (root / name).is_file()}
        self.source = functools.cache(lambda name: Source(self, name))

    def dependents(self, changed: Iterable[str]) -> list[str]:
        """The tests that use one of these files, in alphabetical order."""
        changed = set(changed)
        if any(name in EVERYTHING or self._is_data(name) for name in changed):
            return sorted(self.tests)
        return sorted(test for test in self.tests if not changed.isdisjoint(self.used(test)))

    def _is_data(self, name: str) -> bool:
        """Data of the package or of the tests, which may be read in ways that this search does not see."""
        return name.split('/')[0] in (PACKAGE, TESTS) and not name.endswith(('.py', '.md'))

    @functools.cache  # noqa: B019
    def used(self, test: str) -> frozenset[str]:
        """The files that a test uses, directly or through others, its own included."""
        reached: set[Use] = set()
        words: set[str] = set()
        unnamed: dict[str, list[Piece]] = defaultdict(list)  # methods of reached classes, until their names occur
        folders = PurePosixPath(test).parents
        waiting = [Use(name, WHOLE) for name in {f'{folder}/conftest.py' for folder in folders} & self.files]
        waiting.append(Use(test, WHOLE))
        while waiting:
            use = waiting.pop()
            if use in reached:
                continue
            reached.add(use)
            if use.name:
                waiting += [Use(file, WHOLE) for file in HANDED_IN.get(use.file, ()) if file in self.files]
            pieces, methods = self.source(use.file).pieces(use.name)
            for name, piece in methods:
                (pieces if name in words else unnamed[name]).append(piece)
            while pieces:
                piece = pieces.pop()
                waiting += piece.uses - reached
                for word in piece.words - words:
                    pieces += unnamed.pop(word, ())
                words |= piece.words
        return frozenset(use.file for use in reached)

    def module(self, dotted: str, name: str = '') -> set[Use]:
        """A module, of the longest part that is one, with the packages above. Parts that are left are a name in it."""
        parts = dotted.split('.')
        names = ('.'.join(parts[:count]) for count in range(1, len(parts) + 1))
        known = [name for name in names if name in self.modules]
        found = {Use(self.modules[name]) for name in known}
        if known:
            rest = parts[known[-1].count('.') + 1 :]
            if rest or name:
                found |= self.attribute(known[-1], rest[0] if rest else name)
        return found

    def whole(self, dotted: str) -> set[Use]:
        """A module with all its names, or one name if `dotted` goes further than a module."""
        if dotted in self.modules:
            return self.module(dotted) | {Use(self.modules[dotted], WHOLE)}
        return self.module(dotted)

    def attribute(self, module: str, name: str) -> set[Use]:
        """The uses that `name` of a module leads to. A name that is not found statically stands for the whole module."""
        file = self.modules[module]
        source = self.source(file)
        if name == WHOLE:
            return {Use(file, WHOLE)}
        if source.has(name):
            return {Use(file, name)}
        if f'{module}.{name}' in self.modules:
            return self.whole(f'{module}.{name}')
        if name.startswith('__') and name.endswith('__') and not source.computed:
            return set()
        return {Use(file, WHOLE)}

    def below(self, package: str) -> set[Use]:
        """All modules of a package."""
        return {Use(path, WHOLE) for name, path in self.modules.items() if f'{name}.'.startswith(f'{package}.')}

    def operation(self, name: str) -> set[Use]:
        """The package of an operation and its backends; nothing for another word."""
        package = ELSEWHERE.get(name, f'{PACKAGE}.ops.{name}')
        return self.whole(f'{package}.backends') if f'{package}.backends' in self.modules else set()

    @functools.cached_property
    def operations(self) -> set[Use]:
        """The backends of every operation, and the files that declare its functions: not what the functions call."""
        frameworks = (f'{PACKAGE}.backends', f'{PACKAGE}.ops.backends')  # itself, and its other name
        found: set[Use] = set()
        for module in self.modules:
            package, _, last = module.rpartition('.')
            if last == 'backends' and module.startswith(f'{PACKAGE}.') and module not in frameworks:
                found |= self.whole(module)
                for use in self.source(self.modules[package]).scope.everything():
                    found |= {Use(use.file)} | self.source(use.file).decorators()
        return found

    def path(self, text: str, user: str, *, folders: bool = True) -> set[Use]:
        """The files that a path stands for, from the root or from the file that names it; of a folder, all below."""
        if not text or _HOLE in text or text.startswith('/') or len(text) > 200:
            return set()
        found = set()
        for start in (PurePosixPath('.'), PurePosixPath(user).parent):
            name = _normal(start / text)
            if name in self.files:
                found.add(name)
            elif folders and name and name not in (PACKAGE, TESTS):
                found |= {file for file in self.files if file.startswith(f'{name}/')}
        return {Use(name, WHOLE) for name in found}


class Source:
    """One file: its top-level names and what each uses."""

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree, self.name = tree, name
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        self.statements: list[ast.stmt] = []  # at top level, and no definition: they run if anything of the file is used
        path = tree.root / name
        body = ast.parse(path.read_text(encoding='utf-8'), name).body if name.endswith('.py') and path.is_file() else []
        self.scope = Scope(tree, name, body)
        self._sort(body)
        self.computed = '__getattr__' in self.definitions
        self._pieces = functools.cache(self._read)

    def _sort(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.definitions[node.name].append(node)
            elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
                blocks = [getattr(node, part, []) for part in ('body', 'orelse', 'finalbody')]
                blocks += [handler.body for handler in getattr(node, 'handlers', [])]
                for block in blocks:
                    self._sort(block)
                self.statements += [ast.Expr(value) for value in ast.iter_child_nodes(node) if isinstance(value, ast.expr)]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                stored = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                plain = all(isinstance(target, (ast.Name, ast.Tuple, ast.List)) for target in targets)
                for name in stored if plain else ():
                    self.definitions[name].append(node)
                if not plain:
                    self.statements.append(node)
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                self.statements.append(node)

    def decorators(self) -> set[Use]:
        """The uses that the names in the decorators of functions lead to, such as a verifier of the default."""
        functions = (node for nodes in self.definitions.values() for node in nodes if isinstance(node, ast.FunctionDef))
        parts = (part for node in functions for decorator in node.decorator_list for part in ast.walk(decorator))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        return {use for name in names for use in self.scope.resolve(name) or {Use(self.name, name)}}

    def has(self, name: str) -> bool:
        """Whether the file defines or imports a name; a package that imports its own module does not count."""
        own = (_module_name(self.name), name)
        return (
            name in self.definitions or bool(self.scope.names.get(name, set()) - {own}) or bool(self.scope.from_star(name))
        )

    def pieces(self, name: str) -> tuple[list[Piece], list[tuple[str, Piece]]]:
        """What a name stands for: pieces that count with it, and methods, which count if their names occur."""
        pieces, methods = self._pieces(name)
        return list(pieces), methods

    def _read(self, name: str) -> tuple[list[Piece], list[tuple[str, Piece]]]:
        packages = self.tree.module(_module_name(self.name)) if self.name.startswith((f'{PACKAGE}/', f'{TESTS}/')) else set()
        if name == '':
            return [Piece(frozenset(packages), frozenset())], []
        pieces, methods = [Piece(frozenset({Use(self.name), *packages}), frozenset())], []
        if name == WHOLE:
            if self.name.endswith('.md'):
                return [self._page()], []
            uses = {Use(self.name, other) for other in self.definitions}
            pieces.append(Piece(frozenset(uses | self.scope.everything()), frozenset(self.scope.names)))
        elif name not in self.definitions:
            pieces.append(Piece(frozenset(self.scope.resolve(name)), frozenset({name})))
        nodes = self.definitions.get(name, [])
        for node in [*nodes, *self.statements]:
            if isinstance(node, ast.ClassDef) and '/backends/' in self.name and not _is_called_by_torch(node):
                named = [n for n in node.body if isinstance(n, ast.FunctionDef) and not re.fullmatch('__.*__', n.name)]
                kept = [n for n in node.body if n not in named]
                methods += [(_SUFFIX.sub('', part.name), self.scope.piece(part)) for part in named]
                head = [*node.bases, *node.decorator_list, *(keyword.value for keyword in node.keywords)]
                pieces += [self.scope.piece(part) for part in [*kept, *head]]
            else:
                pieces.append(self.scope.piece(node))
        return pieces, methods

    def _page(self) -> Piece:
        """A page of Markdown. What another page says is not its concern, but the link must lead somewhere."""
        path = self.tree.root / self.name
        text = path.read_text(encoding='utf-8') if path.is_file() else ''
        uses: set[Use] = set()
        for code in _CODE.findall(text):
            uses |= self.scope.code(code).uses
        for link, mention in _MENTION.findall(text):
            for use in self.tree.path(link or mention, self.name):
                if use.file in self.tree.gone or not use.file.endswith('.md'):
                    uses.add(Use(use.file))
        return Piece(frozenset(uses), frozenset())


class Scope:
    """The imports of a file or of a program in a string, anywhere in it, and what its names lead to."""

    def __init__(self, tree: Tree, file: str, body: list[ast.stmt]) -> None:
        self.tree, self.file = tree, file
        dotted = _module_name(file)
        self.package = dotted if file.endswith('/__init__.py') else dotted.rpartition('.')[0]
        self.names: dict[str, set[tuple[str, str]]] = defaultdict(set)  # → modules, each with a name in it or ''
        self.stars: list[str] = []
        self.imported: set[Use] = set()
        nodes = [node for statement in body for node in _walk(statement)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split('.')[0]
                    self.names[alias.asname or top].add((self._beside(alias.name if alias.asname else top), ''))
                    self._import(self._beside(alias.name), alone=(alias.asname or top) not in used)
            elif isinstance(node, ast.ImportFrom):
                start = self._base(node)
                for alias in node.names:
                    if alias.name == '*':
                        self.stars.append(start)
                    else:
                        self.names[alias.asname or alias.name].add((start, alias.name))
                    self._import(f'{start}.{alias.name}', alone=False)

    def _base(self, node: ast.ImportFrom) -> str:
        """The absolute module of `from … import`."""
        if not node.level:
            return self._beside(node.module or '')
        parts = self.package.split('.')
        parts = parts[: len(parts) - node.level + 1]
        return '.'.join([*parts, *([node.module] if node.module else [])])

    def _beside(self, dotted: str) -> str:
        """A script finds the modules in its own folder."""
        beside = f'{self.package}.{dotted}'
        is_script = not self.file.startswith((f'{PACKAGE}/', f'{TESTS}/'))
        return beside if is_script and f'{self.package}.{dotted.split(".")[0]}' in self.tree.modules else dotted

    def _import(self, dotted: str, *, alone: bool) -> None:
        """Notes an import; one whose name is not used (`alone`) is for its effect."""
        if alone:
            self.imported |= self.tree.whole(dotted)
        if f'{dotted}.'.startswith(IMPORTS_ALL) and self.file.startswith(f'{TESTS}/'):
            self.imported |= self.tree.below(PACKAGE)
        if not self.file.startswith(f'{PACKAGE}/'):
            self.imported |= self._loads(dotted.rpartition('.')[2])

    def everything(self) -> set[Use]:
        """All that is imported. A test uses a module that it imports only by the names that it writes out."""
        uses = set(self.imported)
        for targets in self.names.values():
            for module, name in targets:
                found = self.tree.module(module, name)
                is_module = f'{module}.{name}'.rstrip('.') in self.tree.modules
                uses |= {Use(use.file) for use in found} if is_module and self.file.startswith(f'{TESTS}/') else found
        return uses.union(*(self.tree.whole(star) for star in self.stars))

    def resolve(self, name: str) -> set[Use]:
        """What an imported name leads to; nothing if it is not imported, or from outside."""
        found: set[Use] = set()
        for module, attribute in self.names.get(name, ()):
            found |= self.tree.module(module, attribute) if attribute else self.tree.module(module)
        return found or self.from_star(name)

    def from_star(self, name: str) -> set[Use]:
        """What a name leads to that `from … import *` may bring."""
        stars = [star for star in self.stars if star in self.tree.modules]
        return {
            use
            for star in stars
            if self.tree.source(self.tree.modules[star]).has(name)
            for use in self.tree.module(star, name)
        }

    def dotted(self, node: ast.expr) -> set[Use]:
        """What `a.b.c` leads to."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or not (self.stars or node.id in self.names):
            return set()
        parts.reverse()
        found: set[Use] = set()
        for module, attribute in self.names.get(node.id, ()):
            rest = [attribute, *parts] if attribute else [*parts]
            while rest and f'{module}.{rest[0]}' in self.tree.modules and not self._holds(module, rest[0]):
                module = f'{module}.{rest.pop(0)}'
            found |= self.tree.module(module, rest[0]) if rest else self.tree.whole(module)
        return found or self.resolve(node.id)

    def _holds(self, module: str, name: str) -> bool:
        """Whether a package has something else under the name of its module."""
        return module in self.tree.modules and name in self.tree.source(self.tree.modules[module]).definitions

    def piece(self, tree: ast.AST) -> Piece:
        """What a syntax tree uses."""
        uses: set[Use] = set()
        words: set[str] = set()
        definitions = self.tree.source(self.file).definitions if self.file in self.tree.files else {}
        nodes = list(_walk(tree))
        annotations: set[int] = set()  # of functions: they are not evaluated
        skipped = set()  # docstrings, parts of f-strings and of longer paths and dotted names
        for node in nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                skipped.add(id(node.value))
            elif isinstance(node, ast.JoinedStr):
                skipped.update(map(id, node.values))
            elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp):
                skipped.add(id(node.left))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
                skipped.add(id(node.value))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and self.file.startswith(f'{PACKAGE}/'):
                annotations.update(id(part) for note in _annotations(node) for part in ast.walk(note))
        for node in nodes:
            if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in annotations:
                name = node.id if isinstance(node, ast.Name) else node.attr
                words.add(name)
                if not self.file.startswith(f'{PACKAGE}/'):
                    uses |= self._loads(name)
                if isinstance(node, ast.Name) and name in definitions:
                    uses.add(Use(self.file, name))
                if id(node) not in skipped:
                    uses |= self.dotted(node)
            elif id(node) in skipped or id(node) in annotations:
                continue
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.string(node.value, uses, words)
            elif isinstance(node, ast.JoinedStr):
                text = ''.join(str(v.value) if isinstance(v, ast.Constant) else _HOLE for v in node.values)
                self.string(text, uses, words)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                uses |= self.tree.path(_joined(node), self.file)
        return Piece(frozenset(uses), frozenset(words))

    def _loads(self, name: str) -> set[Use]:
        """What a name loads by its meaning, wherever it is used."""
        if name in LOADS_EVERYTHING:
            return self.tree.operations
        return self.tree.below(PACKAGE) if name in WALKS else set()

    def string(self, text: str, uses: set[Use], words: set[str]) -> None:
        """Adds what a string may stand for."""
        words.update(re.findall(r'\w+', text))
        if self.file.startswith(CORE):
            text = text if text.startswith(PACKAGE + '.backends.') else ''  # its caller says which operations are loaded
        if text not in ELSEWHERE or self.file.startswith(f'{PACKAGE}/'):  # 'modules' is also a common word
            uses |= self.tree.operation(text)
            package = f'{PACKAGE}.ops.{text}'
            if not self.file.startswith(f'{PACKAGE}/') and package in self.tree.modules:
                uses |= self.tree.whole(package)
        if '/' in text or '.' in text:
            uses |= self.tree.path(text, self.file, folders='/' in text)
        if '\n' in text or 'import ' in text:
            piece = self.code(text)
            uses |= piece.uses
            words |= piece.words
        else:
            for dotted in _DOTTED.findall(_NAMED.sub(r'\1.\2', text)) if '.' in text else ():
                if _HOLE not in dotted or dotted == text:  # a message about some module is not a use of all
                    uses |= self.mentioned(dotted)

    def mentioned(self, dotted: str) -> set[Use]:
        """A dotted name in a string; with holes, or ending with a dot, every module that fits."""
        if dotted.split('.')[0] not in (PACKAGE, TESTS, 'examples', 'benchmarks', 'scripts'):
            return set()
        uses: set[Use] = set()
        if _HOLE in dotted or dotted.endswith('.'):
            pattern = re.compile(r'[\w.]+'.join(map(re.escape, re.split(f'{_HOLE}+', dotted.rstrip('.')))))
            for name in self.tree.modules:
                if pattern.fullmatch(name) or (dotted.endswith('.') and name.startswith(dotted)):
                    uses |= self.tree.whole(name)
            dotted = dotted.split(_HOLE)[0].rstrip('.')
        uses |= self.tree.whole(dotted)
        return uses | (self.tree.whole(f'{dotted}.__main__') if f'{dotted}.__main__' in self.tree.modules else set())

    def code(self, text: str) -> Piece:
        """A string that may be a program, or part of one."""
        code = textwrap.dedent(text).replace(_HOLE, '_')
        try:
            body = ast.parse(code).body
        except (SyntaxError, ValueError):
            uses: set[Use] = set()
            for dotted in _IMPORT.findall(text):
                uses |= self.tree.whole(dotted)
            for dotted in _DOTTED.findall(text):
                uses |= self.mentioned(dotted)
            for word in re.findall(r'[\'"]([\w.]+)[\'"]', text):
                uses |= self.tree.operation(word)
            for word in re.findall(r'\w+', text):
                uses |= self._loads(word) if not self.file.startswith(f'{PACKAGE}/') else set()
            return Piece(frozenset(uses), frozenset(re.findall(r'\w+', text)))
        inner = Scope(self.tree, self.file, body)
        pieces = [inner.piece(node) for node in body]
        uses = inner.everything().union(*(piece.uses for piece in pieces))
        return Piece(frozenset(uses), frozenset().union(*(piece.words for piece in pieces)))


def _module_name(path: str) -> str:
    return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def _is_test(path: str) -> bool:
    return path.startswith(f'{TESTS}/') and PurePosixPath(path).name.startswith('test_') and path.endswith('.py')


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk`, at half the time: without `Load` and `Store`, and in another order."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                waiting += [part for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                waiting.append(value)


def _is_called_by_torch(node: ast.ClassDef) -> bool:
    """Whether PyTorch calls methods of a class: an `autograd.Function`, a `Module`."""
    return any(ast.unparse(base).endswith(('Function', 'Module', 'Mode')) for base in node.bases)


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    notes = [argument.annotation for argument in given if argument is not None]
    return [note for note in [*notes, node.returns] if note is not None]


def _joined(node: ast.expr) -> str:
    """`ROOT / 'a' / 'b'` is 'a/b'; empty where a part is not known."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ''
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
        return ''
    last = _joined(node.right)
    first = _joined(node.left) if isinstance(node.left, ast.BinOp) else ''
    return f'{first}/{last}' if first and last else last


def _normal(path: PurePosixPath) -> str:
    """Without '.' and '..'; empty for the root and what lies outside."""
    parts: list[str] = []
    for part in path.parts:
        if part == '..':
            if not parts:
                return ''
            parts.pop()
        elif part != '.':
            parts.append(part)
    return '/'.join(parts)


def changed_since(revision: str, root: Path = ROOT) -> list[str]:
    """What differs between a revision and the working tree: changed, new, deleted; a moved file counts as both."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(['git', *arguments, '-z'], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f'git {" ".join(arguments)}: {done.stderr.strip()}')
        return [name for name in done.stdout.split('\0') if name]

    changed = git('diff', '--name-only', '--no-renames', '--relative', revision)
    return sorted({*changed, *git('ls-files', '--others', '--exclude-standard')})


def relative(names: Iterable[str], root: Path = ROOT) -> Iterator[str]:
    """Names as given, from the root or from the working directory, as paths relative to the root."""
    for name in names:
        path = Path(name)
        here = path if path.is_absolute() else root / path
        if not here.exists() and path.resolve().exists():
            here = path.resolve()
        try:
            yield _normal(PurePosixPath(here.relative_to(root).as_posix()))
        except ValueError:
            raise SystemExit(f'{name} is not in {root}') from None


def find(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """The tests that depend on these files, which may be new, changed or deleted. A folder stands for all its files."""
    names = set(changed)
    for folder in [name for name in names if (root / name).is_dir()]:
        names |= {path.relative_to(root).as_posix() for path in (root / folder).rglob('*') if path.is_file()} - {folder}
    return Tree(root, gone=[name for name in names if not (root / name).exists()]).dependents(names)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('files', nargs='*', metavar='FILE', help='changed, new or deleted; - for standard input')
    parser.add_argument('--since', metavar='REV', help='what differs from this revision')
    options = parser.parse_args(arguments)
    if not options.files and options.since is None:
        parser.error('name files, - for standard input, or --since REV')
    names = [name for name in options.files if name != '-']
    if '-' in options.files:
        names += sys.stdin.read().splitlines()
    changed = set(relative(name for name in names if name.strip()))
    if options.since is not None:
        changed |= set(changed_since(options.since))
    for test in find(changed):
        print(test)
    return 0


if __name__ == '__main__':
    sys.exit(main())
