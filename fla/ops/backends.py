"""The framework under the name that FLA's users know. It lives in `fla.backends`; every name here is the same object."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fla.backends

if TYPE_CHECKING:
    from fla.backends import *  # noqa: F403

__all__ = fla.backends.__all__


def __getattr__(name: str) -> object:
    return getattr(fla.backends, name)


def __dir__() -> list[str]:
    return dir(fla.backends)


if __name__ == '__main__':
    from fla.backends.cli.main import main

    raise SystemExit(main())
