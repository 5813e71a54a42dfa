"""Plans the functions in use under a policy before it is in force."""

from __future__ import annotations

from collections.abc import Iterable

from fla.backends.backend.base import format_reason
from fla.backends.core.errors import DispatchError
from fla.backends.plan.plan import Candidate
from fla.backends.policy.precedence import State
from fla.backends.runtime.dispatcher import Dispatcher


def require_backends(dispatcher: Dispatcher, state: State, source: str) -> None:
    """Plans every function that has been called as `state` would have it.

    Raises:
        DispatchError: for a function that has a backend now and would have none.
    """
    now = dispatcher.policies.state
    for entry in dispatcher.catalogue.entries():
        if not entry.was_called:
            continue
        own = (entry.own,) if entry.own is not None else ()
        before, after = entry.plan(now.above(*own)), entry.plan(state.above(*own))
        for platform, chain in after.chains.items():
            if _can_run(before.chains.get(platform, ())) and not _can_run(chain):
                reasons = '; '.join(f'{c.member.name}: {format_reason(c.out[1])}' for c in chain if c.out)
                raise DispatchError(f'{source} leaves no backend for {entry.spec.key} on {platform}: {reasons}')


def _can_run(chain: Iterable[Candidate]) -> bool:
    return any(c.out is None and (c.gate is None or c.gate.is_on) for c in chain)
