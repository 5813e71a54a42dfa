"""Activation checkpointing: the recomputation must choose what the forward pass chose.

With non-reentrant checkpointing, a policy or a toggle that changes between forward and backward makes the recomputed
activations another backend's. PyTorch notices only if their metadata differ.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from fla.ops.backends.dispatcher import Dispatcher, default_dispatcher
from fla.ops.backends.policy import Layer, Policy, State
from fla.ops.backends.scopes import enter, leave


class _AsBefore:
    """Puts back the policy and the toggles of the moment it was made."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.state, self.env = dispatcher, dispatcher.state(), dict(os.environ)
        self.tokens: list[int] = []

    def __enter__(self) -> None:
        dispatcher = self.dispatcher
        names = {name for backend in dispatcher._backends() for name in dispatcher.toggles.variables(backend)}
        values = tuple(sorted((name, self.env.get(name)) for name in names))
        pinned = State(self.state.layers, env=self.state.env if self.state.env is not None else values)
        layer = Layer(Policy(), 'checkpoint_contexts()')
        self.tokens.append(enter(dispatcher, 'checkpoint_contexts()', layer, pinned))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave(self.dispatcher, self.tokens.pop())


def checkpoint_contexts(
    dispatcher: Dispatcher | None = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_contexts)`: recomputation runs
    under the policy and toggles of the forward pass."""
    return nullcontext(), _AsBefore(dispatcher or default_dispatcher())
