"""Imports bitsandbytes, for 4-bit linears and for AdamW with a state in 8 bits."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from payload.config.engine_packages import bitsandbytes_missing
from payload.kernels.code_caches import keep_inductor_home


def bitsandbytes_library(*, quantizes: bool) -> Any:
    """Return the module bitsandbytes, which has no type hints.

    Raises ConfigError if it is not installed; `quantizes` is described in `bitsandbytes_missing`.
    """
    try:
        return _imported()
    except ImportError as error:
        raise bitsandbytes_missing(error, quantizes=quantizes) from None


@cache
def _imported() -> Any:
    """Import bitsandbytes on demand, because the import takes a second and compiles operations."""
    keep_inductor_home()
    backend = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = backend.level
    # This logger warns about a missing inference kernel, which training does not use.
    backend.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    finally:
        backend.setLevel(level)
    return bitsandbytes
