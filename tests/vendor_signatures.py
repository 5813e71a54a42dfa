"""What backends assume of vendors' packages: import path -> parameters, as far as we pass them, in their order. Parameters
beyond those must have defaults. `tests/test_vendor_signatures.py` compares with what is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

SIGNATURES: dict[str, tuple[str, ...]] = {
    # Liger-Kernel, 0.6.0 to 0.8.5
    'liger_kernel.ops.rms_norm.rms_norm_forward': ('X', 'W', 'eps', 'offset', 'casting_mode', 'row_mode'),
    'liger_kernel.ops.rms_norm.rms_norm_backward': (
        *('dY', 'X', 'W', 'RSTD', 'offset', 'casting_mode', 'BLOCK_SIZE', 'num_warps', 'in_place', 'row_mode'),
    ),
    'liger_kernel.ops.layer_norm.layer_norm_forward': ('X', 'W', 'B', 'eps'),
    'liger_kernel.ops.layer_norm.layer_norm_backward': ('dY', 'X', 'W', 'B', 'Mean', 'RSTD'),
    'liger_kernel.ops.utils.calculate_settings': ('n',),
    # FlashInfer, 0.7.4
    'flashinfer.norm.rmsnorm': ('input', 'weight', 'eps'),
    # FlagGems, 5.0.2
    'flag_gems.rms_norm': ('x', 'normalized_shape', 'weight', 'eps'),
}

# Values that stand for something in calls.
CONSTANTS: dict[str, object] = {'liger_kernel.ops.rms_norm._CASTING_MODE_GEMMA': 1}


def installed(path: str) -> bool:
    return importlib.util.find_spec(path.partition('.')[0]) is not None


def found(path: str) -> object:
    module, _, name = path.rpartition('.')
    return getattr(importlib.import_module(module), name)


def difference(path: str) -> str | None:
    """What is other than assumed of a function, None if nothing is."""
    parameters = list(inspect.signature(found(path)).parameters.values())
    names = tuple(one.name for one in parameters)
    assumed = SIGNATURES[path]
    if names[: len(assumed)] != assumed:
        return f'{path} takes {names}, not {assumed}'
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [
        one.name for one in parameters[len(assumed) :] if one.default is inspect.Parameter.empty and one.kind not in variadic
    ]
    return f'{path} also needs {more}' if more else None
