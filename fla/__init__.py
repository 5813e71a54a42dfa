"""One public function per operation, and the fastest implementation that is present, allowed and right for the call.

Importing `fla` loads no operation and touches no device.
"""

__version__ = '0.6.0'

TYPE_CHECKING = False
if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name):
        from fla.utils.owners import missing

        raise missing(__name__, name)
