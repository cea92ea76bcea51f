"""`python -m payload.kernels`: build this machine's kernels before a rank needs them."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import sys

from payload.kernels.library import load_library
from payload.kernels.unavailable import KernelsUnavailableError


def main() -> int:
    """Build the kernels if missing; on failure print the reason on stdout and return 1."""
    try:
        load_library()
    except KernelsUnavailableError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
