"""Opens the bucket or folder at a store's address, and tests that the store can be used."""

from __future__ import annotations

import io
import secrets
from contextlib import suppress

from payload.config.store_address import StoreAddress
from payload.storage.bucket import BucketStore
from payload.storage.folder import FolderStore
from payload.storage.objects import ABSENT, ConflictError, ObjectStore, StoreError

_CHECK_S = 15.0


def open_store(
    address: StoreAddress, *, timeout_s: float = 60.0, retry_s: float = 60.0
) -> ObjectStore:
    """Return the store at an address, without sending a request to it.

    `timeout_s` is the timeout of one request, and `retry_s` the time in which a request is retried.
    Raises StoreRefusedError if the client is not installed.
    """
    if address.bucket is None:
        return FolderStore(address)
    return BucketStore(address, timeout_s=timeout_s, retry_s=retry_s)


def check_store(address: StoreAddress, *, timeout_s: float = _CHECK_S) -> None:
    """Write, read and remove a small object. Raises StoreRefusedError and StoreError."""
    store = open_store(address, timeout_s=timeout_s, retry_s=timeout_s)
    name, content = f"tileforge-check-{secrets.token_hex(4)}", secrets.token_bytes(64)
    # The name is random, so a conflict means that an earlier attempt wrote the object and its
    # response was lost.
    with suppress(ConflictError):
        store.put(name, io.BytesIO(content), size=len(content), generation=ABSENT)
    try:
        if store.read(name)[0] != content:
            raise StoreError(
                f"{address}: an object that was read back differs from what was written"
            )
    finally:
        store.remove(name)
