"""Checks a backend's declared facts, once at registration, so that calls need not check them."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from fla.backends.backend.base import KINDS, RESERVED_NAMES, BaseBackend, requirement_of
from fla.backends.core.error_kinds import may_be_declared
from fla.backends.core.errors import RegistrationError
from fla.utils.devices import PLATFORMS

Test = Callable[[Any], bool]


def check_facts(backend: BaseBackend, *, besides: Collection[str] = ()) -> None:
    """Checks the attributes of a backend one by one, except those in `besides`.

    Raises:
        RegistrationError: names the attribute, its value and what it may be.
    """
    for attribute, (right, allowed) in _ATTRIBUTES.items():
        if attribute in besides:
            continue
        try:
            value = getattr(backend, attribute)
        except Exception as error:
            raise RegistrationError(f'{type(backend).__qualname__}.{attribute} raised {error!r}') from error
        if not right(value):
            raise _wrong(backend, attribute, allowed)


def check_declaration(backend: BaseBackend) -> None:
    """Checks the attributes of a backend, each and together. Raises RegistrationError as `check_facts` does."""
    check_facts(backend)
    name, reserved = backend.backend_type.casefold(), (*RESERVED_NAMES, *KINDS)
    if name in reserved and not (backend.backend_type == backend.kind == 'reference'):
        raise _wrong(backend, 'backend_type', f'another name: {", ".join(dict.fromkeys(reserved))} are reserved')
    if backend.package_version is not None and backend.package_name is None:
        raise _wrong(backend, 'package_version', 'None where there is no package_name, the module to import')


def _wrong(backend: BaseBackend, attribute: str, allowed: str) -> RegistrationError:
    value = getattr(backend, attribute)
    return RegistrationError(f'{type(backend).__qualname__}.{attribute} is {value!r}; it must be {allowed}')


def _text(pattern: str) -> Test:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


# printable ASCII without , | ; = : because names also appear in generated code, policies and tables
_is_word = _text(r'([!-~](?<![,|;=:]))+')
_is_variable = _text(r'[A-Za-z_][A-Za-z0-9_]*')


def _is_version(value: Any) -> bool:
    try:
        return bool(requirement_of(value, 'some').specifier)
    except (AttributeError, TypeError, ValueError):
        return False


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return not math.isnan(value) if isinstance(value, float) else abs(value) <= sys.float_info.max


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(dtype, torch.dtype) and _is_number(bound) and bound >= 0 for dtype, bound in value.items()
    )


def _some(right: Test, at_least: int = 1) -> Test:
    """Accepts a collection whose items are all right."""

    def are_right(value: Any) -> bool:
        several = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return several and len(value) >= at_least and all(right(item) for item in value)

    return are_right


def _per_parameter(right: Test) -> Test:
    """Accepts None, a collection whose items are all right, or such a collection per parameter."""
    several = _some(right)

    def are_right(value: Any) -> bool:
        if isinstance(value, Mapping):
            return bool(value) and all(_is_word(name) and several(items) for name, items in value.items())
        return value is None or several(value)

    return are_right


def _or_none(right: Test) -> Test:
    return lambda value: value is None or right(value)


# attribute → (whether a value is right, text of what it must be)
_ATTRIBUTES: Mapping[str, tuple[Test, str]] = {
    'backend_type': (
        lambda value: _is_word(value) and value != 'base',
        'a name, unique and in ASCII, without spaces and without , | ; = :',
    ),
    'kind': (lambda value: value in ('vendor', 'native', 'reference'), "'vendor', 'native' or 'reference'"),
    'vendor': (_or_none(_is_word), 'the name of a vendor without spaces and without , | ; = :, or None'),
    'package_name': (_or_none(_text(r'[^\W\d]\w*(\.[^\W\d]\w*)*')), 'the name of a module to import, or None'),
    'package_version': (_or_none(_is_version), "a version specifier ('>=1.2'), a requirement ('some-dist>=1.2') or None"),
    'env_var': (_or_none(_is_variable), 'the name of an environment variable, or None'),
    'extra_env': (_some(_is_variable, at_least=0), 'a tuple of variable names'),
    'default_enable': (lambda value: isinstance(value, bool) or callable(value), 'a bool, or a function that returns one'),
    'priority': (_is_number, 'a number; lower is asked earlier'),
    'devices': (
        _per_parameter(lambda value: value in PLATFORMS),
        f'a tuple of platforms ({", ".join(PLATFORMS)}), one such tuple per parameter, or None',
    ),
    'dtypes': (
        _per_parameter(lambda value: isinstance(value, torch.dtype)),
        'a tuple of torch.dtype, one such tuple per parameter, or None',
    ),
    'min_capability': (
        _or_none(lambda value: isinstance(value, tuple) and [type(part) for part in value] == [int, int]),
        'a tuple such as (9, 0), or None',
    ),
    'grad': (lambda value: value in ('none', 'backward'), "'none' (inference only) or 'backward'"),
    'tolerance': (_is_tolerance, 'a mapping from torch.dtype to a number'),
    'retryable': (
        _some(may_be_declared, at_least=0),
        'a tuple of exception types that are the fault of the backend: not TypeError, ValueError, or an error of dispatch, '
        'memory or a device',
    ),
    'traceable': (lambda value: isinstance(value, bool), 'a bool'),
    'verified': (lambda value: isinstance(value, bool), 'a bool'),
}
