"""Signs records with this user's key, to verify later that this user's commands wrote them.

The key is in the user's state folder, outside of all runs and projects. So a folder from another
user cannot contain valid signatures.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from payload.core.regular_files import read_bytes

PROOF = re.compile(r"|[0-9a-f]{64}")
PROOF_WANTED = "64 hexadecimal digits"
_KEY_FILE = "named.key"
_KEY_BYTES = 32


def sign(*parts: Any) -> str:
    """Return the signature of `parts` as JSON, in hexadecimal; empty if no key can be created.

    The first part names the kind of record, the next parts its location.
    """
    key = _key(make=True)
    return "" if key is None else _proof(key, parts)


def is_signed(proof: str, *parts: Any) -> bool:
    """Return True if `proof` is the signature of `parts` by this user's key."""
    key = _key()
    return key is not None and hmac.compare_digest(proof.encode(), _proof(key, parts).encode())


def _proof(key: bytes, parts: tuple[Any, ...]) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool = False) -> bytes | None:
    """Return this user's key, or None if it is missing. With `make`, create a missing key."""
    with suppress(OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        folder = (state if state.is_absolute() else Path.home() / ".local/state") / "tileforge"
        found = _read_key(folder / _KEY_FILE)
        if found is not None or not make:
            return found
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = folder / f".{_KEY_FILE}.{secrets.token_hex(4)}"
        try:
            opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(opened, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            try:
                # Of two commands that create a key at the same time, the first one's key is kept.
                os.link(beside, folder / _KEY_FILE)
            except OSError:  # it exists, or the file system has no links
                if _read_key(folder / _KEY_FILE) is None:
                    beside.replace(folder / _KEY_FILE)
        finally:
            beside.unlink(missing_ok=True)
        return _read_key(folder / _KEY_FILE)
    return None


def _read_key(path: Path) -> bytes | None:
    """Return the key in a file, or None if the file is missing or damaged."""
    with suppress(OSError):
        found = read_bytes(path, limit_bytes=_KEY_BYTES)
        return found if len(found) == _KEY_BYTES else None
    return None
