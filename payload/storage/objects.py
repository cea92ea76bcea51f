"""The interface of a store: named objects with generations, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from payload.config.store_address import StoreAddress
from payload.core.errors import ConfigError, ExitCode, TileforgeError

ABSENT = 0
"""The generation of an object that does not exist."""
SMALL_BYTES = 64 * 2**20
"""Largest object that `read` loads into memory; also the limit for JSON files."""


class StoreError(TileforgeError):
    """The store fails or cannot be reached; a retry may succeed."""

    exit_code = ExitCode.PREFLIGHT


class StoreRefusedError(ConfigError):
    """The store cannot be used as configured: missing bucket, permission or client."""


class ConflictError(StoreError):
    """An object's generation is not the expected one, because another process wrote the object."""


class MissingObjectError(StoreError):
    """The object does not exist."""


class TooLargeError(StoreError):
    """An object exceeds the reader's size limit, so Tileforge did not write the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object of the store's listing."""

    name: str
    """Name below the store's address."""
    bytes: int
    generation: int
    """A number that changes with every write of the object."""
    changed_unix: float = 0.0


class StoreReader(Protocol):
    """Named objects below one address. All methods can raise StoreError or StoreRefusedError."""

    address: StoreAddress

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """List the objects whose names begin with `prefix`."""

    def groups(self) -> list[str]:
        """List the first-level folders. Their names are run ids."""

    def siblings(self) -> list[str]:
        """List the first-level folders of the parent address."""

    def read(self, name: str) -> tuple[bytes, int]:
        """Return a small object's content and generation. Raises MissingObjectError."""

    def fetch(
        self, name: str, into: BinaryIO, *, most_bytes: int, progressed: Callable[[], None]
    ) -> None:
        """Write a whole object to `into`, a file at position 0.

        Raises MissingObjectError, and TooLargeError for more than `most_bytes`, as the object may
        have changed since it was listed.
        """


class ObjectStore(StoreReader, Protocol):
    """A store with write access. Writes are atomic: readers never see a part of an object."""

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write `size` bytes of `content` from its start.

        With `generation`, raises ConflictError if the object has a different generation. The
        generation `ABSENT` means that the object does not exist.
        """

    def remove(self, name: str, *, generation: int | None = None) -> None:
        """Remove an object; a missing object is not an error. Raises ConflictError."""

    def tidy(self) -> None:
        """Remove the temporary files of interrupted writes, and of writes in progress."""
