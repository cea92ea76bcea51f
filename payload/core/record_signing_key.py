"""This user's key, by which a record shows that this user's commands made it.

It lies outside of all runs and projects, in this user's own state folder. Whoever made a folder
cannot have signed what is in it.
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
    """Return a proof of what JSON makes of `parts`, in hexadecimal; empty where no key can be made.

    The first part says what kind of record it is, the next ones where it lies.
    """
    key = _key(make=True)
    return "" if key is None else _proof(key, parts)


def is_signed(proof: str, *parts: Any) -> bool:
    """Return True for the proof that `sign` gave for the same parts with this user's key."""
    key = _key()
    return key is not None and hmac.compare_digest(proof.encode(), _proof(key, parts).encode())


def _proof(key: bytes, parts: tuple[Any, ...]) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool = False) -> bytes | None:
    """Return this user's key, which `make` writes where there is none; None without one."""
    with suppress(OSError, RuntimeError):  # RuntimeError: nobody knows where the home is
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
                # Two commands may begin at once: the first one's stands.
                os.link(beside, folder / _KEY_FILE)
            except OSError:  # it exists, or the file system has no links
                if _read_key(folder / _KEY_FILE) is None:
                    beside.replace(folder / _KEY_FILE)
        finally:
            beside.unlink(missing_ok=True)
        return _read_key(folder / _KEY_FILE)
    return None


def _read_key(path: Path) -> bytes | None:
    """Return the key in a file; None where it is missing or damaged."""
    with suppress(OSError):
        found = read_bytes(path, limit_bytes=_KEY_BYTES)
        return found if len(found) == _KEY_BYTES else None
    return None
