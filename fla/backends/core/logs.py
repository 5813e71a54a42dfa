"""The library's logger, and messages that are logged once.

Handlers belong to the application. Until it configures one, warnings still reach stderr (this package must not make a wrong
choice silently), and so do the levels that `FLA_LOG_LEVEL` or `set_log_level` enable.
"""

from __future__ import annotations

import logging

logger = logging.getLogger('fla')

_logged: set[tuple[object, ...]] = set()
# Keys may contain sizes, which are unbounded: beyond this many, messages may repeat.
_MOST_LOGGED = 4096


class _UnlessConfigured(logging.NullHandler):
    """Writes to stderr only while the application has no handler, as logging.lastResort does."""

    threshold = logging.WARNING

    def handle(self, record: logging.LogRecord) -> bool:
        if logging.root.handlers or record.levelno < self.threshold or logging.lastResort is None:
            return False
        stream = logging.StreamHandler()
        stream.setFormatter(logging.Formatter('%(name)s: %(levelname)s: %(message)s'))
        stream.handle(record)
        return True


_handler = _UnlessConfigured()
logger.addHandler(_handler)


def set_threshold(level: int | str) -> None:
    """Sets the level of the logger `fla`, and of what it prints while the application has no handlers.

    Args:
        level: a name such as 'DEBUG' or 'info', or a number of the logging module.
    """
    if isinstance(level, str):
        number = logging.getLevelName(level.strip().upper())
        if not isinstance(number, int):
            raise ValueError(f'level must be DEBUG, INFO, WARNING, ERROR or CRITICAL, got {level!r}')
        level = number
    logger.setLevel(level)
    _handler.threshold = level


def once(key: tuple[object, ...], level: int, message: str, *args: object, exc_info: bool = False) -> bool:
    """Logs `message` unless `key` was used before; returns whether it did. Racing threads may log it twice."""
    if key in _logged:
        return False
    if len(_logged) >= _MOST_LOGGED:
        _logged.clear()
    _logged.add(key)
    logger.log(level, message, *args, exc_info=exc_info)
    return True


def warn_once(key: tuple[object, ...], message: str, *args: object) -> None:
    """Logs a WARNING once per key."""
    once(key, logging.WARNING, message, *args)


def reset() -> None:
    """Restores the default level and allows every message again."""
    _logged.clear()
    logger.setLevel(logging.NOTSET)
    _handler.threshold = logging.WARNING
