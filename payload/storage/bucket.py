"""A store in a bucket of Google Cloud Storage: the one file that imports its client."""

from __future__ import annotations

import base64
import io
import os
import re
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, TypeVar

from payload.config.store_address import StoreAddress
from payload.core.errors import CloudAuthError
from payload.core.printable_text import one_line
from payload.storage.credentials import load_credentials, quiet
from payload.storage.google_environment_login import GoogleLogin
from payload.storage.objects import (
    SMALL_BYTES,
    ConflictError,
    MissingObjectError,
    StoredObject,
    StoreError,
    StoreRefusedError,
    TooLargeError,
)

_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 16.0
_PART_BYTES = 32 * 2**20
_T = TypeVar("_T")
_FETCHES = 3
"""Tries for an object whose checksum is not the store's: the network may have changed it."""
"""Bytes of one request of a resumable upload or a download: the most that a broken one costs."""
_WRITE_ID = "tileforge-write"
"""Metadata of every object: a random id of the write, by which a writer knows its own."""
_QUERY = re.compile(r"\?[^\s'\")>]+")
_STAND_IN = "STORAGE_EMULATOR_HOST"
"""The client's variable for a server in Google's place, which is sent no credentials."""
_REFUSED = "invalid_grant"
"""In the answer of Google's token server about a login or a key that is not valid."""


class BucketStore:
    """Objects in a bucket below a prefix. Threads may share it: each gets its own connection."""

    def __init__(self, address: StoreAddress, *, timeout_s: float, retry_s: float) -> None:
        """Raises StoreRefusedError where the client, or the login that is named, is not there."""
        self.address = address
        self._prefix = f"{address.path}/" if address.path else ""
        self._timeout = (_CONNECT_S, timeout_s)
        self._retry_s = retry_s
        # The client reads its variables of the environment itself, too.
        self._login = GoogleLogin() if _STAND_IN in os.environ else GoogleLogin.from_env(os.environ)
        self._local = threading.local()
        _libraries()
        try:
            with quiet():
                # Without any the client finds the node's, or the application default.
                self._credentials = (
                    None if self._login.is_default else load_credentials(self._login)
                )
        except CloudAuthError as error:
            raise StoreRefusedError(f"{address}: {error}") from None

    def entries(self, prefix: str = "") -> list[StoredObject]:
        """List the objects whose names begin with `prefix`."""

        def pages() -> list[StoredObject]:
            listed = self._client().list_blobs(
                self.address.bucket,
                prefix=f"{self._prefix}{prefix}",
                timeout=self._timeout,
                retry=self._retry(),
            )
            return [self._stored(blob) for blob in listed]

        with self._plainly(f"listing {self.address}"):
            return _read_again(pages)

    def groups(self) -> list[str]:
        """List the first parts of names that have more parts."""

        def pages() -> list[str]:
            listed = self._client().list_blobs(
                self.address.bucket,
                prefix=self._prefix,
                delimiter="/",
                timeout=self._timeout,
                retry=self._retry(),
            )
            for _ in listed:  # the prefixes are known when all pages are read
                continue
            return sorted(each[len(self._prefix) :].rstrip("/") for each in listed.prefixes)

        with self._plainly(f"listing {self.address}"):
            return _read_again(pages)

    def siblings(self) -> list[str]:
        """List the groups of the address that this one lies in."""
        return BucketStore(
            self.address.parent(), timeout_s=self._timeout[1], retry_s=self._retry_s
        ).groups()

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write `size` bytes of `content`; what the store has then is compared by checksum."""
        blob = self._blob(name)
        write_id = secrets.token_hex(16)
        blob.metadata = {_WRITE_ID: write_id}
        content.seek(0)
        try:
            with self._plainly(f"writing {self.address.under(name)}"):
                blob.upload_from_file(
                    content,
                    size=size,
                    if_generation_match=generation,
                    timeout=self._timeout,
                    retry=self._retry(),
                    checksum="crc32c",
                )
        except ConflictError:
            # A write that was done and whose answer was lost is sent again by the client, and
            # then its own object is in the way.
            if not self._is_own(blob, name, write_id=write_id):
                raise
        stored = self._stored(blob)
        if stored.bytes != size or blob.crc32c != _crc32c(content):
            # Not every server compares the checksum that it is sent; ours must not stay wrong.
            self.remove(name, generation=stored.generation)
            raise StoreError(f"writing {self.address.under(name)}: the store got other bytes")
        return stored

    def _is_own(self, blob: Any, name: str, *, write_id: str) -> bool:
        """Read the object's properties back into `blob`; say whether this write made it."""
        try:
            with self._plainly(f"reading {self.address.under(name)}"):
                _read_again(partial(blob.reload, timeout=self._timeout, retry=self._retry()))
        except MissingObjectError:
            return False
        return bool((blob.metadata or {}).get(_WRITE_ID) == write_id)

    def read(self, name: str) -> tuple[bytes, int]:
        """Return a small object's content and generation."""
        blob = self._blob(name)
        with self._plainly(f"reading {self.address.under(name)}"):
            _read_again(partial(blob.reload, timeout=self._timeout, retry=self._retry()))
            if blob.size > SMALL_BYTES:
                raise TooLargeError(f"{self.address.under(name)}: {blob.size} bytes are too many")
            content = io.BytesIO()
            blob.download_to_file(
                content,
                if_generation_match=blob.generation,
                timeout=self._timeout,
                retry=self._retry(),
                checksum="crc32c",
                raw_download=True,
            )
            return content.getvalue(), int(blob.generation)

    def fetch(
        self, name: str, into: BinaryIO, *, most_bytes: int, progressed: Callable[[], None]
    ) -> None:
        """Write a whole object to `into`, part by part."""
        blob = self._blob(name)
        with self._plainly(f"reading {self.address.under(name)}"):
            _read_again(partial(blob.reload, timeout=self._timeout, retry=self._retry()))
            size, generation = int(blob.size), blob.generation
            if size > most_bytes:
                raise TooLargeError(
                    f"{self.address.under(name)}: it has more than {most_bytes:,} bytes"
                )
            for start in range(0, size, _PART_BYTES):
                end = min(size, start + _PART_BYTES)
                # Of a part the store has no checksum; whoever brings more compares hashes.
                whole = blob.crc32c if end - start == size else None
                into.write(self._part(blob, name, start, end, generation, crc32c=whole))
                progressed()

    def _part(
        self, blob: Any, name: str, start: int, end: int, generation: int, *, crc32c: str | None
    ) -> bytes:
        """Read a part into memory, so that a retry never leaves half of one behind."""
        for _ in range(_FETCHES):
            part: bytes = blob.download_as_bytes(
                start=start,
                end=end - 1,
                if_generation_match=generation,
                timeout=self._timeout,
                retry=self._retry(),
                raw_download=True,
                checksum=None,
            )
            if len(part) != end - start:
                raise StoreError(
                    f"reading {self.address.under(name)}: {len(part)} bytes came of {end - start}"
                )
            if crc32c in (None, _crc32c(io.BytesIO(part))):
                return part
        raise StoreError(f"reading {self.address.under(name)}: its bytes came over changed")

    def remove(self, name: str, *, generation: int | None = None) -> None:
        """Remove an object; one that is gone already is no error."""
        try:
            with self._plainly(f"removing {self.address.under(name)}"):
                self._blob(name).delete(
                    if_generation_match=generation, timeout=self._timeout, retry=self._retry()
                )
        except MissingObjectError:
            return

    def tidy(self) -> None:
        """Nothing: a bucket shows no part of an object, and lets go of it after a week."""

    def _client(self) -> Any:
        # requests' sessions are not for several threads at once.
        if not hasattr(self._local, "client"):
            storage, auth = _libraries().storage, _libraries().auth_errors
            try:
                # Objects belong to a bucket; the client asks for a project all the same.
                self._local.client = storage.Client(project="unused", credentials=self._credentials)
            except auth.GoogleAuthError as error:
                raise StoreRefusedError(
                    f"{self.address}: no credentials for Google ({one_line(error)}). "
                    f"{self._or_of_the_node(self._login.renewal())}."
                ) from None
        return self._local.client

    def _or_of_the_node(self, fix: str) -> str:
        """Return a fix of the login; on a node there is another one."""
        return f"{fix}, or use the node's service account" if self._login.is_default else fix

    def _credentials_error(self, what: str, error: Exception) -> StoreRefusedError:
        refusal = self._or_of_the_node(self._login.refusal(str(error)))
        return StoreRefusedError(f"{what} ({_words(error)}): {refusal}.")

    def _blob(self, name: str) -> Any:
        bucket = self._client().bucket(self.address.bucket)
        return bucket.blob(f"{self._prefix}{name}", chunk_size=_PART_BYTES)

    def _stored(self, blob: Any) -> StoredObject:
        return StoredObject(
            name=blob.name[len(self._prefix) :],
            bytes=int(blob.size),
            generation=int(blob.generation),
            changed_unix=blob.updated.timestamp() if blob.updated else 0.0,
        )

    def _retry(self) -> Any:
        """Return the client's own policy for what may pass: 429, 5xx, broken connections."""
        return (
            _libraries()
            .retry.with_timeout(self._retry_s)
            .with_delay(initial=min(_FIRST_PAUSE_S, self._retry_s / 8), maximum=_LONGEST_PAUSE_S)
        )

    @contextmanager
    def _plainly(self, what: str) -> Iterator[None]:
        """Turn the client's errors into ours, in one line."""
        libraries = _libraries()
        try:
            yield
        except libraries.errors.PreconditionFailed:
            raise ConflictError(f"{what}: somebody else wrote it meanwhile") from None
        except libraries.errors.NotFound as error:
            # Who lists or writes can miss nothing but the bucket.
            is_bucket = what.startswith(("listing", "writing"))
            if is_bucket or "bucket does not exist" in str(error):
                raise StoreRefusedError(
                    f"{what}: there is no bucket {self.address.bucket!r}. Make it with bucket: "
                    "create in the cluster's settings, or name another in storage.results."
                ) from None
            raise MissingObjectError(f"{what}: there is no such object") from None
        except libraries.errors.Unauthorized as error:
            raise self._credentials_error(what, error) from None
        except libraries.errors.Forbidden as error:
            raise StoreRefusedError(
                f"{what}: Google refuses it ({_words(error)}). Give the account "
                f"roles/storage.objectUser on the bucket {self.address.bucket}."
            ) from None
        except libraries.auth_errors.DefaultCredentialsError:
            raise StoreRefusedError(
                f"{what}: no credentials for Google. {self._or_of_the_node(self._login.renewal())}."
            ) from None
        except libraries.auth_errors.RefreshError as error:
            # A node's metadata server may fail for a moment, and the library does not say so.
            is_refused = _REFUSED in str(error) or not self._login.is_default
            if error.retryable or not is_refused:
                raise StoreError(f"{what}: {_words(error)}") from None
            raise self._credentials_error(what, error) from None
        except StoreError:
            raise
        except libraries.all as error:
            raise StoreError(f"{what}: {_words(error)}") from None


def _read_again(ask: Callable[[], _T]) -> _T:
    """Return an answer that is a document, asking again where the network has changed one."""
    for _ in range(_FETCHES - 1):
        with suppress(ValueError):
            return ask()
    return ask()


def _crc32c(content: BinaryIO) -> str:
    """Return the checksum of a whole file as the store writes it."""
    content.seek(0)
    checksum = _libraries().crc32c.Checksum()
    while part := content.read(_PART_BYTES):
        checksum.update(part)
    return base64.b64encode(checksum.digest()).decode()


def _words(error: Exception) -> str:
    """Return an error in one short line: the client puts request and answer into its text."""
    cause: BaseException = getattr(error, "cause", None) or error.__cause__ or error
    # Whoever has the query of an upload's URL may write.
    return one_line(_QUERY.sub("?...", f"{type(cause).__name__}: {cause}"))


class _Libraries:
    """The parts of the client that are used, once it is imported."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # That Google will stop supporting a Python in some years is not for a run's log.
            warnings.simplefilter("ignore", FutureWarning)
            import google.auth.exceptions as auth_errors
            import google_crc32c
            import requests
            import urllib3
            from google.api_core import exceptions as errors
            from google.cloud import storage
            from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
            from google.cloud.storage.retry import DEFAULT_RETRY
        self.storage, self.errors, self.auth_errors = storage, errors, auth_errors
        self.retry, self.crc32c = DEFAULT_RETRY, google_crc32c
        self.all = (
            errors.GoogleAPIError,
            auth_errors.GoogleAuthError,
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            DataCorruption,
            InvalidResponse,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        )
        """Also what the client raises when an answer is not what it expects."""


_loaded: list[_Libraries] = []


def _libraries() -> _Libraries:
    """Import the client at its first use. Raises StoreRefusedError where it is not installed."""
    if not _loaded:
        try:
            _loaded.append(_Libraries())
        except ImportError as error:
            raise StoreRefusedError(
                f"a gs:// address needs Google's client, which is not installed here ({error}). "
                "Install it: pip install google-cloud-storage, or bootstrap/install-payload.sh "
                "--extras storage."
            ) from None
    return _loaded[0]
