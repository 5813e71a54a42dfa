"""FlagGems: operators in Triton for many accelerators, by BAAI."""

from __future__ import annotations

from fla.ops.backends import BaseBackend


class FlagGemsBackend(BaseBackend):
    """What of FlagGems computes exactly what a function of ours says."""

    backend_type = 'flag_gems'
    package_name = 'flag_gems'
    env_var = 'FLA_FLAG_GEMS'
    default_enable = False
    vendor = 'baai'
    devices = ('cuda',)
    verified = False
