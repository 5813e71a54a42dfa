"""The test files that depend on changed files, one per line.

    pytest $(python scripts/find_dependent_tests.py fla/ops/kda/chunk.py)
    pytest $(python scripts/find_dependent_tests.py --since main)          # what differs from main, new files included
    git diff --name-only | python scripts/find_dependent_tests.py -        # names from standard input

No test is missed that imports a changed file, however far away; some are named that need not run. Prints nothing where
nothing depends on the changes (pytest then runs everything).

What counts as a use of another file, besides an import anywhere in a file:

1. the packages above an imported module, and the `conftest.py` above a test;
2. a string that names a module: `'pkg.mod:Name'`, `import_module('pkg.mod')`, `f'pkg.{name}'` (every module that fits),
   and the code in a string, as for `python -c`;
3. a string that names an operation: it stands for the operation's package and its `backends`, which dispatch imports
   by name;
4. a string that names a file or, in `ROOT / 'docs'`, a folder; in Markdown, links, files in backticks and the code;
5. `validate()` and others of `LOADS_EVERYTHING` load every operation there is; what walks over packages, as the lint does,
   imports all.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

PACKAGE, TESTS = 'fla', 'tests'
FOLDERS = (PACKAGE, TESTS, 'scripts', 'benchmarks', 'examples', 'docs')
# What the environment of every test is made from.
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
IMPORTS_ALL = f'{PACKAGE}.backends.lint.'  # in a test: it may well be run on the package

_HOLE = '\0'  # where an f-string has a value
_DOTTED = re.compile(rf'[A-Za-z_]\w*(?:\.[\w{_HOLE}]+)*\.?')
_IMPORT = re.compile(r'(?:^|[\n;\'"])\s*(?:from|import)\s+([A-Za-z_][\w.]*)')
_CODE = re.compile(r'^```python[^\n]*\n(.*?)^```', re.DOTALL | re.MULTILINE)
_MENTION = re.compile(r'\]\(([^)#\s]+)|`([\w./-]+\.\w+)')


class Tree:
    """The files under a root and who uses whom. Paths are relative to it, with slashes.

    Args:
        root: the folder that holds `fla` and `tests`.
        gone: deleted files; what still names them uses them.
    """

    def __init__(self, root: Path, gone: Iterable[str] = ()) -> None:
        self.root, self.gone = root, set(gone)
        found = [path for folder in FOLDERS for path in (root / folder).rglob('*') if path.is_file()]
        found += [path for path in root.iterdir() if path.is_file()]
        names = (path.relative_to(root).as_posix() for path in found)
        self.files = {name for name in names if '__pycache__' not in name} | self.gone
        self.modules = {_module_name(name): name for name in sorted(self.files) if name.endswith('.py')}
        self.tests = {name for name in self.files if _is_test(name) and (root / name).is_file()}

    def dependents(self, changed: Iterable[str]) -> list[str]:
        """The tests that use one of these files, directly or through others, in alphabetical order."""
        changed = set(changed)
        if any(name in EVERYTHING or self._is_data(name) for name in changed):
            return sorted(self.tests)
        users, reached, waiting = self.users, set(changed), list(changed)
        while waiting:
            for user in users.get(waiting.pop(), ()):
                if user not in reached:
                    reached.add(user)
                    waiting.append(user)
        return sorted(reached & self.tests)

    def _is_data(self, name: str) -> bool:
        """Data of the package or of the tests, which may be read in ways that are not seen here."""
        return name.split('/')[0] in (PACKAGE, TESTS) and not name.endswith(('.py', '.md'))

    @functools.cached_property
    def users(self) -> dict[str, set[str]]:
        """File → the files that use it."""
        users: dict[str, set[str]] = {}
        for name in self.files:
            for used in self.uses(name):
                users.setdefault(used, set()).add(name)
        return users

    def uses(self, name: str) -> set[str]:
        """The files that a file uses directly."""
        found: set[str] = set()
        path = self.root / name
        if name.endswith('.py'):
            if name.startswith((f'{PACKAGE}/', f'{TESTS}/')):
                found |= self.module(_module_name(name))
            if name.startswith(f'{TESTS}/'):
                found |= {f'{folder}/conftest.py' for folder in PurePosixPath(name).parents} & self.files
            if path.is_file():
                found |= _Reader(self, name).read(ast.parse(path.read_text(encoding='utf-8'), name))
        elif name.endswith('.md') and path.is_file():
            text = path.read_text(encoding='utf-8')
            for code in _CODE.findall(text):
                found |= _Reader(self, name).code(code)
            for link, mention in _MENTION.findall(text):
                # what another page says is its own affair, but it has to be there
                named = self.path(link or mention, name)
                found |= {file for file in named if file in self.gone or not file.endswith('.md')}
        return found - {name}

    def module(self, dotted: str) -> set[str]:
        """The files that importing a module runs: its own, of the longest part that is a module, and the packages above."""
        parts = dotted.split('.')
        names = ('.'.join(parts[:count]) for count in range(1, len(parts) + 1))
        return {self.modules[name] for name in names if name in self.modules}

    def below(self, package: str) -> set[str]:
        """All modules of a package."""
        return {path for name, path in self.modules.items() if f'{name}.'.startswith(f'{package}.')}

    def operation(self, name: str) -> set[str]:
        """The package of an operation and its backends; nothing for another word."""
        package = ELSEWHERE.get(name, f'{PACKAGE}.ops.{name}')
        backends = f'{package}.backends'
        return self.module(backends) if backends in self.modules else set()

    @functools.cached_property
    def operations(self) -> set[str]:
        """The backends of every operation."""
        core = f'{PACKAGE}.backends'
        packages = [m for m in self.modules if m.startswith(f'{PACKAGE}.') and m.endswith('.backends') and m != core]
        return {path for package in packages for path in self.module(package)}

    def path(self, text: str, user: str, *, folders: bool = True) -> set[str]:
        """The files that a path stands for: relative to the root, or to the file that names it; of a folder all below."""
        if not text or _HOLE in text or text.startswith('/') or len(text) > 200:
            return set()
        found = set()
        for start in (PurePosixPath('.'), PurePosixPath(user).parent):
            name = _normal(start / text)
            if name in self.files:
                found.add(name)
            elif folders and name and name not in (PACKAGE, TESTS):
                found |= {file for file in self.files if file.startswith(f'{name}/')}
        return found


class _Reader:
    """What one file uses."""

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree, self.name = tree, name
        self.found: set[str] = set()
        self.package = _module_name(name) if name.endswith('/__init__.py') else _module_name(name).rpartition('.')[0]

    def read(self, tree: ast.AST) -> set[str]:
        """The files that a syntax tree uses."""
        nodes = list(ast.walk(tree))
        skipped = set()  # docstrings, the pieces of f-strings, and the beginnings of longer paths
        for node in nodes:
            if isinstance(node, ast.Expr):
                skipped.add(id(node.value))
            elif isinstance(node, ast.JoinedStr):
                skipped.update(map(id, node.values))
            elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp):
                skipped.add(id(node.left))
        for node in nodes:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported(alias.name)
            elif isinstance(node, ast.ImportFrom):
                start = self.base(node)
                for alias in node.names:
                    self.imported(f'{start}.{alias.name}')
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.string(node.value)
            elif isinstance(node, ast.JoinedStr):
                self.string(''.join(v.value if isinstance(v, ast.Constant) else _HOLE for v in node.values))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                self.found |= self.tree.path(_joined(node), self.name)
            elif isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
                self.called(_last_name(node))
        return self.found

    def base(self, node: ast.ImportFrom) -> str:
        """The absolute module of `from … import`."""
        if not node.level:
            return node.module or ''
        parts = self.package.split('.')
        parts = parts[: len(parts) - node.level + 1]
        return '.'.join([*parts, *([node.module] if node.module else [])])

    def imported(self, dotted: str) -> None:
        """An import; a script also finds what lies beside it."""
        self.found |= self.tree.module(dotted)
        if f'{dotted}.'.startswith(IMPORTS_ALL) and self.name.startswith(f'{TESTS}/'):
            self.found |= self.tree.below(PACKAGE)
        beside = f'{PurePosixPath(self.name).parent}/{dotted.split(".")[0]}.py'
        if beside in self.tree.files and not self.name.startswith((f'{PACKAGE}/', f'{TESTS}/')):
            self.found.add(beside)

    def called(self, name: str) -> None:
        if self.name.startswith(f'{PACKAGE}/'):
            return  # the framework itself: who calls it says what is loaded
        if name in LOADS_EVERYTHING:
            self.found |= self.tree.operations
        if name in WALKS:
            self.found |= self.tree.below(PACKAGE)

    def string(self, text: str) -> None:
        """What a string may stand for."""
        if text not in ELSEWHERE or self.name.startswith(f'{PACKAGE}/'):
            self.found |= self.tree.operation(text)  # 'modules' is also a common word
        if '/' in text or '.' in text:
            self.found |= self.tree.path(text, self.name, folders='/' in text)
        if '\n' in text or 'import ' in text:
            self.code(text)
            return
        for dotted in _DOTTED.findall(text) if '.' in text else ():
            self.mentioned(dotted)

    def mentioned(self, dotted: str) -> None:
        """A dotted name in a string; with holes, or ending with a dot, every module that fits."""
        if dotted.split('.')[0] not in (PACKAGE, TESTS):
            return
        if _HOLE in dotted or dotted.endswith('.'):
            pattern = re.compile(r'[\w.]+'.join(map(re.escape, re.split(f'{_HOLE}+', dotted.rstrip('.')))))
            for name in self.tree.modules:
                if pattern.fullmatch(name) or (dotted.endswith('.') and name.startswith(dotted)):
                    self.found |= self.tree.module(name)
            dotted = dotted.split(_HOLE)[0].rstrip('.')
        self.found |= self.tree.module(dotted)
        self.found |= {self.tree.modules[name] for name in (f'{dotted}.__main__',) if name in self.tree.modules}

    def code(self, text: str) -> set[str]:
        """A string that may be a program, or part of one."""
        code = textwrap.dedent(text).replace(_HOLE, '_')
        try:
            self.read(ast.parse(code))
        except (SyntaxError, ValueError):
            for dotted in _IMPORT.findall(text):
                self.imported(dotted)
            for dotted in _DOTTED.findall(text):
                self.mentioned(dotted)
            for word in re.findall(r'[\'"]([\w.]+)[\'"]', text):
                self.found |= self.tree.operation(word)
            for word in re.findall(r'\w+', text):
                self.called(word)
        return self.found


def _module_name(path: str) -> str:
    return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def _is_test(path: str) -> bool:
    return path.startswith(f'{TESTS}/') and PurePosixPath(path).name.startswith('test_') and path.endswith('.py')


def _last_name(node: ast.Name | ast.Attribute | ast.alias) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else node.name


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
