"""The library's logger, and messages that are said once.

Handlers belong to the application. Until it configures any, warnings still reach stderr (a silent wrong choice is what
this package exists to prevent), and so does what `FLA_LOG_LEVEL` or `set_log_level` asks for.
"""

from __future__ import annotations

import logging

logger = logging.getLogger('fla')

_said: set[tuple[object, ...]] = set()
# Reasons may hold sizes, of which there is no end: beyond this many messages, some are given again.
_MOST_SAID = 4096


class _UnlessConfigured(logging.NullHandler):
    """Like logging.lastResort: speaks on stderr only while the application has configured no handler of its own."""

    threshold = logging.WARNING

    def handle(self, record: logging.LogRecord) -> bool:
        if logging.root.handlers or record.levelno < self.threshold or logging.lastResort is None:
            return False
        stream = logging.StreamHandler()
        stream.setFormatter(logging.Formatter('%(name)s: %(levelname)s: %(message)s'))
        stream.handle(record)
        return True


_handler = _UnlessConfigured()
if not any(isinstance(handler, _UnlessConfigured) for handler in logger.handlers):
    logger.addHandler(_handler)


def set_threshold(level: int | str) -> None:
    """Set the level of the logger `fla`, and of what it prints while the application has no handlers.

    Args:
        level: a name such as 'DEBUG' or 'info', or one of logging's numbers.
    """
    if isinstance(level, str):
        number = logging.getLevelName(level.strip().upper())
        if not isinstance(number, int):
            raise ValueError(f'level must be DEBUG, INFO, WARNING, ERROR or CRITICAL, got {level!r}')
        level = number
    logger.setLevel(level)
    _handler.threshold = level


def once(key: tuple[object, ...], level: int, message: str, *args: object, exc_info: bool = False) -> bool:
    """Log `message` unless something was logged under `key` before; says whether it did. A race may say it twice."""
    if key in _said:
        return False
    if len(_said) >= _MOST_SAID:
        _said.clear()
    _said.add(key)
    logger.log(level, message, *args, exc_info=exc_info)
    return True


def warn_once(key: tuple[object, ...], message: str, *args: object) -> None:
    """A WARNING that is given one time."""
    once(key, logging.WARNING, message, *args)


def reset() -> None:
    """Everything may be said again, and the level is the default."""
    _said.clear()
    logger.setLevel(logging.NOTSET)
    _handler.threshold = logging.WARNING
