"""CONTRACT: the identity of a run. It distinguishes runs with the same name.

The identity is in the run folder (`identity.json`), in owner.json of the store and in trainer.json
of each checkpoint. Records of runs with the same name but different identities are never merged.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.files import require_file, write_whole
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.formats.checkpoint_listing import TRAINER_FILE, checkpoint_folders
from payload.run_record.run_files import NAMES, RunPaths, RunState, last_record
from payload.run_record.store_state import StoreState

SCHEMA_VERSION = 1
IDENTITY_FILE = NAMES.identity.name
PATTERN = re.compile(r"[0-9a-f]{32}")
WANTED = "32 hexadecimal digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """identity.json: written with the run folder and never changed."""

    identity: str | None = checked(None, pattern=PATTERN, wanted=WANTED)
    """128 random bits. None for a run of an older version that was never resumed."""
    store_token: str | None = checked(None, max_chars=64)
    """Token in the owner.json of a store that an older version wrote. Until the store has the
    identity, this token shows that the store belongs to this run. Empty if the run was restored
    from a store with an unreadable owner.json."""
    is_older: bool = False
    """True for a run of an older version. The first checkpoints of such a run have no identity."""
    schema_version: int = SCHEMA_VERSION

    def words(self) -> str:
        """Return the identity as text for a message."""
        return self.identity or "none"

    def to_json(self) -> str:
        """Return the text of identity.json."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerIdentity:
    """The part of trainer.json with the identity of the run that wrote the checkpoint."""

    identity: str | None = checked(None, pattern=PATTERN, wanted=WANTED)


def new_identity() -> str:
    """Return 128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def parse_identity(content: str | bytes, *, where: str) -> RunIdentity | None:
    """Parse the text of an identity.json; return None if it is damaged."""
    try:
        raw = parse_json(content, where=where)
        check_schema(raw, SCHEMA_VERSION, where=where)
        return build(RunIdentity, raw, where=where)
    except ConfigError:
        return None


def known_identity(paths: RunPaths) -> RunIdentity:
    """Return the identity from identity.json, or from the newest checkpoint that has one."""
    found = None
    with suppress(OSError):
        found = parse_identity(read_bytes(paths.identity), where=str(paths.identity))
    found = found or RunIdentity()
    if found.identity is None:
        folders = reversed(checkpoint_folders(paths.checkpoints))
        saved = next(filter(None, map(checkpoint_identity, folders)), None)
        token = _token(paths) if found.store_token is None else found.store_token
        found = replace(found, identity=saved, store_token=token)
    return found


def checkpoint_identity(folder: Path) -> str | None:
    """Return the identity of the run that wrote a checkpoint; None if it is not recorded."""
    path = folder / TRAINER_FILE
    try:
        return parse_checkpoint_identity(read_bytes(path), where=str(path))
    except OSError:
        return None


def parse_checkpoint_identity(content: bytes, *, where: str) -> str | None:
    """Return the identity in the text of a trainer.json; None if it has no identity."""
    try:
        return build(_TrainerIdentity, parse_json(content, where=where), where=where).identity
    except ConfigError:
        return None


def ensure_identity(
    paths: RunPaths,
    *,
    is_new: bool,
    say: Callable[[str], None],
    fresh: str | None = None,
) -> RunIdentity:
    """Return the run's identity; if the run has no identity yet, write `fresh` or a new identity.

    `say` receives a warning for a run of an older version. Raises OSError.
    """
    known = known_identity(paths)
    with suppress(OSError):
        current = parse_identity(read_bytes(paths.identity), where=str(paths.identity))
        if current is not None and current.identity is not None:
            return known
    settled = known
    if known.identity is None:
        settled = replace(known, identity=fresh or new_identity(), is_older=not is_new)
    written = _write(paths, settled)
    if written == settled and known.identity is None and not is_new:
        say(
            f"warning: run {paths.run_id} is from an older version and had no identity. Its "
            f"identity is now {settled.identity}: stores and checkpoints of other runs are rejected"
        )
    return written


def require_same_run(
    own: RunIdentity, found: RunIdentity, *, place: str, other: str, fix: str
) -> None:
    """Raise ConfigError if the records in `place` and `other` do not belong to the same run.

    `fix` is the last sentence of the message. Records of an older version have no identity. For
    such records in `other`, the owners' tokens are compared.
    """
    if own.identity is not None and own.identity == found.identity:
        return
    is_owner = own.store_token is not None and own.store_token == found.store_token
    if found.identity is None and is_owner:
        return
    why = "these are two runs with the same name"
    if own.identity is None or found.identity is None:
        why = "nothing shows that these are the same run"
    raise ConfigError(
        f"{place} contains identity {own.words()}, but {other} contains {found.words()}: {why}. "
        f"{fix}"
    )


def _write(paths: RunPaths, settled: RunIdentity) -> RunIdentity:
    """Write the file and return the identity.

    If another process wrote the file first, keep that file.
    """
    path = paths.identity
    require_file(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.fresh")
    write_whole(beside, settled.to_json())
    try:
        os.link(beside, path)
    except OSError:  # it exists, or the file system has no links
        with suppress(OSError):
            found = parse_identity(read_bytes(path), where=str(path))
            if found is not None and found.identity is not None:
                return found
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return settled


def _token(paths: RunPaths) -> str | None:
    """Return the owner's token of a run of an older version in its store, or None."""
    stored = last_record(StoreState, paths.store_state)
    if stored is None:
        state = last_record(RunState, paths.state)
        stored = state.store if state is not None else None
    return stored.token if stored is not None else None
