"""Makes torch allocate CPU tensors so that glibc can reuse the memory of freed tensors."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

from payload.kernels.build import built_library, default_cache
from payload.kernels.unavailable import KernelsUnavailableError

SOURCE = Path(__file__).with_suffix(".cpp")

log = logging.getLogger(__name__)


def use_plain_malloc() -> None:
    """Make torch allocate CPU tensors by `malloc` for the rest of this process.

    torch calls posix_memalign with an alignment of 64 bytes. glibc 2.36 then searches for a free
    block that is 96 bytes larger than the tensor. The block of a freed tensor is therefore too
    small for the next tensor of the same size, and the heap grows. The allocator of this module
    calls `malloc` for 64 bytes more than needed, and aligns the address itself.

    docs/explanations/memory.md has the measured peaks.

    If the allocator cannot be built, log the reason; torch then keeps its own allocator.
    """
    try:
        library = ctypes.CDLL(str(built_allocator()))
    except (KernelsUnavailableError, OSError) as error:
        log.info(f"memory    torch's own allocator ({error}): activations take more memory")
        return
    library.use_plain_malloc()


def built_allocator() -> Path:
    """Return the allocator's library, built if missing. Raises KernelsUnavailableError."""
    return built_library(default_cache(), name="cpu-allocator", sources=[SOURCE])
