"""From the bytes of a policy file to a `Policy` that knows the line of each sentence. JSON is read as YAML's subset."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fla.ops.backends.conditions import ConditionError
from fla.ops.backends.errors import DispatchError
from fla.ops.backends.policy import Policy, Rule
from fla.ops.backends.versions import PolicyVersion

Place = tuple[Any, ...]


class PolicyFileError(DispatchError, ValueError):
    """A policy file that cannot be put in force. `errors` lists all that is wrong with it, each as 'path:line: what'."""

    def __init__(self, path: str, errors: Iterable[str]) -> None:
        self.path, self.errors = path, tuple(errors)
        super().__init__('\n'.join([f'{path} is not in force:', *(f'  {error}' for error in self.errors)]))


def _needed() -> Any:
    try:
        import pydantic  # noqa: F401
        import yaml
    except ImportError as error:
        raise ImportError(
            f"a policy file needs pydantic and pyyaml: pip install 'fla-dispatch[policy]' ({error})"
        ) from error
    return yaml


def parse(path: str | os.PathLike[str]) -> PolicyVersion:
    """Read a policy file; names of operations, backends and parameters are not looked up.

    Raises:
        PolicyFileError: lists every error with its line.
        OSError: if the file cannot be read.
    """
    yaml = _needed()
    name = os.fspath(path)
    content = Path(name).read_bytes()
    errors: list[tuple[int, str]] = []
    lines: dict[Place, int] = {}
    data = None
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, yaml.SafeLoader)):
            raise ValueError('anchors and aliases are not read; write the value out')
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            data = _plain(loader, node, (), lines, errors) if node is not None else {}
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, 'problem_mark', None)
        text = getattr(error, 'problem', None) or str(error).partition('\n')[0]
        errors.append((mark.line + 1 if mark else 1, f'not YAML: {text}'))
    except RecursionError:
        errors.append((1, 'nested too deep'))
    except (ValueError, UnicodeError) as error:
        errors.append((1, str(error)))
    policy = None if errors else _policy(name, {} if data is None else data, lines, errors)
    if errors or policy is None:
        raise PolicyFileError(name, [f'{name}:{line}: {text}' for line, text in sorted(errors)])
    return PolicyVersion(0, hashlib.sha256(content).hexdigest(), name, time.time(), policy)


def _plain(loader: Any, node: Any, place: Place, lines: dict[Place, int], errors: list[tuple[int, str]]) -> Any:
    """A node as plain data; `lines` gains the line of everything in it."""
    line = node.start_mark.line + 1
    lines.setdefault(place, line)
    if node.id == 'mapping':
        found: dict[Any, Any] = {}
        for key_node, value in node.value:
            key = key_node.value if key_node.id == 'scalar' else None
            if not isinstance(key, str):
                errors.append((key_node.start_mark.line + 1, 'a key is a word'))
                continue
            if key in found:
                errors.append((key_node.start_mark.line + 1, f'key {key!r} stands here twice'))
            lines[(*place, key)] = key_node.start_mark.line + 1
            found[key] = _plain(loader, value, (*place, key), lines, errors)
        return found
    if node.id == 'sequence':
        return [_plain(loader, item, (*place, i), lines, errors) for i, item in enumerate(node.value)]
    try:
        return loader.construct_object(node)
    except (ValueError, loader_error()) as error:
        errors.append((line, f'{node.value!r:.80} cannot be read: {str(error).splitlines()[0]}'))
        return None


def loader_error() -> type[Exception]:
    """What yaml raises for a value it has no constructor for, such as one with a tag."""
    error: type[Exception] = _needed().constructor.ConstructorError
    return error


def _policy(path: str, data: Any, lines: Mapping[Place, int], errors: list[tuple[int, str]]) -> Policy | None:
    from pydantic import ValidationError

    from fla.ops.backends.config.schema import PolicyModel, message

    try:
        model = PolicyModel.model_validate(data)
    except ValidationError as error:
        for one in error.errors():
            errors.append((_line(one['loc'], lines), message(one)))
        model = None
    fields = {k: v for k, v in model.model_dump(exclude={'rules'}).items() if v is not None} if model else {}
    rules = _rules(path, data, lines, errors)
    places = {'.'.join(map(str, place)): line for place, line in lines.items() if 0 < len(place) <= 2}
    if errors:
        return None
    try:
        return Policy(**fields, rules=rules, places=tuple((key, f'{path}:{line}') for key, line in places.items()))
    except (TypeError, ValueError) as error:  # a backend that is boosted twice, under two of its names
        errors.append((1, str(error)))
        return None


def _rules(path: str, data: Any, lines: Mapping[Place, int], errors: list[tuple[int, str]]) -> tuple[Rule, ...]:
    """The rules whose form is right; a condition that is none is one more error."""
    found = []
    listed = data.get('rules') if isinstance(data, dict) else None
    for number, rule in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(rule, dict):
            continue
        try:
            place = f'{path}:{_line(("rules", number), lines)}'
            ops, use, when = rule.get('ops', ()), rule.get('use', ()), rule.get('when')
            found.append(Rule(ops, use, when, rule.get('priority', 0), place))
        except ConditionError as error:
            errors.append((_line(('rules', number, 'when'), lines), f'rules.{number}.when: {error}'))
        except TypeError:
            continue  # the schema has said so
    return tuple(found)


def _line(place: Place, lines: Mapping[Place, int]) -> int:
    """The line of a place, or of what it stands in."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)
