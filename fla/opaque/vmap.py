"""`torch.vmap` of an opaque kernel: a loop over the samples.

PyTorch has such a loop, but not for operators that write into an argument or whose results may be None. Nor does it see the
eager backward inside `torch.vmap`, which runs without an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import _add_batch_dim, is_batchedtensor, maybe_get_level
from torch._functorch.vmap import unwrap_batched

from fla.opaque.declaration import Kernel


def register_vmap_loop(library: torch.library.Library, op: Any, mutated: Sequence[tuple[int, str]]) -> None:
    """Make vmap run `op` once per sample. `mutated` are the positions and names of the arguments that it writes into."""

    def rule(info: Any, dims: Any, *args: Any) -> Any:
        for place, name in mutated:
            if args[place] is not None and dims[place] is None:
                raise RuntimeError(
                    f'{op.name()} writes into {name!r}, which under torch.vmap is one for all samples: give each its own'
                )
        results = _loop(op, info.batch_size, args, dims)
        return results, _map(lambda x: None if x is None else 0, results)

    torch.library.register_vmap(op.name(), rule, lib=library)


def loop_under_vmap(backward: Kernel) -> Kernel:
    """Wrap a backward so that gradients of many samples run it once per sample: kernels read the memory of one."""

    def run(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return backward(*args)
        levels = [maybe_get_level(x) for x in args if isinstance(x, torch.Tensor) and is_batchedtensor(x)]
        if not levels:
            return backward(*args)
        level = max(levels)
        args, dims = unwrap_batched(args, level)
        count = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if isinstance(dim, int))
        # `run` and not `backward`: there may be an outer vmap
        return _map(lambda x: None if x is None else _add_batch_dim(x, 0, level), _loop(run, count, args, dims))

    return run


def _loop(call: Kernel, count: int, args: Sequence[Any], dims: Sequence[Any]) -> Any:
    """Results of `call` for each of `count` samples, stacked. Arguments without a dim are shared by all samples."""
    batched = [isinstance(x, torch.Tensor) and dim is not None for x, dim in zip(args, dims, strict=True)]

    def sample(place: int) -> Any:
        return call(*(x.select(dim, place) if many else x for x, dim, many in zip(args, dims, batched, strict=True)))

    if count == 0:
        # one sample of zeros, for the sizes of the results
        args = [
            x.new_zeros([1, *x.movedim(dim, 0).shape[1:]]) if many else x
            for x, dim, many in zip(args, dims, batched, strict=True)
        ]
        dims = [0] * len(args)
        return _map(lambda x: None if x is None else x.new_empty((0, *x.shape)), sample(0))
    results = [sample(place) for place in range(count)]
    if not isinstance(results[0], (tuple, list)):
        return _stack(results)
    return tuple(map(_stack, zip(*results, strict=True)))


def _stack(samples: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return None if samples[0] is None else torch.stack(samples)  # type: ignore[arg-type]


def _map(change: Callable[[Any], Any], results: Any) -> Any:
    return tuple(map(change, results)) if isinstance(results, (tuple, list)) else change(results)
