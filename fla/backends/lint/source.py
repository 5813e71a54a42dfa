"""The source files of a lint run, parsed, and what their names refer to. Imports none of them."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fla.backends.lint.findings import Finding, allowances

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

VERIFIER_SUFFIXES = ('_verifier', '_prefers')


@dataclass(eq=False)
class Source:
    """One file.

    Attributes:
        module: its dotted name.
        package: the lint target it belongs to, None for a path.
        imports: local name → dotted name of the import.
        defined: module-level functions and classes by name.
    """

    file: Path
    module: str
    package: str | None
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    defined: dict[str, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    top = name.name.split('.')[0]
                    self.imports[name.asname or top] = name.name if name.asname else top
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                self.imports.update({name.asname or name.name: f'{origin}.{name.name}' for name in node.names})
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self.defined.update({node.name: node for node in self.tree.body if isinstance(node, kinds)})

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ''
        up = node.level - (self.file.stem == '__init__')
        parts = self.module.split('.')
        return '.'.join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def dotted(self, node: ast.AST) -> str:
        """Returns the full name of an expression, such as `torch.cuda.is_available`, whatever the file imports it as; '' if
        it is not a dotted name."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f'{owner}.{node.attr}' if owner else ''
        return ''

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yields every class in the file."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def calls(self) -> Iterator[ast.Call]:
        """Yields every call in the file."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def finding(self, rule: str, node: ast.AST, problem: str, remedy: str) -> Finding:
        """Returns a finding at a node."""
        return Finding(self.file, getattr(node, 'lineno', 1), rule, problem, remedy)


class Project:
    """The files of a lint run. `broken` holds the findings for those that cannot be parsed."""

    def __init__(self) -> None:
        self.sources: dict[Path, Source] = {}
        self.texts: dict[Path, str] = {}
        self.broken: list[Finding] = []
        self.roots: dict[str, list[Path]] = {}

    def add(self, root: Path, package: str | None = None) -> None:
        """Parses a file, or every Python file below a directory."""
        root = root.resolve()
        if package is not None:
            self.roots.setdefault(package, []).append(root)
        for file in [root] if root.is_file() else sorted(root.rglob('*.py')):
            below = file.relative_to(root)
            hidden = any(part.startswith('.') or part == '__pycache__' for part in below.parts)
            if not hidden and file not in self.sources:
                module = module_name(file)
                if package is not None:  # a directory without __init__.py is a package, too
                    module = '.'.join([package, *(part for part in below.with_suffix('').parts if part != '__init__')])
                self._parse(file, module, package)

    def _parse(self, file: Path, module: str, package: str | None) -> None:
        try:
            with tokenize.open(file) as stream:
                text = stream.read()
            tree = ast.parse(text, str(file))
            list(allowances(text))
        except (SyntaxError, ValueError, RecursionError, tokenize.TokenError, OSError) as error:
            line = getattr(error, 'lineno', None) or 1
            problem = f'{type(error).__name__}: {getattr(error, "msg", None) or error}'
            self.broken.append(Finding(file, line, 'syntax', problem, 'repair the file; the rest of it was not checked'))
            return
        self.texts[file] = text
        self.sources[file] = Source(file, module, package, tree)

    def resolve(self, source: Source, name: str, depth: int = 8) -> tuple[Source, ast.AST] | None:
        """Returns the function or class that a name in a file stands for, followed through imports within the project."""
        if name in source.defined:
            return source, source.defined[name]
        module, _, attribute = source.imports.get(name, '').rpartition('.')
        for other in self.sources.values() if module and depth else ():
            if other.module == module and other is not source:
                return self.resolve(other, attribute, depth - 1)
        return None

    def ancestry(self, source: Source, cls: ast.ClassDef) -> Iterator[tuple[Source, ast.ClassDef]]:
        """Yields a class and those of its bases that are in the project, nearest first."""
        waiting, seen = [(source, cls)], set()
        while waiting:
            where, node = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            yield where, node
            for base in node.bases:
                found = self.resolve(where, base.id) if isinstance(base, ast.Name) else None
                if found is not None and isinstance(found[1], ast.ClassDef):
                    waiting.append((found[0], found[1]))

    def methods(self, source: Source, cls: ast.ClassDef) -> dict[str, tuple[Source, ast.FunctionDef]]:
        """Returns the methods of a class by name, inherited ones included, with the files they stand in."""
        found: dict[str, tuple[Source, ast.FunctionDef]] = {}
        for where, node in self.ancestry(source, cls):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    found.setdefault(item.name, (where, item))
        return found

    def is_backend(self, source: Source, cls: ast.ClassDef) -> bool:
        """Returns whether a class looks like a backend, or like a part of one."""
        return any(name.endswith(VERIFIER_SUFFIXES) for name in self.methods(source, cls)) or any(
            class_value(node, 'backend_type') is not None or any(where.dotted(b).endswith('Backend') for b in node.bases)
            for where, node in self.ancestry(source, cls)
        )


def class_value(cls: ast.ClassDef, name: str) -> ast.expr | None:
    """Returns the expression that a class body assigns to an attribute, None if there is none."""
    for item in cls.body:
        if isinstance(item, (ast.Assign, ast.AnnAssign)):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return item.value
    return None


def module_name(file: Path) -> str:
    """Returns the dotted name of a file's module, as far up as there are `__init__.py` files."""
    parts = [] if file.stem == '__init__' else [file.stem]
    folder = file.parent
    while (folder / '__init__.py').exists() and folder != folder.parent:
        parts.insert(0, folder.name)
        folder = folder.parent
    return '.'.join(parts)


def parameters(function: Function) -> list[ast.arg]:
    """Returns the named parameters of a function, in order."""
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
