"""Which decisions another policy would change, over calls that were recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fla.ops.backends.dispatcher import Dispatcher, owner_of
from fla.ops.backends.explain import explain_entry
from fla.ops.backends.policy import Policy
from fla.ops.backends.precedence import State
from fla.ops.backends.trace import Record, Trace
from fla.utils.devices import platform_of_type

if TYPE_CHECKING:
    from fla.ops.backends.explain import Decision

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
        dispatcher: the namespace; default: fla's own.

    Returns:
        One entry for each kind of call that is decided differently, or that cannot be judged because the record lacks an
            argument (one keeps tensors and plain values). Calls recorded in compiled code have none and are left out.

    Raises:
        PolicyFileError: for a bad file.
        UnknownNameError: for a policy or a record that names what nobody knows.
    """
    owner = owner_of(dispatcher)
    states = [_state(owner, policy) for policy in (old, new)]
    counted: dict[str, tuple[Mapping[str, Any], int]] = {}
    for record in _records(calls):
        if not record['compiled']:
            key = json.dumps(record, sort_keys=True, default=str)
            counted[key] = record, counted.get(key, (record, 0))[1] + 1
    found = []
    for record, times in counted.values():
        words = ', '.join([f'{n}: {t["dtype"]}{list(t["shape"])} on {t["device"]}' for n, t in record['tensors'].items()])
        call = ', '.join(filter(None, [words, *(f'{n}={v!r}' for n, v in record['flags'].items())]))
        try:
            before, after = (_decide(owner, record, state) for state in states)
        except TypeError as error:
            found.append(PolicyChange(record['function'], call, times, None, None, problem=str(error)))
            continue
        if before.winner != after.winner:
            sides = before.winner, after.winner, before.order, after.order
            found.append(PolicyChange(record['function'], call, times, *sides))
    return found


def _state(owner: Dispatcher, policy: Policy | str | os.PathLike[str] | None) -> State:
    """The state in force, with another policy in the place of the file's."""
    if policy is None or isinstance(policy, Policy):
        if policy is not None:
            owner.check_policy(policy)
        return owner.state_with_file(policy, 'compared')
    made = owner.read_policy_version(policy)
    return owner.state_with_file(made.policy, made.source)


def _records(calls: Calls) -> list[Mapping[str, Any]]:
    if isinstance(calls, os.PathLike) or (isinstance(calls, str) and not calls.lstrip().startswith(('{', '['))):
        calls = Path(calls).read_text(encoding='utf-8')
    content: Any = json.loads(calls) if isinstance(calls, str) else calls
    if isinstance(content, Mapping):
        content = content['records']
    return [record.to_dict() if isinstance(record, Record) else record for record in content]


def _decide(owner: Dispatcher, record: Mapping[str, Any], state: State) -> Decision:
    from torch._subclasses.fake_tensor import FakeTensorMode

    entry = owner.entry(record['function'])
    arguments = dict(record['flags'])
    platform = None
    with FakeTensorMode():
        for name, told in record['tensors'].items():
            device = torch.device(told['device'])
            here = device.type in ('cpu', 'meta') or bool(owner.device_facts(platform_of_type(device.type)))
            platform = platform if here else device.type
            dtype = getattr(torch, str(told['dtype']).removeprefix('torch.'))
            arguments[name] = torch.empty(tuple(told['shape']), dtype=dtype, device=device if here else 'cpu')
    return explain_entry(entry, (), arguments, platform, state)
