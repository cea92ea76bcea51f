"""Shows the program's errors in `pulumi up` without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pulumi

from payload.core.errors import TileforgeError


@contextmanager
def shown_plainly() -> Iterator[None]:
    """Convert TileforgeError to pulumi.RunError, which Pulumi shows without a traceback."""
    try:
        yield
    except TileforgeError as error:
        raise pulumi.RunError(str(error)) from None
