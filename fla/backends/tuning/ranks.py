"""Steps that all ranks of a process group take together: an error on one is an error on all, so that nobody waits for what
never comes and nobody goes on alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from fla.backends.core.errors import DispatchError, plain_text

T = TypeVar('T')


class Ranks:
    """The ranks of a group, or this process alone.

    Args:
        group: a process group, None for no group.
        error: what is raised where another rank failed.

    Raises:
        ValueError: for a group that this process is no rank of.
    """

    def __init__(self, group: Any, error: type[DispatchError]) -> None:
        self.group, self.error, self.own = group, error, 0
        if group is not None:
            import torch.distributed as dist

            self.own = dist.get_rank(group)
            if self.own < 0:
                raise ValueError('group must be one that this process is a rank of')

    def all_do(self, what: str, step: Callable[[], T]) -> T:
        """Every rank takes this step; its own result."""
        if self.group is None:
            return step()
        import torch.distributed as dist

        failed, result = _outcome(step)
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, None if failed is None else plain_text(failed), group=self.group)
        self._raise(what, failed, told)
        return cast('T', result)

    def first_does(self, what: str, step: Callable[[], T]) -> T:
        """The first rank takes this step; its result on all."""
        if self.group is None:
            return step()
        import torch.distributed as dist

        failed, result = _outcome(step) if self.own == 0 else (None, None)
        box = [None if failed is None else plain_text(failed), result]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        self._raise(what, failed, box[:1])
        return cast('T', box[1])

    def _raise(self, what: str, failed: BaseException | None, told: list[Any]) -> None:
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback holds this frame, and that the group, which would outlive its destruction
        for rank, text in enumerate(told):
            if text is not None:
                raise self.error(f'rank {rank} could not {what}: {text}')


def _outcome(step: Callable[[], T]) -> tuple[BaseException | None, T | None]:
    try:
        return None, step()
    except BaseException as error:  # an interrupt, too: the other ranks have to learn of it
        return error, None
