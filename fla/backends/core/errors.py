"""Errors that dispatch raises. It never wraps a kernel's own exception."""

from __future__ import annotations

from collections.abc import Iterable

from fla.utils.env import nearest
from fla.utils.owners import with_conflict


class DispatchError(RuntimeError):
    """Base of every error that dispatch itself raises."""


class BackendBugError(DispatchError):
    """A backend broke its contract: a verifier raised, or returned something other than `(bool, reason)`."""


class UnknownNameError(DispatchError, LookupError):
    """An unknown operation, function, backend or token."""


class RegistrationError(DispatchError, ValueError):
    """A backend that does not fit the functions it is registered for."""


class FrozenError(DispatchError):
    """Policy or registry changed while dispatch is frozen."""


class ManifestMismatchError(DispatchError):
    """This process would select other backends than the required manifest lists."""


def unknown_name(what: str, name: str, known: Iterable[str], where: str = '', advice: str = '') -> UnknownNameError:
    """Returns the error for an unknown name: what it names, the nearest match, the known names, and what to do."""
    names = sorted(set(known))
    text = f'unknown {what} {name!r}{where}.{nearest(name, names)} Known: {", ".join(names) or "none"}'
    return UnknownNameError(f'{text}.{advice}' if advice else text)


def plain_text(error: BaseException) -> str:
    """Returns an exception in one line."""
    try:
        return f'{type(error).__name__}: {error}'
    except Exception:  # its __str__ raises
        return type(error).__name__


def error_text(error: BaseException) -> str:
    """Returns an exception in one line; for an ImportError, also the other distribution that may be the cause."""
    return with_conflict(plain_text(error)) if isinstance(error, ImportError) else plain_text(error)
