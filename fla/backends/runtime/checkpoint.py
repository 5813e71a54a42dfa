"""Activation checkpointing: the recomputation must use the backends of the forward pass.

Without this, non-reentrant checkpointing recomputes activations with another backend if a policy or toggle has changed since
the forward pass. PyTorch detects that only if their metadata differ.
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
    """Restores the policy and the toggles of the moment it was made."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.state, self.env = dispatcher, dispatcher.policies.state, dict(LIVE)
        self.tokens: list[int] = []

    def __enter__(self) -> None:
        dispatcher = self.dispatcher
        names = {name for backend in dispatcher.catalogue.backends() for name in dispatcher.toggles.variables(backend)}
        values = tuple(sorted((name, text_of(self.env.get(live_key(name)))) for name in names))
        pinned = State(self.state.layers, env=self.state.env if self.state.env is not None else values)
        # without a verb: the backward pass may run on any thread, so a scope of another thread needs no warning
        self.tokens.append(new_token())
        dispatcher.policies.push_scope(self.tokens[-1], Layer(Policy(), 'checkpoint_contexts()'), pinned)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.dispatcher.policies.pop_scope(self.tokens.pop())


def checkpoint_contexts(
    dispatcher: Dispatcher | None = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_contexts)`: recompute under the
    policy and toggles of the forward pass."""
    return nullcontext(), _AsBefore(owner_of(dispatcher))
