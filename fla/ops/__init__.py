"""The operations `attn`, `gated_delta_rule` and `kda`, and `utils` for what their callers compute beside them.

All are imported on first use, as are the functions that flash-linear-attention exports here too.
"""

_PACKAGES = ('attn', 'backends', 'gated_delta_rule', 'kda', 'utils')
_FUNCTIONS = {
    'chunk_gated_delta_rule': 'gated_delta_rule',
    'chunk_gdn': 'gated_delta_rule',
    'chunk_kda': 'kda',
    'fused_recurrent_gated_delta_rule': 'gated_delta_rule',
    'fused_recurrent_kda': 'kda',
    'parallel_attn': 'attn',
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fla.ops import attn as attn
    from fla.ops import backends as backends
    from fla.ops import gated_delta_rule as gated_delta_rule
    from fla.ops import kda as kda
    from fla.ops import utils as utils
    from fla.ops.attn import parallel_attn as parallel_attn
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunk_gated_delta_rule
    from fla.ops.gated_delta_rule import chunk_gdn as chunk_gdn
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda as chunk_kda
    from fla.ops.kda import fused_recurrent_kda as fused_recurrent_kda
else:  # hidden from type checkers, which would accept any name
    __all__ = list(_FUNCTIONS)

    def __getattr__(name):
        import importlib

        if name in _PACKAGES:
            return importlib.import_module(f'fla.ops.{name}')
        if name in _FUNCTIONS:
            found = globals()[name] = getattr(importlib.import_module(f'fla.ops.{_FUNCTIONS[name]}'), name)
            return found
        from fla.utils.owners import missing

        raise missing(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_FUNCTIONS})
