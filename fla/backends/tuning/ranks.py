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

    def run(self, action: str, step: Callable[[], T], first_only: bool = False) -> T:
        """Runs a step on every rank and returns each rank's result; or on the first rank and returns its result on all."""
        if self.group is None:
            return step()
        import torch.distributed as dist

        error: BaseException | None = None
        result: T | None = None
        if self.own == 0 or not first_only:
            try:
                result = step()
            except BaseException as caught:  # an interrupt, too: the other ranks must learn of it
                error = caught
        outcomes: list[Any] = [None] * dist.get_world_size(self.group)
        own = None if error is None else plain_text(error), result if first_only else None
        dist.all_gather_object(outcomes, own, group=self.group)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback holds this frame, and that the group, which would outlive its destruction
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise self.error(f'rank {rank} could not {action}: {text}')
        return cast('T', outcomes[0][1] if first_only else result)
