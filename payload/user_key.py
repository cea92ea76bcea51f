"""CONTRACT: proofs that this user has written a record here, by a key outside of all projects.

A project's folder and its records may come from anywhere: a node, a store, a clone. The key lies in
this user's own state folder, so whoever made the folder cannot make a proof.
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

from payload.untrusted import read_bytes

PROOF = re.compile(r"|[0-9a-f]{64}")
PROOF_WANTED = "64 hexadecimal digits"
_KEY_FILE = "named.key"
_KEY_BYTES = 32


def prove(record: object) -> str:
    """Return the HMAC-SHA256 of what JSON can say, by this user's key, as hexadecimal digits.

    The key is made where there is none; "" where none can be, as in a home without write access.
    """
    key = _key(make=True)
    return "" if key is None else _hmac(record, key)


def is_proven(record: object, proof: str) -> bool:
    """Tell whether `proof` was made of this record, by this user here."""
    key = _key()
    return key is not None and hmac.compare_digest(proof, _hmac(record, key))


def _hmac(record: object, key: bytes) -> str:
    text = json.dumps(record, sort_keys=True)
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
