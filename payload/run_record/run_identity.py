"""CONTRACT: a run's identity, by which it is told from another run of the same name.

It is in the run's folder (`identity.json`), in its store's owner.json and in each checkpoint's
trainer.json. Two records of one name and of two identities are never merged.
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
    """identity.json: made with the run's folder, and kept for good."""

    identity: str | None = checked(None, pattern=PATTERN, wanted=WANTED)
    """128 random bits. None for a run of an older version that was not resumed since."""
    store_token: str | None = checked(None, max_chars=64)
    """The token of the owner of the run's store, where that is of an older version: until the
    store has the identity, this is what shows that it is this run's. Empty where the run came from
    a store whose owner.json could not be read."""
    is_older: bool = False
    """True for a run of an older version, whose first checkpoints have no identity."""
    schema_version: int = SCHEMA_VERSION

    def words(self) -> str:
        """Return the identity for a message."""
        return self.identity or "none"

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerIdentity:
    """The part of trainer.json that says of which run a checkpoint is."""

    identity: str | None = checked(None, pattern=PATTERN, wanted=WANTED)


def new_identity() -> str:
    """Return 128 random bits."""
    return secrets.token_hex(16)


def parse_identity(content: str | bytes, *, where: str) -> RunIdentity | None:
    """Read the text of an identity.json; None where it is damaged."""
    try:
        raw = parse_json(content, where=where)
        check_schema(raw, SCHEMA_VERSION, where=where)
        return build(RunIdentity, raw, where=where)
    except ConfigError:
        return None


def known_identity(paths: RunPaths) -> RunIdentity:
    """Return what the run's folder tells of its identity; where the file is gone, a checkpoint."""
    found = None
    with suppress(OSError):
        found = parse_identity(read_bytes(paths.identity), where=str(paths.identity))
    found = found or RunIdentity()
    if found.identity is None:
        folders = reversed(checkpoint_folders(paths.checkpoints))
        told = next(filter(None, map(checkpoint_identity, folders)), None)
        token = _token(paths) if found.store_token is None else found.store_token
        found = replace(found, identity=told, store_token=token)
    return found


def checkpoint_identity(folder: Path) -> str | None:
    """Return the identity of the run that wrote a checkpoint, or None where it does not say."""
    path = folder / TRAINER_FILE
    try:
        return parse_checkpoint_identity(read_bytes(path), where=str(path))
    except OSError:
        return None


def parse_checkpoint_identity(content: bytes, *, where: str) -> str | None:
    """Return the identity in the text of a trainer.json, or None where it does not say."""
    try:
        return build(_TrainerIdentity, parse_json(content, where=where), where=where).identity
    except ConfigError:
        return None


def settle_identity(
    paths: RunPaths,
    *,
    is_new: bool,
    say: Callable[[str], None],
    fresh: str | None = None,
) -> RunIdentity:
    """Return the run's identity, after giving it one where it has none: `fresh`, or a new one.

    `say` gets a warning for a run of an older version. Raises OSError.
    """
    known = known_identity(paths)
    with suppress(OSError):
        there = parse_identity(read_bytes(paths.identity), where=str(paths.identity))
        if there is not None and there.identity is not None:
            return known
    settled = known
    if known.identity is None:
        settled = replace(known, identity=fresh or new_identity(), is_older=not is_new)
    written = _write(paths, settled)
    if written == settled and known.identity is None and not is_new:
        say(
            f"warning: run {paths.run_id} is of an older version, without an identity. It gets "
            f"{settled.identity} now; no other run's store or checkpoint is taken for its own"
        )
    return written


def require_same_run(
    here: RunIdentity, there: RunIdentity, *, place: str, other: str, fix: str
) -> None:
    """Raise ConfigError unless what `place` and `other` have is one run.

    `fix` says what to do. Where `other` is of an older version, and has no identity, the token of
    its owner shows it.
    """
    if here.identity is not None and here.identity == there.identity:
        return
    is_owner = here.store_token is not None and here.store_token == there.store_token
    if there.identity is None and is_owner:
        return
    why = "these are two runs of one name"
    if here.identity is None or there.identity is None:
        why = "so nothing shows that these are one run"
    raise ConfigError(
        f"{place} has run identity {here.words()}, {other} has {there.words()}: {why}. {fix}"
    )


def _write(paths: RunPaths, settled: RunIdentity) -> RunIdentity:
    """Write the file; return what it has then: another process of the run may have been first."""
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
    """Return the token by which an older version's run owns its store, or owned it."""
    stored = last_record(StoreState, paths.store_state)
    if stored is None:
        state = last_record(RunState, paths.state)
        stored = state.store if state is not None else None
    return stored.token if stored is not None else None
