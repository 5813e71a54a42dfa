"""A YAML text as plain data that knows the line of everything in it. JSON is read as YAML's subset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# ('rules', 0, 'when'): keys and places in lists, from the outside in
Place = tuple[Any, ...]
Errors = set[tuple[int, str]]

# Stands where a value could not be read, which is an error that has been said.
UNREAD = object()
# Aliases of aliases grow faster than anybody writes.
_MOST_VALUES = 100_000
# Of a key that stands more often, the values in between are not looked at.
_MOST_READINGS = 3


@dataclass
class Reading:
    """What a text says. A text that says a key twice has two: whoever looks for errors looks at each."""

    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """The line of a place, or of what it stands in."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def read(content: bytes, errors: Errors) -> Iterator[Reading]:
    """The readings of a text; `errors` gains (line, what) for all that is wrong with it. None where it is no YAML."""
    yaml = needed()
    loader = None
    content = _json_as_yaml(content)
    try:
        for event in yaml.parse(content, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                errors.add((event.start_mark.line + 1, 'anchors and aliases are not read; write the value out'))
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        number = again = 0
        while number <= again:
            reader = _Reader(loader, number, errors)
            made = Reading(None if node is None else reader.plain(node, ()), reader.lines)
            yield made
            number, again = number + 1, min(reader.again, _MOST_READINGS - 1)
    except yaml.YAMLError as error:
        mark = getattr(error, 'problem_mark', None)
        text = getattr(error, 'problem', None) or str(error).partition('\n')[0]
        text += '; a value that holds it needs quotes' if 'cannot start any token' in text else ''
        errors.add((mark.line + 1 if mark else 1, f'not YAML: {text}'))
    except RecursionError:
        errors.add((1, 'nested too deep'))
    except (ValueError, UnicodeError) as error:
        errors.add((1, str(error)))
    finally:
        if loader is not None:
            loader.dispose()


def needed() -> Any:
    """The module `yaml`, where that and pydantic are installed."""
    try:
        import pydantic  # noqa: F401
        import yaml
    except ImportError as error:
        raise ImportError(
            f"a policy file needs pydantic and pyyaml, which are the extra 'policy': pip install pydantic pyyaml ({error})"
        ) from error
    return yaml


_NUMBERS = ('tag:yaml.org,2002:int', 'tag:yaml.org,2002:float')
_ODD_NUMBER = re.compile(r'(?P<sixty>[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)|(?P<eight>[-+]?0[0-7_]+)')

# Of a text that is JSON: what YAML 1.1 reads otherwise. Whitespace counts outside of strings alone.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?[eE][-+]?\d+|\t')


def _json_as_yaml(content: bytes) -> bytes:
    """JSON that every reader of YAML 1.1 reads, line by line as it was: without tabs between the values, with a point and a
    sign in numbers with an exponent, and without surrogates. What is not JSON stays as it is."""
    try:
        json.loads(content)
        text = content.decode(json.detect_encoding(content)).removeprefix('\ufeff')
    except (ValueError, RecursionError):
        return content
    return _JSON_TOKEN.sub(_as_yaml, text).encode()


def _as_yaml(token: re.Match[str]) -> str:
    text = token.group()
    if text == '\t':
        return ' '
    if text[0] == '"':
        return f'"{"".join(map(_escaped, json.loads(text)))}"'
    digits, _, exponent = text.lower().partition('e')
    point = '' if '.' in digits else '.0'
    return f'{digits}{point}e{exponent if exponent[0] in "+-" else f"+{exponent}"}'


def _escaped(character: str) -> str:
    plain = ' ' <= character <= '~' and character not in '"\\'
    return character if plain else f'\\U{ord(character):08x}'


class _Reader:
    """One reading: of a key that stands several times, the value that is that many places after the first.

    Attributes:
        again: how many more readings it takes to see every value.
    """

    def __init__(self, loader: Any, number: int, errors: Errors) -> None:
        self.loader, self.number, self.errors = loader, number, errors
        self.lines: dict[Place, int] = {}
        self.again = 0
        # what yaml raises for a value it has no constructor for, such as one with a tag
        self._unreadable = (ValueError, needed().constructor.ConstructorError)

    def plain(self, node: Any, place: Place) -> Any:
        """A node as plain data."""
        if len(self.lines) > _MOST_VALUES:
            raise ValueError(f'more than {_MOST_VALUES} values')
        line = node.start_mark.line + 1
        self.lines.setdefault(place, line)
        if node.id != 'scalar' and node.tag not in ('tag:yaml.org,2002:map', 'tag:yaml.org,2002:seq'):
            self.errors.add((line, f'the tag {node.tag!r} is not read'))
            return UNREAD
        if node.id == 'mapping':
            return self._mapping(node, place)
        if node.id == 'sequence':
            return [self.plain(item, (*place, i)) for i, item in enumerate(node.value)]
        if node.tag in _NUMBERS and (found := _ODD_NUMBER.fullmatch(node.value)):
            base = 60 if found.lastgroup == 'sixty' else 8
            self.errors.add((line, f'{node.value!r} is a number to the base of {base} in YAML; write quotes, or its value'))
            return UNREAD
        try:
            return self.loader.construct_object(node)
        except self._unreadable as error:
            self.errors.add((line, f'{node.value!r:.80} cannot be read: {str(error).splitlines()[0]}'))
            return UNREAD

    def _mapping(self, node: Any, place: Place) -> dict[str, Any]:
        values: dict[str, list[tuple[int, Any]]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != 'scalar':
                self.errors.add((line, 'a key is a word'))
                continue
            if key.value in values:
                self.errors.add((line, f'key {key.value!r} stands here twice'))
            values.setdefault(key.value, []).append((line, value))
        found = {}
        for name, those in values.items():
            self.again = max(self.again, len(those) - 1)
            line, value = those[min(self.number, len(those) - 1)]
            self.lines[(*place, name)] = line
            found[name] = self.plain(value, (*place, name))
        return found
