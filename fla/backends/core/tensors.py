"""Small questions that generated code asks about arguments. Each can be traced by Dynamo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from fla.utils.devices import platform_of_type

# The platform of a call whose plan does not depend on one, and of a call without a tensor.
ANY = 'any'
NO_TENSOR = 'none'

PLAIN, OVERRIDES, REFUSED, NOT_A_TENSOR = range(4)

_classes: dict[type, int] = {torch.Tensor: PLAIN, torch.nn.Parameter: PLAIN, type(None): NOT_A_TENSOR}


def classify(cls: type) -> int:
    """What kind of argument a class makes: `PLAIN` tensors go on, `OVERRIDES` have a `__torch_function__` of their own and
    are offered the call, `REFUSED` are DTensors, and the rest is `NOT_A_TENSOR`."""
    kind = _classes.get(cls)
    if kind is None:
        kind = _classes[cls] = _classify(cls)
    return kind


classify._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _classify(cls: type) -> int:
    # by name: importing torch.distributed.tensor costs more than everything else here
    if any(base.__name__ == 'DTensor' and base.__module__.startswith('torch.distributed') for base in cls.__mro__):
        return REFUSED
    own = getattr(cls, '__torch_function__', None)
    inherited = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
    if own is not None and getattr(own, '__func__', own) not in inherited:
        return OVERRIDES
    return PLAIN if issubclass(cls, torch.Tensor) else NOT_A_TENSOR


def refuse(name: str, cls: str) -> NoReturn:
    """DTensors show the global shape and have no data pointer: a kernel would silently compute on one shard."""
    raise TypeError(
        f'argument {name!r} is a {cls}: it shows the global shape while a kernel sees only one shard. '
        f'Pass {name}.to_local(), or wrap the call in torch.distributed.tensor.experimental.local_map'
    )


class NoTensor:
    """Stands for the first tensor of a call that has none."""

    is_cpu = is_cuda = is_xpu = is_meta = False

    def get_device(self) -> int:
        return -1


NO_TENSOR_ARGUMENT = NoTensor()


def first_tensor(values: Iterable[Any]) -> Any:
    """The first tensor among values."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
    return NO_TENSOR_ARGUMENT


def platform_of(value: Any) -> str:
    """The platform a value is on: a tensor's, or none."""
    if isinstance(value, torch.Tensor):
        return platform_of_type(value.device.type)
    return NO_TENSOR


def same(value: Any, default: Any) -> bool:
    """Whether an argument holds its default. Only plain values are compared: a tensor or an array would be read."""
    if value is default:
        return True
    if type(value) in (int, float) and type(default) in (int, float):
        return bool(value == default)  # `scale=1` is `scale=1.0`; `flag=1` is not `flag=True`
    return isinstance(value, (str, bytes, tuple)) and type(value) is type(default) and bool(value == default)


def decide(answer: Any) -> Any:
    """A verifier's answer as a bool, where it is a comparison of dynamic sizes; anything else as it is."""
    if isinstance(answer, (bool, torch.SymBool)):
        return True if answer else False  # noqa: SIM210 - for Dynamo, `bool(answer)` is a symbol still
    return answer


def any_requires_grad(values: Any) -> bool:
    """Whether a tensor in a (nested) list, tuple or mapping, or the value itself, requires grad."""
    if isinstance(values, torch.Tensor):
        return values.requires_grad
    if isinstance(values, dict):
        return any(any_requires_grad(value) for value in values.values())
    if isinstance(values, (list, tuple)):
        return any(any_requires_grad(value) for value in values)
    if isinstance(values, torch.nn.Module):
        return any(parameter.requires_grad for parameter in values.parameters())
    return False


def in_func_transform() -> bool:
    """Whether a `torch.func` transform is active. Run while tracing: Dynamo has the region's own transforms active then, and
    guards those around it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


in_func_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """For `check` functions: every argument that is given is a tensor, and all are on one device.

    Raises:
        TypeError: names the argument that is no tensor.
        ValueError: names two arguments and their devices.
    """
    first: tuple[str, torch.Tensor] | None = None
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f'argument {name!r} must be a tensor, got {type(value).__name__}')
        if first is None:
            first = name, value
        elif value.device != first[1].device:
            raise ValueError(
                f'argument {name!r} is on {value.device} and {first[0]!r} on {first[1].device}: move them to one device'
            )
