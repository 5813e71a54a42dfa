"""Whether a backend can run on this machine. Asked when a plan is built, and cached until `refresh()`.

Two questions: `package` (module, version, toolchain; touches no device) and `device` (capability and the backend's own
`probe`; asked only for the device of a call, so that planning a CPU call never initialises an accelerator's driver).
"""

from __future__ import annotations

import logging
from typing import Any

from fla.backends.backend.base import BaseBackend, Verdict, belongs_to, verdict_of
from fla.backends.core import logs
from fla.utils.devices import Device


class Availability:
    """Caches answers per backend instance. Racing threads may ask twice and get the same answer."""

    def __init__(self) -> None:
        # by id: a backend need not be hashable
        self._answers: dict[tuple[int, object], tuple[BaseBackend, Verdict]] = {}

    def forget(self, owner: Any = None) -> None:
        """Drops all answers, or those of one backend instance or class."""
        old = {} if owner is None else dict(self._answers)
        self._answers = {key: answer for key, answer in old.items() if not belongs_to(answer[0], owner)}

    def package(self, backend: BaseBackend) -> Verdict:
        """Returns the verdict on module, version and toolchain."""
        return self._verdict(backend, None)

    def device(self, backend: BaseBackend, device: Device) -> Verdict:
        """Returns the verdict of the declared capability and of the backend's own probe, for devices of this kind."""
        return self._verdict(backend, device)

    def _verdict(self, backend: BaseBackend, device: Device | None) -> Verdict:
        # the local name makes `forget` drop an answer whose question was asked before
        answers, key = self._answers, (id(backend), device and device.kind)
        if key not in answers:
            if device is None:
                verdict = _ask(backend, 'is_available')
            else:
                verdict = capability_verdict(backend, device)
                verdict = _ask(backend, 'probe', device) if verdict[0] else verdict
            answers[key] = backend, verdict
        return answers[key][1]


def capability_verdict(backend: BaseBackend, device: Device) -> Verdict:
    """Whether a CUDA device has the backend's `min_capability`."""
    needed = backend.min_capability
    if needed is None or device.platform != 'cuda' or device.capability is None or device.capability >= tuple(needed):
        return True, None
    have = '.'.join(map(str, device.capability))
    return False, f'needs compute capability {".".join(map(str, needed))}, {device.name or "the device"} has {have}'


def _ask(backend: BaseBackend, question: str, *args: Any) -> Verdict:
    try:
        return verdict_of(getattr(backend, question)(*args), question)
    except Exception as error:
        reason = f'{question}() raised {type(error).__name__}: {error}'
        # a missing optional package is ordinary; any other error is worth a warning
        level = logging.DEBUG if isinstance(error, ModuleNotFoundError) else logging.WARNING
        logs.once(('availability', id(backend), question, reason), level, 'backend %s: %s', backend, reason, exc_info=True)
        return False, reason
