"""Can a backend be used at all, here? Asked when a plan is built, remembered until `refresh()`.

Two questions: `package` (module, version, toolchain: touches no device) and `device` (platform, capability, the backend's
own `probe`: asked only for the device of a call, so that planning a CPU call never wakes an accelerator's driver).
"""

from __future__ import annotations

import logging
from typing import Any

from fla.backends.backend.base import BaseBackend, Verdict, verdict_of
from fla.backends.core import logs
from fla.utils.devices import Device


class Availability:
    """Remembered answers, per backend instance. Racing threads may ask twice; the answers are the same."""

    def __init__(self) -> None:
        self._package: dict[int, tuple[BaseBackend, Verdict]] = {}
        self._device: dict[tuple[int, object], tuple[BaseBackend, Verdict]] = {}

    def forget(self, owner: Any = None) -> None:
        """Ask again: everything, or what concerns one backend instance or class."""
        if owner is None:
            self._package, self._device = {}, {}
            return

        def concerned(backend: BaseBackend) -> bool:
            return backend is owner or (isinstance(owner, type) and isinstance(backend, owner))

        self._package = {k: v for k, v in dict(self._package).items() if not concerned(v[0])}
        self._device = {k: v for k, v in dict(self._device).items() if not concerned(v[0])}

    def package(self, backend: BaseBackend) -> Verdict:
        """Module, version, toolchain."""
        # the answer goes where the question was not known: if all is forgotten meanwhile, it is forgotten, too
        answers = self._package
        known = answers.get(id(backend))
        if known is None:
            known = answers[id(backend)] = backend, _ask(backend, 'is_available')
        return known[1]

    def device(self, backend: BaseBackend, device: Device) -> Verdict:
        """The declared capability and the backend's own probe, for devices of this kind."""
        key = id(backend), device.kind
        answers = self._device
        known = answers.get(key)
        if known is None:
            verdict = capability_verdict(backend, device)
            if verdict[0]:
                verdict = _ask(backend, 'probe', device)
            known = answers[key] = backend, verdict
        return known[1]


def capability_verdict(backend: BaseBackend, device: Device) -> Verdict:
    """Whether a CUDA device is as new as `min_capability` asks for."""
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
        # A missing optional package is ordinary; anything else is news to whoever installed it.
        level = logging.DEBUG if isinstance(error, ModuleNotFoundError) else logging.WARNING
        logs.once(('availability', id(backend), question, reason), level, 'backend %s: %s', backend, reason, exc_info=True)
        return False, reason
