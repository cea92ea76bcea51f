"""How the program's own errors reach the person at `pulumi up`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pulumi

from payload.core.errors import TileforgeError


@contextmanager
def shown_plainly() -> Iterator[None]:
    """Our errors as pulumi.RunError, which Pulumi shows without a traceback."""
    try:
        yield
    except TileforgeError as error:
        raise pulumi.RunError(str(error)) from None
