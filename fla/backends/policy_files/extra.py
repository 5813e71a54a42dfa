"""The optional packages that files need."""

from __future__ import annotations

import importlib


def require_extra(what: str, *modules: str) -> None:
    """Raises ImportError, with the command that installs them, unless these modules are installed."""
    try:
        for name in modules:
            importlib.import_module(name)
    except ImportError as error:
        names = ' and '.join(modules)
        command = f'pip install {" ".join(modules)}'
        raise ImportError(f"{what} needs {names}, of the extra 'policy': {command} ({error})") from error
