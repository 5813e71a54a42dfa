"""One public function per operation, and the fastest implementation that is present, allowed and right for the call.

Importing `fla` loads no operation and touches no device.
"""

__version__ = '0.6.0'
