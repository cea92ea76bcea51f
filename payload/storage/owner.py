"""The owner of a run in the store: the machine that started or last resumed the run."""

from __future__ import annotations

import io
import json
import re
import secrets
import time
from dataclasses import asdict, dataclass

from payload.core.errors import ConfigError
from payload.core.printable_text import shown_name
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.formats.checkpoint_listing import CHECKPOINTS_NAME, FOLDER_NAME, TRAINER_FILE
from payload.run_record.run_files import NAMES
from payload.run_record.run_identity import (
    IDENTITY_FILE,
    PATTERN,
    WANTED,
    RunIdentity,
    parse_checkpoint_identity,
    parse_identity,
    require_same_run,
)
from payload.storage.objects import (
    ABSENT,
    ConflictError,
    MissingObjectError,
    ObjectStore,
    StoreReader,
    TooLargeError,
)

OWNER = "owner.json"
_TRIES = 3
_TRAINER = re.compile(rf"{CHECKPOINTS_NAME}/{FOLDER_NAME.pattern}/{re.escape(TRAINER_FILE)}")


class LostOwnershipError(ConfigError):
    """Another machine has resumed the run and now writes its results."""


class OtherRunError(LostOwnershipError):
    """The store has another run with the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Contents of owner.json, which each resume replaces."""

    token: str = checked(max_chars=64)
    host: str = checked(max_chars=255)
    since_unix: float = checked(low=0)
    identity: str | None = checked(None, pattern=PATTERN, wanted=WANTED)
    """The run's identity, as in its identity.json; None in files of older releases."""
    schema_version: int = 1


def new_token() -> str:
    """Return a new token for `claim`.

    Record the token before the claim, because the response to the claim can be lost.
    """
    return secrets.token_hex(16)


def claim(
    store: ObjectStore, *, token: str, is_new: bool, host: str, run: RunIdentity, place: str
) -> None:
    """Become the run's owner; another claim with the same token has no effect.

    `place` names the run's folder. Raises ConfigError if the id of a new run is already in the
    store, OtherRunError if the store has another run, and StoreError.
    """
    owner = Owner(token=token, host=host, since_unix=time.time(), identity=run.identity)
    content = (json.dumps(asdict(owner), indent=2) + "\n").encode()
    for _ in range(_TRIES):
        before, generation = _read(store)
        if before is not None and before.token == owner.token:
            return
        if is_new and generation != ABSENT:
            raise ConfigError(
                f"{store.address}: the store already has a run with this id. Continue it with "
                f"--resume {store.address}, or choose another --run-id."
            )
        _require_own(store, run, place=place)
        try:
            store.put(OWNER, io.BytesIO(content), size=len(content), generation=generation)
            return
        except ConflictError:
            continue
    raise ConflictError(f"{store.address.under(OWNER)}: other processes keep writing this object")


def require_owner(store: ObjectStore, token: str) -> None:
    """Raise LostOwnershipError if another machine has resumed the run since `claim`."""
    owner, _ = _read(store)
    if owner is not None and owner.token != token:
        raise LostOwnershipError(
            f"{store.address}: {shown_name(owner.host)} has resumed the run, so this machine "
            "has stopped its uploads. Stop the run on one of the two machines."
        )


def stored_identity(store: StoreReader) -> RunIdentity | None:
    """Return the identity of the store's run, or None if the store has no run.

    If owner.json has no identity, as after a resume by an older release, the identity is read from
    the run's own record or the newest checkpoint.
    """
    names = {entry.name for entry in store.entries()}
    checkpoints = [name for name in names if _TRAINER.fullmatch(name)]
    if not names & {OWNER, IDENTITY_FILE, NAMES.config.name} and not checkpoints:
        return None
    owner, _ = _read(store)
    token = owner.token if owner is not None else ""
    identity = owner.identity if owner is not None else None
    record = None
    if IDENTITY_FILE in names:
        record = parse_identity(_content(store, IDENTITY_FILE), where=IDENTITY_FILE)
    record = record or RunIdentity()
    identity = identity or record.identity
    newest_first = sorted(checkpoints, key=lambda name: (len(name), name), reverse=True)
    for name in newest_first if identity is None else ():
        identity = identity or parse_checkpoint_identity(_content(store, name), where=name)
    is_older = record.is_older and record.identity == identity
    return RunIdentity(identity=identity, store_token=token, is_older=is_older)


_FIX = (
    "Fetch the stored run into another folder with --runs-dir DIR, or continue this run without "
    "a store: --set storage.results=none"
)


def require_own_store(store: StoreReader, run: RunIdentity, *, place: str, fix: str = _FIX) -> None:
    """Raise ConfigError if the store has a different run than the folder `place`."""
    stored = stored_identity(store)
    if stored is not None:
        require_same_run(
            run,
            stored,
            place=place,
            other=str(store.address),
            fix=fix,
        )


def _require_own(store: ObjectStore, run: RunIdentity, *, place: str) -> None:
    try:
        require_own_store(store, run, place=place)
    except ConfigError as error:
        raise OtherRunError(str(error)) from None


def _content(store: StoreReader, name: str) -> bytes:
    try:
        return store.read(name)[0]
    except (MissingObjectError, TooLargeError):
        return b""


def _read(store: StoreReader) -> tuple[Owner | None, int]:
    """Return the owner and the object's generation; None replaces a missing or damaged owner."""
    try:
        content, generation = store.read(OWNER)
    except MissingObjectError:
        return None, ABSENT
    except TooLargeError:
        listed = (each.generation for each in store.entries(OWNER) if each.name == OWNER)
        return None, next(listed, ABSENT)
    try:
        where = str(store.address.under(OWNER))
        return build(Owner, parse_json(content, where=where), where=where), generation
    except ConfigError:
        return None, generation
