"""A store in a bucket of Google Cloud Storage. Only this file imports Google's client."""

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
"""Bytes of one request of a resumable upload or a download."""
_T = TypeVar("_T")
_FETCHES = 3
"""Attempts to download an object. A checksum detects data that the network has damaged."""
_WRITE_ID = "tileforge-write"
"""Metadata key for a random id of each write. By this id, a writer recognises the object that it
wrote."""
_QUERY = re.compile(r"\?[^\s'\")>]+")
_STAND_IN = "STORAGE_EMULATOR_HOST"
"""Environment variable in which Google's client finds the address of an emulator. No credentials
are sent to an emulator."""
_REFUSED = "invalid_grant"
"""Error code of Google's token server for an invalid login or key."""


class BucketStore:
    """Objects in a bucket below a prefix.

    Threads can share this object; each thread has a separate connection.
    """

    def __init__(self, address: StoreAddress, *, timeout_s: float, retry_s: float) -> None:
        """Prepare the login. Raises StoreRefusedError if the client or the login is missing."""
        self.address = address
        self._prefix = f"{address.path}/" if address.path else ""
        self._timeout = (_CONNECT_S, timeout_s)
        self._retry_s = retry_s
        # os.environ is read here because the client also reads its variables from it.
        self._login = GoogleLogin() if _STAND_IN in os.environ else GoogleLogin.from_env(os.environ)
        self._local = threading.local()
        _libraries()
        try:
            with quiet():
                # With None, the client uses the node's or the application default credentials.
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
        """List the first-level folders.

        A folder is the first path component of every object name that contains a slash.
        """

        def pages() -> list[str]:
            listed = self._client().list_blobs(
                self.address.bucket,
                prefix=self._prefix,
                delimiter="/",
                timeout=self._timeout,
                retry=self._retry(),
            )
            for _ in listed:  # the prefixes are complete when all pages are read
                continue
            return sorted(each[len(self._prefix) :].rstrip("/") for each in listed.prefixes)

        with self._plainly(f"listing {self.address}"):
            return _read_again(pages)

    def siblings(self) -> list[str]:
        """List the first-level folders of the parent address."""
        return BucketStore(
            self.address.parent(), timeout_s=self._timeout[1], retry_s=self._retry_s
        ).groups()

    def put(
        self, name: str, content: BinaryIO, *, size: int, generation: int | None = None
    ) -> StoredObject:
        """Write `size` bytes of `content`, and verify the stored object's checksum."""
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
            # If the response to a successful write was lost, the client sends the write again. The
            # second write then conflicts with the object of the first.
            if not self._is_own(blob, name, write_id=write_id):
                raise
        stored = self._stored(blob)
        if stored.bytes != size or blob.crc32c != _crc32c(content):
            # Some servers do not verify the checksum. An object with wrong content must not remain.
            self.remove(name, generation=stored.generation)
            raise StoreError(
                f"writing {self.address.under(name)}: the store received different bytes"
            )
        return stored

    def _is_own(self, blob: Any, name: str, *, write_id: str) -> bool:
        """Reload the properties of `blob`; return True if this write created the object."""
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
                raise TooLargeError(
                    f"{self.address.under(name)}: the object is too large ({blob.size} bytes)"
                )
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
                    f"{self.address.under(name)}: the object has more than {most_bytes:,} bytes"
                )
            for start in range(0, size, _PART_BYTES):
                end = min(size, start + _PART_BYTES)
                # The store has a checksum only of the whole object. Callers compare hashes of
                # larger files.
                whole = blob.crc32c if end - start == size else None
                into.write(self._part(blob, name, start, end, generation, crc32c=whole))
                progressed()

    def _part(
        self, blob: Any, name: str, start: int, end: int, generation: int, *, crc32c: str | None
    ) -> bytes:
        """Read a part into memory, so that a retry never leaves an incomplete part in the file."""
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
                    f"reading {self.address.under(name)}: received {len(part)} of "
                    f"{end - start} bytes"
                )
            if crc32c in (None, _crc32c(io.BytesIO(part))):
                return part
        raise StoreError(f"reading {self.address.under(name)}: its checksum is wrong")

    def remove(self, name: str, *, generation: int | None = None) -> None:
        """Remove an object; a missing object is not an error."""
        try:
            with self._plainly(f"removing {self.address.under(name)}"):
                self._blob(name).delete(
                    if_generation_match=generation, timeout=self._timeout, retry=self._retry()
                )
        except MissingObjectError:
            return

    def tidy(self) -> None:
        """Do nothing, because a bucket hides incomplete uploads, and removes them after a week."""

    def _client(self) -> Any:
        # The sessions of requests are not thread-safe.
        if not hasattr(self._local, "client"):
            storage, auth = _libraries().storage, _libraries().auth_errors
            try:
                # The client requires a project, although objects belong to a bucket.
                self._local.client = storage.Client(project="unused", credentials=self._credentials)
            except auth.GoogleAuthError as error:
                raise StoreRefusedError(
                    f"{self.address}: no credentials for Google ({one_line(error).rstrip('.')}). "
                    f"{self._or_node_account(self._login.renewal())}."
                ) from None
        return self._local.client

    def _or_node_account(self, fix: str) -> str:
        """Return `fix`; for the default login, also name the node's service account."""
        return f"{fix}, or use the node's service account" if self._login.is_default else fix

    def _credentials_error(self, what: str, error: Exception) -> StoreRefusedError:
        refusal = self._or_node_account(self._login.refusal(str(error)))
        return StoreRefusedError(f"{what} ({_described(error)}): {refusal}.")

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
        """Return the client's retry policy for temporary errors: 429, 5xx, broken connections."""
        return (
            _libraries()
            .retry.with_timeout(self._retry_s)
            .with_delay(initial=min(_FIRST_PAUSE_S, self._retry_s / 8), maximum=_LONGEST_PAUSE_S)
        )

    @contextmanager
    def _plainly(self, what: str) -> Iterator[None]:
        """Convert the errors of Google's client to one-line errors of Tileforge."""
        libraries = _libraries()
        try:
            yield
        except libraries.errors.PreconditionFailed:
            raise ConflictError(f"{what}: another process has written this object") from None
        except libraries.errors.NotFound as error:
            # If listing or writing fails with NotFound, the bucket is missing.
            is_bucket = what.startswith(("listing", "writing"))
            if is_bucket or "bucket does not exist" in str(error):
                raise StoreRefusedError(
                    f"{what}: bucket {self.address.bucket!r} does not exist. Create a bucket with "
                    "the cluster: pulumi config set bucket create; or set storage.results to "
                    "another bucket."
                ) from None
            raise MissingObjectError(f"{what}: the object does not exist") from None
        except libraries.errors.Unauthorized as error:
            raise self._credentials_error(what, error) from None
        except libraries.errors.Forbidden as error:
            raise StoreRefusedError(
                f"{what}: permission denied ({_described(error).rstrip('.')}). Grant the account "
                f"the role roles/storage.objectUser on the bucket {self.address.bucket}."
            ) from None
        except libraries.auth_errors.DefaultCredentialsError:
            raise StoreRefusedError(
                f"{what}: no credentials for Google. "
                f"{self._or_node_account(self._login.renewal())}."
            ) from None
        except libraries.auth_errors.RefreshError as error:
            # The metadata server of a node can fail temporarily, but the library does not report
            # that.
            is_refused = _REFUSED in str(error) or not self._login.is_default
            if error.retryable or not is_refused:
                raise StoreError(f"{what}: {_described(error)}") from None
            raise self._credentials_error(what, error) from None
        except StoreError:
            raise
        except libraries.all as error:
            raise StoreError(f"{what}: {_described(error)}") from None


def _read_again(read: Callable[[], _T]) -> _T:
    """Return the result of `read`; read again if the network has damaged the response."""
    for _ in range(_FETCHES - 1):
        with suppress(ValueError):
            return read()
    return read()


def _crc32c(content: BinaryIO) -> str:
    """Return the checksum of a whole file in the store's notation."""
    content.seek(0)
    checksum = _libraries().crc32c.Checksum()
    while part := content.read(_PART_BYTES):
        checksum.update(part)
    return base64.b64encode(checksum.digest()).decode()


def _described(error: Exception) -> str:
    """Return an error as one short line, without the request and response in the client's text."""
    cause: BaseException = getattr(error, "cause", None) or error.__cause__ or error
    # The query of an upload's URL allows anyone to write.
    return one_line(_QUERY.sub("?...", f"{type(cause).__name__}: {cause}"))


class _Libraries:
    """The modules and error classes of Google's client, which are imported at the first use."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # Keep warnings about old Python versions out of the run's log.
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
        """All errors of the client, including errors for responses of an unexpected form."""


_loaded: list[_Libraries] = []


def _libraries() -> _Libraries:
    """Import the client at its first use. Raises StoreRefusedError if it is not installed."""
    if not _loaded:
        try:
            _loaded.append(_Libraries())
        except ImportError as error:
            raise StoreRefusedError(
                f"a gs:// address needs Google's client, which is not installed ({error}). "
                "Install it: pip install google-cloud-storage, or bootstrap/install-payload.sh "
                "--extras storage."
            ) from None
    return _loaded[0]
