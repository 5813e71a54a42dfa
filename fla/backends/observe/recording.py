"""`with` and `start()`/`stop()` for recorders that users hold."""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar, TypeVar

from fla.backends.core.errors import DispatchError
from fla.backends.runtime.dispatcher import Dispatcher
from fla.backends.runtime.recorders import Recorder

R = TypeVar('R', bound='Recording')


class Recording(Recorder):
    """A recorder of one namespace; `verb` is the function that makes it."""

    verb: ClassVar[str]
    dispatcher: Dispatcher

    def __enter__(self: R) -> R:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self: R) -> R:
        """Begin to record; returns itself. Raises DispatchError if it is recording already: each call would count twice."""
        self.dispatcher.policies.warn_in_baseline(f'{self.verb}()')
        if not self.dispatcher.start_recording(self):
            raise DispatchError(f'this {self.verb}() is recording already: use another one, `with {self.verb}() as t:`')
        return self

    def stop(self) -> None:
        """End recording; what was recorded stays."""
        self.dispatcher.stop_recording(self)
