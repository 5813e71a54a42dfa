"""Finds the decisions that another policy would change, over recorded calls."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fla.backends.backend.base import format_reason
from fla.backends.core.errors import UnknownNameError, error_text
from fla.backends.observe.records import Record
from fla.backends.observe.trace import Trace
from fla.backends.plan.decision import CandidateReport, Decision
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import State
from fla.backends.policy_files.extra import require_extra
from fla.backends.policy_files.load import read_version
from fla.backends.runtime.dispatcher import Dispatcher, owner_of
from fla.utils.devices import platform_of_type

Calls = Trace | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Record | Mapping[str, Any]]
_WANTED = 'calls is a trace(), its JSON, the path of such JSON, or a list of records'


@dataclass(frozen=True)
class PolicyChange:
    """A kind of call that the new policy decides differently.

    Attributes:
        function: 'operation.function'.
        call: the recorded arguments.
        times: how often such a call was recorded.
        old, new: the backends that run; None if the call raises.
        old_order, new_order: what decides the order.
        problem: why the call cannot be judged, None if it can.
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
        call = f'{self.function}({self.call}) ×{self.times}'
        if self.problem:
            return f'{call}: cannot be judged: {self.problem}'
        return f'{call}: {self.old or "raises"} [{self.old_order}] → {self.new or "raises"} [{self.new_order}]'


def diff_policy(
    old: Policy | str | os.PathLike[str] | None,
    new: Policy | str | os.PathLike[str] | None,
    calls: Calls,
    dispatcher: Dispatcher | None = None,
) -> list[PolicyChange]:
    """Finds the recorded calls that two policies decide differently, each in the place of the policy file. Runs and changes
    nothing.

    Args:
        old, new: a policy, the path of a policy file, or None for no file.
        calls: a `trace()`, its JSON or the path of it, or records. JSON needs pydantic.
        dispatcher: the namespace; default: that of the `trace()`, else fla's own.

    Returns:
        One entry for each kind of call that is decided differently, or that cannot be judged because the record lacks an
            argument (it has tensors' metadata and plain values only). Calls recorded in compiled code have no arguments and
            are left out.

    Raises:
        PolicyFileError: for an invalid file.
        TypeError, ValueError: for `calls` without records.
        UnknownNameError: for a policy or a record with an unknown name.
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
    compared = [_compare(owner, record, times, states) for record, times in counted.values()]
    return [change for change in compared if change is not None]


def _compare(owner: Dispatcher, record: Record, times: int, states: list[State]) -> PolicyChange | None:
    """Returns how the decisions on a call differ under two states; None if they are the same."""

    def not_judged(problem: str) -> PolicyChange:
        return PolicyChange(record.function, str(record), times, None, None, problem=problem)

    if record.lost:
        return not_judged(f'the record has no value of {", ".join(record.lost)}')
    try:
        before, after = (_decide(owner, record, state) for state in states)
    except UnknownNameError:
        raise
    except Exception as error:  # a check that reads tensor values, which a record lacks; an invalid call
        return not_judged(error_text(error))
    for candidate in (*_asked(before), *_asked(after)):
        if candidate.verdict == 'bug':  # most likely it reads tensor values
            return not_judged(f'{candidate.name}: {format_reason(candidate.reason)}')
    if before.winner == after.winner:
        return None
    return PolicyChange(record.function, str(record), times, before.winner, after.winner, before.order, after.order)


def _asked(decision: Decision) -> list[CandidateReport]:
    """Returns the candidates before the winner; all if there is none."""
    names = [c.name for c in decision.candidates]
    return list(decision.candidates[: names.index(decision.winner)] if decision.winner in names else decision.candidates)


def _state(owner: Dispatcher, policy: Policy | str | os.PathLike[str] | None, name: str) -> State:
    """Returns the state in force, with another policy in the place of the file's."""
    if policy is None or isinstance(policy, Policy):
        if policy is not None:
            owner.policies.check_policy(policy)
        return owner.policies.state_with_file(policy, 'compared')
    if not isinstance(policy, (str, os.PathLike)):
        raise TypeError(f'{name} must be a Policy, the path of a policy file, or None; got {policy!r:.80}')
    made = read_version(policy, owner)
    return owner.policies.state_with_file(made.policy, made.source)


def _records(calls: Any) -> list[Record]:
    """Returns the records in `calls`.

    Raises:
        TypeError, ValueError: names the argument and what is wrong.
        OSError: for a path that cannot be read.
    """
    content = calls
    try:
        if isinstance(calls, bytes) or (
            isinstance(calls, str) and not os.path.lexists(calls) and calls.lstrip().startswith(('{', '['))
        ):
            content = json.loads(calls)
        elif isinstance(calls, (str, os.PathLike)):
            content = json.loads(Path(calls).read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'calls is not JSON: {error}') from None
    if isinstance(content, Mapping):
        if 'records' not in content:
            keys = ', '.join(map(repr, content)) or 'nothing'
            raise ValueError(f'calls is the JSON of a trace(), with "records"; this has {keys}')
        content = content['records']
    if isinstance(content, str) or not isinstance(content, Iterable):
        raise TypeError(f'{_WANTED}; got {content!r:.80}')
    return [_record(data, number) for number, data in enumerate(content)]


def _record(data: Any, number: int) -> Record:
    if isinstance(data, Record):
        return data
    if not isinstance(data, Mapping):
        raise TypeError(f'{_WANTED}; calls[{number}] is {data!r:.80}')
    require_extra('the JSON of recorded calls', 'pydantic')
    from fla.backends.policy_files.recorded_calls import read

    return read(data, number)


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
