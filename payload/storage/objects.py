"""The seam to a store: named objects with generations, and the errors that it may raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from payload.config.store_address import StoreAddress
from payload.core.errors import ConfigError, ExitCode, TileforgeError

ABSENT = 0
"""The generation of an object that does not exist."""
SMALL_BYTES = 64 * 2**20
"""Most that `read` takes into memory: the largest JSON file that the project reads."""


class StoreError(TileforgeError):
    """The store fails or cannot be reached; the same request may work later."""

    exit_code = ExitCode.PREFLIGHT


class StoreRefusedError(ConfigError):
    """The store cannot be used as it is set up: no such bucket, no permission, no client."""


class ConflictError(StoreError):
    """An object is not at the generation that was asked for: somebody else wrote it."""


class MissingObjectError(StoreError):
    """There is no such object."""


class TooLargeError(StoreError):
    """An object is larger than its reader takes: no program of ours wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object as the store lists it."""

    name: str
    """Below the store's address."""
    bytes: int
    generation: int
    """A number that is new with every write of the object."""
    changed_unix: float = 0.0


class StoreReader(Protocol):
    """Named objects below one address. Every method may raise StoreError or StoreRefusedError."""

    address: StoreAddress

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """List the objects whose names begin with `prefix`."""

    def groups(self) -> list[str]:
        """List the first parts of names that have more parts, which are runs' ids."""

    def siblings(self) -> list[str]:
        """List the groups of the address that this one lies in."""

    def read(self, name: str) -> tuple[bytes, int]:
        """Return a small object's content and generation. Raises MissingObjectError."""

    def fetch(
        self, name: str, into: BinaryIO, *, most_bytes: int, progressed: Callable[[], None]
    ) -> None:
        """Write a whole object to `into`, a file at its start.

        Raises MissingObjectError, and TooLargeError where it has more than `most_bytes`: the
        listing may be of before.
        """


class ObjectStore(StoreReader, Protocol):
    """A store that is written to as well.

    A write is whole or absent: no reader ever sees a part of an object.
    """

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write `size` bytes of `content` from its start.

        With `generation` only over that generation of the object (`ABSENT`: where there is none);
        else raises ConflictError.
        """

    def remove(self, name: str, *, generation: int | None = None) -> None:
        """Remove an object; one that is gone already is no error. Raises ConflictError."""

    def tidy(self) -> None:
        """Remove what writes that were killed left, and what is being written now."""
