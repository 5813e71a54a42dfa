"""Activation checkpointing: the recomputation must choose what the forward pass chose.

With non-reentrant checkpointing, a policy or a toggle that changes between forward and backward makes the recomputed
activations another backend's. PyTorch notices only if their metadata differ.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer, State
from fla.backends.runtime.dispatcher import Dispatcher, owner_of
from fla.backends.runtime.scopes import new_token
from fla.utils.env import LIVE, live_key, text_of


class _AsBefore:
    """Puts back the policy and the toggles of the moment it was made."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.state, self.env = dispatcher, dispatcher.policies.state, dict(LIVE)
        self.tokens: list[int] = []

    def __enter__(self) -> None:
        dispatcher = self.dispatcher
        names = {name for backend in dispatcher.catalogue.backends() for name in dispatcher.toggles.variables(backend)}
        values = tuple(sorted((name, text_of(self.env.get(live_key(name)))) for name in names))
        pinned = State(self.state.layers, env=self.state.env if self.state.env is not None else values)
        # on whatever thread the backward pass runs: no reason to warn of a scope that another thread holds
        self.tokens.append(new_token())
        dispatcher.policies.push_scope(self.tokens[-1], Layer(Policy(), 'checkpoint_contexts()'), pinned)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.dispatcher.policies.pop_scope(self.tokens.pop())


def checkpoint_contexts(
    dispatcher: Dispatcher | None = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_contexts)`: recomputation runs
    under the policy and toggles of the forward pass."""
    return nullcontext(), _AsBefore(owner_of(dispatcher))
