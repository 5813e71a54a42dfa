"""Steps that all ranks of a process group take together. An error on one rank raises on all, so that none waits for the
others or goes on alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from fla.backends.core.errors import DispatchError, plain_text

T = TypeVar('T')


class Ranks:
    """The ranks of a group, or this process alone.

    Args:
        group: a process group, None for no group.
        error: the type that is raised if another rank failed.

    Raises:
        ValueError: if this process is not a rank of the group.
    """

    def __init__(self, group: Any, error: type[DispatchError]) -> None:
        self.group, self.error, self.own = group, error, 0
        if group is not None:
            import torch.distributed as dist

            self.own = dist.get_rank(group)
            if self.own < 0:
                raise ValueError('group must be one that this process is a rank of')

    def all_do(self, action: str, step: Callable[[], T]) -> T:
        """Runs a step on every rank; returns each rank's own result."""
        if self.group is None:
            return step()
        import torch.distributed as dist

        error, result = _outcome(step)
        texts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, None if error is None else plain_text(error), group=self.group)
        self._raise(action, error, texts)
        return cast('T', result)

    def first_does(self, action: str, step: Callable[[], T]) -> T:
        """Runs a step on the first rank; returns its result on all."""
        if self.group is None:
            return step()
        import torch.distributed as dist

        error, result = _outcome(step) if self.own == 0 else (None, None)
        sent = [None if error is None else plain_text(error), result]
        dist.broadcast_object_list(sent, src=dist.get_global_rank(self.group, 0), group=self.group)
        self._raise(action, error, sent[:1])
        return cast('T', sent[1])

    def _raise(self, action: str, error: BaseException | None, texts: list[Any]) -> None:
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback holds this frame, and that the group, which would outlive its destruction
        for rank, text in enumerate(texts):
            if text is not None:
                raise self.error(f'rank {rank} could not {action}: {text}')


def _outcome(step: Callable[[], T]) -> tuple[BaseException | None, T | None]:
    try:
        return None, step()
    except BaseException as error:  # an interrupt, too: the other ranks must learn of it
        return error, None
