"""Small tests of arguments that generated code calls. Dynamo can trace each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from fla.utils.devices import platform_of_type

# Platforms: of a call whose plan does not depend on one, and of a call without a tensor
ANY = 'any'
NO_TENSOR = 'none'

PLAIN, OVERRIDES, REFUSED, NOT_A_TENSOR = range(4)

_classes: dict[type, int] = {torch.Tensor: PLAIN, torch.nn.Parameter: PLAIN, type(None): NOT_A_TENSOR}


def classify(cls: type) -> int:
    """Returns the kind of an argument's class: `PLAIN` tensors are dispatched, classes with a `__torch_function__` of their
    own (`OVERRIDES`) are offered the call, DTensors are `REFUSED`, and the rest is `NOT_A_TENSOR`."""
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
    """Raises for a DTensor: it shows the global shape, while a kernel would silently compute on one shard."""
    raise TypeError(
        f'argument {name!r} is a {cls}: it shows the global shape while a kernel sees only one shard. '
        f'Pass {name}.to_local(), or wrap the call in torch.distributed.tensor.experimental.local_map'
    )


class NoTensor:
    """Replaces the first tensor of a call without tensors."""

    is_cpu = is_cuda = is_xpu = is_meta = False

    def get_device(self) -> int:
        return -1


NO_TENSOR_ARGUMENT = NoTensor()


def first_tensor(values: Iterable[Any]) -> Any:
    """Returns the first tensor among values."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
    return NO_TENSOR_ARGUMENT


def platform_of(value: Any) -> str:
    """Returns the platform of a tensor; `NO_TENSOR` for another value."""
    return platform_of_type(value.device.type) if isinstance(value, torch.Tensor) else NO_TENSOR


def same(value: Any, default: Any) -> bool:
    """Whether an argument equals its default. Compares plain values only: comparing a tensor or an array would read it."""
    if value is default:
        return True
    if type(value) in (int, float) and type(default) in (int, float):
        return bool(value == default)  # `scale=1` is `scale=1.0`; `flag=1` is not `flag=True`
    return isinstance(value, (str, bytes, tuple)) and type(value) is type(default) and bool(value == default)


def decide(answer: Any) -> Any:
    """Returns a verifier's answer as a bool if it is a comparison of dynamic sizes, and unchanged if not."""
    if isinstance(answer, (bool, torch.SymBool)):
        return True if answer else False  # noqa: SIM210 - Dynamo keeps `bool(answer)` a symbol
    return answer


def any_requires_grad(values: Any) -> bool:
    """Whether a value, or a tensor in a nested list, tuple, dict or module, requires grad."""
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
    """Whether a `torch.func` transform is active. Dynamo runs it while tracing: the region's own transforms are active then,
    and Dynamo guards the outer ones."""
    return torch._C._functorch.peek_interpreter_stack() is not None


in_func_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """Checks that all arguments other than None are tensors on one device. For `check` functions.

    Raises:
        TypeError: names the argument that is not a tensor.
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
