"""Runs the lint in two passes. The first reads source (`source`, `verifiers`, `methods`) and imports nothing. The second
(`registered`) imports the package and asks its registries; it runs for packages given by name, not for paths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fla.backends.core.errors import UnknownNameError
from fla.backends.lint import methods, registered, verifiers
from fla.backends.lint.findings import Finding, apply_allowances
from fla.backends.lint.source import Project
from fla.utils.env import nearest


def run(targets: Sequence[str]) -> list[Finding]:
    """Returns the findings, ordered by file and line.

    Args:
        targets: names of importable packages or modules, and paths of files or directories. A name wins over a path.

    Raises:
        UnknownNameError: for a target that is neither.
    """
    project, packages = Project(), []
    for target in targets:
        roots = _package_roots(target)
        if roots:
            packages.append(target)
        elif not Path(target).exists():
            near = nearest(target, [p.name for p in Path().iterdir()])
            raise UnknownNameError(f'{target!r} is neither an importable package nor a path.{near}')
        for root in roots or [Path(target)]:
            project.add(root, package=target if roots else None)
    found = [*project.broken, *verifiers.check(project), *methods.check(project)]
    for package in packages:
        found += registered.check(package, project)
    return sorted(apply_allowances(found, project.texts))


def _package_roots(target: str) -> list[Path]:
    """Returns the directories, or the one file, of an importable package without importing it; none if it is not found."""
    top, *below = target.split('.')
    if not all(part.isidentifier() for part in (top, *below)):
        return []
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # such as __main__
        return []
    if spec is None:
        return []
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    if not roots and spec.has_location and spec.origin:
        roots = [Path(spec.origin)]
    for part in below:
        inside = [place for root in roots for place in (root / part, root / f'{part}.py')]
        roots = [place for place in inside if place.exists()]
    return roots
