"""The owner of a run in the store: the place that started it, or resumed it last."""

from __future__ import annotations

import io
import json
import secrets
import time
from dataclasses import asdict, dataclass

from payload.errors import ConfigError
from payload.storage.objects import ABSENT, ConflictError, MissingObjectError, ObjectStore
from payload.untrusted import build, checked, parse_json

OWNER = "owner.json"
_TRIES = 3


class LostOwnershipError(ConfigError):
    """Another place has resumed the run, and writes its results now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """owner.json: replaced whenever the run is resumed."""

    token: str = checked(max_chars=64)
    host: str = checked(max_chars=255)
    since_unix: float = checked(low=0)
    schema_version: int = 1


def new_token() -> str:
    """Return a token for `claim`. Whoever claims keeps it first: an answer may get lost."""
    return secrets.token_hex(16)


def claim(store: ObjectStore, *, token: str, is_new: bool, host: str) -> None:
    """Become the run's owner; to claim again with the same token changes nothing.

    Raises ConfigError for a new run whose id the store has already, and StoreError.
    """
    owner = Owner(token=token, host=host, since_unix=time.time())
    content = (json.dumps(asdict(owner), indent=2) + "\n").encode()
    for _ in range(_TRIES):
        before, generation = _read(store)
        if before is not None and before.token == owner.token:
            return
        if is_new and generation != ABSENT:
            raise ConfigError(
                f"{store.address}: the store has a run of this id already. Continue it with "
                f"--resume {store.address}, or choose another --run-id."
            )
        try:
            store.put(OWNER, io.BytesIO(content), size=len(content), generation=generation)
            return
        except ConflictError:
            continue
    raise ConflictError(f"{store.address.under(OWNER)}: others write it again and again")


def require_owner(store: ObjectStore, token: str) -> None:
    """Raise LostOwnershipError when another place has resumed the run since `claim`."""
    owner, _ = _read(store)
    if owner is not None and owner.token != token:
        raise LostOwnershipError(
            f"{store.address}: {owner.host} has resumed the run, so nothing more is uploaded from "
            "here. Stop this run, or that one."
        )


def _read(store: ObjectStore) -> tuple[Owner | None, int]:
    """Return the owner, None where it is damaged, and the object's generation."""
    try:
        content, generation = store.read(OWNER)
    except MissingObjectError:
        return None, ABSENT
    try:
        where = str(store.address.under(OWNER))
        return build(Owner, parse_json(content, where=where), where=where), generation
    except ConfigError:
        return None, generation
