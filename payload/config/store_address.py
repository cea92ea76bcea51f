"""CONTRACT: the address of a store for runs: a bucket, or a mounted folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from payload.config.settings import AUTO
from payload.core.errors import ConfigError
from payload.core.printable_text import shown

SCHEME = "gs://"
NONE = "none"
RUNS_PREFIX = "runs"
"""Prefix of the runs in a cluster's bucket."""

# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}")
_MOST_CHARS = 700
"""Limit on the length of a prefix. An object's name has at most 1,024 bytes; the rest is for the
names of the run's files."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A prefix in a bucket, or a folder."""

    bucket: str | None
    """Name of the bucket; None if the store is a folder."""
    path: str
    """The prefix without leading and trailing slashes, or the folder's absolute path."""
    num_below: int = field(default=0, compare=False)
    """Number of components at the end of `path` that are below the configured folder. Other users
    with write access to that folder could replace them with symlinks, so these components are
    opened without following links.
    """

    def under(self, name: str) -> StoreAddress:
        """Return the address of `name` below this address."""
        path = str(PurePosixPath(self.path, name)) if self.path else name
        return replace(self, path=path, num_below=self.num_below + len(PurePosixPath(name).parts))

    def last(self) -> str:
        """Return the last part of the path; in a run's address, the run id."""
        return PurePosixPath(self.path).name

    def parent(self) -> StoreAddress:
        """Return the address of the parent."""
        above = str(PurePosixPath(self.path).parent)
        path = "" if above == "." else above
        return replace(self, path=path, num_below=max(0, self.num_below - 1))

    def __str__(self) -> str:
        """Return the text that `parse_store_address` reads."""
        return (
            self.path if self.bucket is None else f"{SCHEME}{self.bucket}/{self.path}".rstrip("/")
        )


def is_bucket_address(text: str) -> bool:
    """Return True if a setting is the address of a bucket, not a folder."""
    return text.startswith(SCHEME)


def parse_store_address(text: str, *, setting: str = "storage.results") -> StoreAddress:
    """Parse `gs://BUCKET/PREFIX` or an absolute path. Raises ConfigError that names `setting`."""
    where = f"{setting} = {shown(text)}"
    if "://" in text and not is_bucket_address(text):
        raise ConfigError(
            f"{where}: only {SCHEME} is supported. Write gs://BUCKET/PREFIX or a path."
        )
    if not is_bucket_address(text):
        if not Path(text).is_absolute():
            raise ConfigError(f"{where}: write an absolute path, or gs://BUCKET/PREFIX.")
        return StoreAddress(None, str(Path(text)))
    bucket, _, prefix = text.removeprefix(SCHEME).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{where}: {shown(bucket)} is not a bucket name (lower-case letters, digits, dots, "
            "dashes, underscores). Write gs://BUCKET/PREFIX."
        )
    prefix = prefix.strip("/")
    odd = [part for part in prefix.split("/") if prefix and not _PART.fullmatch(part)]
    if odd or len(prefix) > _MOST_CHARS:
        problem = f"{shown(odd[0])} is not valid in a prefix" if odd else "the prefix is too long"
        raise ConfigError(
            f"{where}: {problem}. Use letters, digits and . _ = + @ - between single slashes."
        )
    return StoreAddress(bucket, prefix)


def resolve_results_address(results: str, *, bucket: str | None) -> str:
    """Return `results`; `auto` resolves to runs in `bucket`, or to no store without a bucket."""
    if results != AUTO:
        return results
    return NONE if bucket is None else str(StoreAddress(bucket, RUNS_PREFIX))
