"""What dispatch raises. A kernel's own exception is never wrapped."""

from __future__ import annotations

from collections.abc import Iterable

from fla.utils.env import nearest
from fla.utils.owners import with_conflict


class DispatchError(RuntimeError):
    """Base of every error that dispatch itself raises."""


class BackendBugError(DispatchError):
    """A backend broke its contract (a verifier raised, or returned something else than `(bool, reason)`)."""


class UnknownNameError(DispatchError, LookupError):
    """An operation, function, backend or token that nobody knows."""


class RegistrationError(DispatchError, ValueError):
    """A backend that does not fit the functions it is registered for."""


class FrozenError(DispatchError):
    """Policy or registry changed while dispatch is frozen."""


class ManifestMismatchError(DispatchError):
    """This process would not select what the required manifest says."""


def unknown_name(what: str, name: str, known: Iterable[str], where: str = '', advice: str = '') -> UnknownNameError:
    """The error for a name nobody knows: what it was meant to be, what there is, the nearest match, and what to do."""
    names = sorted(set(known))
    text = f'unknown {what} {name!r}{where}.{nearest(name, names)} Known: {", ".join(names) or "none"}'
    return UnknownNameError(f'{text}.{advice}' if advice else text)


def plain_text(error: BaseException) -> str:
    """An exception in one line."""
    try:
        return f'{type(error).__name__}: {error}'
    except Exception:  # one that cannot say what it is
        return type(error).__name__


def error_text(error: BaseException) -> str:
    """An exception in one line; one of an import also names the other distribution that may be the cause."""
    return with_conflict(plain_text(error)) if isinstance(error, ImportError) else plain_text(error)
