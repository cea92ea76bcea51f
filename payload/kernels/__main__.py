"""`python -m payload.kernels`: build this machine's C++ libraries before a rank needs them."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import sys

from payload.kernels.cpu_allocator import built_allocator
from payload.kernels.library import load_library
from payload.kernels.unavailable import KernelsUnavailableError


def main() -> int:
    """Build both libraries if missing; on failure print the reason on stdout and return 1."""
    try:
        load_library()
        built_allocator()
    except KernelsUnavailableError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
