"""CONTRACT: records the SHA-256 hashes of checkpoint manifests, as the head wrote them.

Every node of a cluster with a bucket can write to the run's store, so a manifest in the store does
not prove who wrote it. The head keeps these hashes on its local disk. Other machines receive these
hashes only over SSH. The hashes are never uploaded to a store, or read from a store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import MAX_SECONDS, checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import SHA256
from payload.core.validation.records import build, check_schema
from payload.formats.checkpoint_listing import FOLDER_NAME, checkpoint_step
from payload.run_record.run_files import NAMES, RunPaths

SCHEMA_VERSION = 1
HASHES_FILE = NAMES.manifest_hashes.name
MOST_HASHES = 500
"""Limit on the hashes in a record. A full record has 90 kB, and every command that shows the run
reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHash:
    """The hash of one checkpoint's manifest."""

    checkpoint: str = checked(pattern=FOLDER_NAME, wanted="a checkpoint's name")
    sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    time_unix: float = checked(low=0, high=MAX_SECONDS)
    """Start of the upload by the head's clock. If the step was trained again, this is the later
    upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHashes:
    """manifest_hashes.json: hashes from all attempts, also of removed checkpoints."""

    hashes: tuple[ManifestHash, ...] = checked((), max_items=MOST_HASHES)
    """One hash per checkpoint, the oldest step first."""
    schema_version: int = SCHEMA_VERSION

    def by_name(self) -> dict[str, str]:
        """Return the hashes by checkpoint name."""
        return {each.checkpoint: each.sha256 for each in self.hashes}

    def is_gap(self, checkpoint: str) -> bool:
        """Return True if earlier and later checkpoints have a hash, and this checkpoint lacks a
        hash.

        The head has a hash of each checkpoint that it uploads, so the head has not uploaded this
        checkpoint.
        """
        steps = [checkpoint_step(PurePosixPath(each.checkpoint)) for each in self.hashes]
        step = checkpoint_step(PurePosixPath(checkpoint))
        return bool(steps) and min(steps) < step < max(steps) and step not in steps

    def merged(self, others: Iterable[ManifestHash]) -> ManifestHashes:
        """Return the union: for each of the last MOST_HASHES checkpoints, the latest hash."""
        latest: dict[str, ManifestHash] = {}
        for each in sorted((*self.hashes, *others), key=lambda each: each.time_unix):
            latest[each.checkpoint] = each
        ordered = sorted(latest.values(), key=lambda each: (len(each.checkpoint), each.checkpoint))
        return ManifestHashes(hashes=tuple(ordered[-MOST_HASHES:]))

    def to_json(self) -> str:
        """Return the text of manifest_hashes.json."""
        return json.dumps(asdict(self), indent=2) + "\n"


def parse_hashes(content: str | bytes, *, where: str) -> ManifestHashes:
    """Parse the text of manifest_hashes.json. Raises ConfigError."""
    raw = parse_json(content, where=where)
    check_schema(raw, SCHEMA_VERSION, where=where)
    return build(ManifestHashes, raw, where=where)


def known_hashes(paths: RunPaths) -> ManifestHashes:
    """Return the hashes in the local run folder; empty if the file is absent or damaged."""
    with suppress(OSError, ConfigError):
        path = paths.manifest_hashes
        return parse_hashes(read_bytes(path), where=str(path))
    return ManifestHashes()


def note_hash(paths: RunPaths, checkpoint: str, sha256: str) -> None:
    """Record the hash of a checkpoint that this machine, the head, uploads. Raises OSError.

    An unchanged hash keeps its time.
    """
    known = known_hashes(paths)
    if known.by_name().get(checkpoint) == sha256:
        return
    # If the clock was set back, the new hash still replaces the old one.
    latest = max((each.time_unix for each in known.hashes), default=0.0)
    fresh = ManifestHash(checkpoint=checkpoint, sha256=sha256, time_unix=max(time.time(), latest))
    write_whole(paths.manifest_hashes, known.merged([fresh]).to_json())


def verdict(checkpoint: str, known: ManifestHashes) -> str:
    """Return a message about whether a checkpoint from a store could be verified with a hash."""
    if checkpoint in known.by_name():
        return "its manifest matches the hash that the head wrote"
    message = "not verified: this machine has no hash of its manifest from the head"
    if known.hashes:
        message += f"; its last hash from the head is of {known.hashes[-1].checkpoint}"
    return message
