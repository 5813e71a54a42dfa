"""What `torch.vmap` makes of an opaque kernel: a loop over the samples.

PyTorch has one of its own, but not for operators whose results may be None or that write into an argument; and it does not
see a backward that runs without an operator, as that of eager code does inside `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import _add_batch_dim, is_batchedtensor, maybe_get_level
from torch._functorch.vmap import unwrap_batched

from fla.opaque.declaration import Kernel


def register_loop(library: torch.library.Library, op: Any, mutated: Sequence[tuple[int, str]]) -> None:
    """Have vmap run an operator in a loop. `mutated` are the places and names of arguments that are written into."""

    def rule(info: Any, dims: Any, *args: Any) -> Any:
        for place, name in mutated:
            if args[place] is not None and dims[place] is None:
                raise RuntimeError(
                    f'{op.name()} writes into {name!r}, which under torch.vmap is one for all samples: give each its own'
                )
        results = loop(op, info.batch_size, args, dims)
        return results, _each(lambda one: None if one is None else 0, results)

    torch.library.register_vmap(op.name(), rule, lib=library)


def loop(call: Kernel, count: int, args: Sequence[Any], dims: Sequence[Any]) -> Any:
    """What a call returns for each sample, stacked. Arguments without a dim, which all but tensors are, are one for all."""

    def sample(place: int) -> Any:
        picked = (
            x if not isinstance(x, torch.Tensor) or dim is None else x.select(dim, place)
            for x, dim in zip(args, dims, strict=True)
        )
        return call(*picked)

    if count == 0:
        # of one that is not there, for the sizes
        args = [
            x if not isinstance(x, torch.Tensor) or dim is None else x.new_zeros([1, *x.movedim(dim, 0).shape[1:]])
            for x, dim in zip(args, dims, strict=True)
        ]
        dims = [0 if isinstance(x, torch.Tensor) and dim is not None else None for x, dim in zip(args, dims, strict=True)]
        return _each(lambda one: None if one is None else one.new_empty((0, *one.shape)), sample(0))
    results = [sample(place) for place in range(count)]
    if not isinstance(results[0], (tuple, list)):
        return None if results[0] is None else torch.stack(results)
    return tuple(None if one[0] is None else torch.stack(one) for one in zip(*results, strict=True))


def _each(change: Callable[[Any], Any], results: Any) -> Any:
    return tuple(map(change, results)) if isinstance(results, (tuple, list)) else change(results)


def in_a_loop(backward: Kernel) -> Kernel:
    """A backward that runs once for each sample where it gets gradients of many, as kernels see the memory of one."""

    def run(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return backward(*args)
        levels = [maybe_get_level(x) for x in args if isinstance(x, torch.Tensor) and is_batchedtensor(x)]
        if not levels:
            return backward(*args)
        level = max(levels)
        args, dims = unwrap_batched(args, level)
        count = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if isinstance(dim, int))
        # again, as there may be a vmap around this one
        return _each(lambda x: None if x is None else _add_batch_dim(x, 0, level), loop(run, count, args, dims))

    return run
