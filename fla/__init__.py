"""Linear attention operations, modules and layers for PyTorch. Each call is served by the fastest implementation that is
installed, enabled and able to handle its arguments.

`import fla` imports nothing else and touches no device. The packages `fla.backends`, `fla.layers`, `fla.modules`, `fla.ops`
and `fla.utils` are imported on first use.
"""

__version__ = '0.7.0'
# What pip installs. flash-linear-attention is imported as `fla` too, but has no such attribute.
__distribution__ = 'fla-dispatch'

__all__ = ['backends', 'layers', 'modules', 'ops', 'utils']

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fla import backends, layers, modules, ops, utils
else:  # hidden from type checkers, which would accept any name

    def __getattr__(name):
        if name in __all__:
            import importlib

            return importlib.import_module(f'fla.{name}')
        from fla.utils.owners import missing

        raise missing(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
