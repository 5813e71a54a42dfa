"""A YAML 1.2 text as plain data, with the line of every value. JSON is a subset of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# ('rules', 0, 'when'): keys and list indices, outermost first
Place = tuple[Any, ...]
Errors = set[tuple[int, str]]

# Stands for a value that could not be read; its error has been reported.
UNREAD = object()


@dataclass
class Reading:
    """The data of a text, and the line of each place in it."""

    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """Returns the line of a place, or of the nearest enclosing place that has one."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def read(content: bytes, errors: Errors) -> list[Reading]:
    """Reads a text; adds (line, message) to `errors` for each mistake.

    Returns:
        No reading of a text that is not YAML. Two readings of a text that has a key twice, with the first and with the last
            value of each such key, so that the errors of both can be found.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML(typ='safe', pure=True)
    try:
        node = yaml.compose(content)
        readings = []
        for last_wins in (False, True):
            converter = _Converter(yaml, last_wins, errors)
            data = None if node is None else converter.plain(node, ())
            readings.append(Reading(data, converter.lines))
            if not converter.found_duplicate:
                break
        return readings
    except YAMLError as error:
        mark = getattr(error, 'problem_mark', None)
        text = getattr(error, 'problem', None) or str(error).partition('\n')[0]
        text += '; quote a value that contains it' if 'cannot start any token' in text else ''
        errors.add((mark.line + 1 if mark else 1, f'not YAML: {text}'))
    except RecursionError:
        errors.add((1, 'nested too deep'))
    except ValueError as error:
        errors.add((1, str(error)))
    return []


class _Converter:
    """Converts YAML nodes to plain data. Of a key that stands twice, the first or the last value counts."""

    def __init__(self, yaml: Any, last_wins: bool, errors: Errors) -> None:
        self.yaml, self.last_wins, self.errors = yaml, last_wins, errors
        self.lines: dict[Place, int] = {}
        self.found_duplicate = False
        self.anchored: set[int] = set()

    def plain(self, node: Any, place: Place) -> Any:
        """Returns a node as plain data."""
        line = self.lines.setdefault(place, node.start_mark.line + 1)
        if node.anchor is not None:
            self.errors.add((line, 'anchors and aliases are not supported; write the value out'))
            if id(node) in self.anchored:  # aliases of aliases grow exponentially
                return UNREAD
            self.anchored.add(id(node))
        if node.id == 'scalar':
            return self._scalar(node, line)
        if node.tag not in ('tag:yaml.org,2002:map', 'tag:yaml.org,2002:seq'):
            self.errors.add((line, f'the tag {node.tag!r} is not supported'))
            return UNREAD
        if node.id == 'sequence':
            return [self.plain(item, (*place, i)) for i, item in enumerate(node.value)]
        return self._mapping(node, place)

    def _scalar(self, node: Any, line: int) -> Any:
        from ruamel.yaml.error import YAMLError

        try:
            value = self.yaml.constructor.construct_object(node)
        except (ValueError, YAMLError) as error:  # a tag without a constructor, for example
            self.errors.add((line, f'{node.value!r:.80} cannot be read: {str(error).splitlines()[0]}'))
            return UNREAD
        return _join_surrogates(value) if isinstance(value, str) else value

    def _mapping(self, node: Any, place: Place) -> dict[str, Any]:
        values: dict[str, tuple[int, Any]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != 'scalar':
                self.errors.add((line, 'a key must be a word'))
                continue
            name = _join_surrogates(key.value)
            if name in values:
                self.found_duplicate = True
                self.errors.add((line, f'key {name!r} is a duplicate'))
            if self.last_wins or name not in values:
                values[name] = line, value
        self.lines.update({(*place, name): line for name, (line, _) in values.items()})
        return {name: self.plain(value, (*place, name)) for name, (_, value) in values.items()}


def _join_surrogates(text: str) -> str:
    """JSON writes a character outside the BMP as two escapes, which YAML reads as two surrogates."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'surrogatepass')
