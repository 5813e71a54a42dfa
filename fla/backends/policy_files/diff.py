"""Which decisions another policy would change, over calls that were recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fla.backends.backend.base import format_reason
from fla.backends.core.errors import UnknownNameError, error_text
from fla.backends.observe.records import WANTS, Record, read
from fla.backends.observe.trace import Trace
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import State
from fla.backends.policy_files.load import read_version
from fla.backends.runtime.dispatcher import Dispatcher, owner_of
from fla.utils.devices import platform_of_type

if TYPE_CHECKING:
    from fla.backends.plan.decision import CandidateReport, Decision

Calls = Trace | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Record | Mapping[str, Any]]


@dataclass(frozen=True)
class PolicyChange:
    """A kind of call that the new policy decides otherwise.

    Attributes:
        function: 'operation.function'.
        call: the arguments that were recorded.
        times: how often such a call was recorded.
        old, new: the backends that run; None: the call raises.
        old_order, new_order: who decides the order.
        problem: why the call cannot be judged; None where it can.
    """

    function: str
    call: str
    times: int
    old: str | None
    new: str | None
    old_order: str = ''
    new_order: str = ''
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem:
            return f'{self.function}({self.call}) ×{self.times}: cannot be judged: {self.problem}'
        old, new = (f'{backend or "raises"} [{order}]' for backend, order in self._sides())
        return f'{self.function}({self.call}) ×{self.times}: {old} → {new}'

    def _sides(self) -> tuple[tuple[str | None, str], tuple[str | None, str]]:
        return (self.old, self.old_order), (self.new, self.new_order)


def diff_policy(
    old: Policy | str | os.PathLike[str] | None,
    new: Policy | str | os.PathLike[str] | None,
    calls: Calls,
    dispatcher: Dispatcher | None = None,
) -> list[PolicyChange]:
    """Which of the recorded calls two policies decide differently, each in the place of the policy file. Runs and changes
    nothing.

    Args:
        old, new: a policy, the path of a policy file, or None for no file.
        calls: a `trace()`, its JSON or the path of it, or records.
        dispatcher: the namespace; default: that of the `trace()`, else fla's own.

    Returns:
        One entry for each kind of call that is decided differently, or that cannot be judged because the record lacks an
            argument (one keeps tensors and plain values). Calls recorded in compiled code have none and are left out.

    Raises:
        PolicyFileError: for a bad file.
        TypeError, ValueError: for `calls` that hold no records.
        UnknownNameError: for a policy or a record that names what nobody knows.
    """
    records = _records(calls)
    if dispatcher is None and isinstance(calls, Trace):
        dispatcher = calls.dispatcher
    owner = owner_of(dispatcher)
    states = [_state(owner, policy, name) for policy, name in ((old, 'old'), (new, 'new'))]
    counted: dict[str, tuple[Record, int]] = {}
    for record in records:
        if not record.compiled:
            key = json.dumps({**record.to_dict(), 'backend': ''}, sort_keys=True)
            counted[key] = record, counted.get(key, (record, 0))[1] + 1
    found = []
    for record, times in counted.values():
        if record.lost:
            problem = f'the record has no value of {", ".join(record.lost)}'
            found.append(PolicyChange(record.function, str(record), times, None, None, problem=problem))
            continue
        try:
            before, after = (_decide(owner, record, state) for state in states)
        except UnknownNameError:
            raise
        except Exception as error:  # a check that looks at values, which a record has not; a call that was a bad one
            found.append(PolicyChange(record.function, str(record), times, None, None, problem=error_text(error)))
            continue
        blind = [c for decision in (before, after) for c in _asked(decision) if c.verdict == 'bug']
        if blind:  # most likely it looks at values, which a record has not
            problem = f'{blind[0].name}: {format_reason(blind[0].reason)}'
            found.append(PolicyChange(record.function, str(record), times, None, None, problem=problem))
        elif before.winner != after.winner:
            sides = before.winner, after.winner, before.order, after.order
            found.append(PolicyChange(record.function, str(record), times, *sides))
    return found


def _asked(decision: Decision) -> list[CandidateReport]:
    """The candidates that decided: up to the one that won."""
    names = [c.name for c in decision.candidates]
    return list(decision.candidates[: names.index(decision.winner)] if decision.winner in names else decision.candidates)


def _state(owner: Dispatcher, policy: Policy | str | os.PathLike[str] | None, name: str) -> State:
    """The state in force, with another policy in the place of the file's."""
    if policy is None or isinstance(policy, Policy):
        if policy is not None:
            owner.policies.check_policy(policy)
        return owner.policies.state_with_file(policy, 'compared')
    if not isinstance(policy, (str, os.PathLike)):
        raise TypeError(f'{name} must be a Policy, the path of a policy file, or None; got {policy!r:.80}')
    made = read_version(policy, owner)
    return owner.policies.state_with_file(made.policy, made.source)


def _records(calls: Any) -> list[Record]:
    """The records of whatever holds them.

    Raises:
        TypeError, ValueError: for what holds none; names the argument and what is wrong.
        OSError: for a path that cannot be read.
    """
    text: str | bytes | None = None
    if isinstance(calls, bytes) or (
        isinstance(calls, str) and not os.path.lexists(calls) and calls.lstrip().startswith(('{', '['))
    ):
        text = calls
    elif isinstance(calls, (str, os.PathLike)):
        text = Path(calls).read_text(encoding='utf-8')
    try:
        content = json.loads(text) if text is not None else calls
    except (ValueError, RecursionError) as error:
        raise ValueError(f'calls is no JSON: {error}') from None
    if isinstance(content, Mapping):
        if 'records' not in content:
            said = ', '.join(map(repr, content)) or 'nothing'
            raise ValueError(f'calls is the JSON of a trace(), with "records"; this has {said}')
        content = content['records']
    if isinstance(content, str) or not isinstance(content, Iterable):
        raise TypeError(f'{WANTS}; got {content!r:.80}')
    return [read(told, number) for number, told in enumerate(content)]


def _decide(owner: Dispatcher, record: Record, state: State) -> Decision:
    from torch._subclasses.fake_tensor import FakeTensorMode

    entry = owner.catalogue.entry(record.function)
    elsewhere = {}
    platform = None
    for name, (_, _, device) in record.tensors.items():
        kind = torch.device(device).type
        if kind not in ('cpu', 'meta') and not owner.device_facts(platform_of_type(kind)):
            platform, elsewhere[name] = kind, 'cpu'
    with FakeTensorMode(), torch.set_grad_enabled(record.grad_mode):
        return entry.decide((), record.arguments(elsewhere), platform, state)
