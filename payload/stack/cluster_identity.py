"""CONTRACT: a cluster's identity, which distinguishes clusters with the same name.

The identity is 16 random hexadecimal digits. It is in `.cluster/NAME/identity.json` of the folder
that builds the cluster, and in a label (or the description) of all its resources. Two users can use
the same name in one project: resources with a different identity are never removed or adopted. A
cloned folder can contain the file, so the file counts only with a signature by this user's key.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.record_signing_key import PROOF, PROOF_WANTED, is_signed, sign
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.stack.cluster_files import cluster_path

IDENTITY_LABEL = "tileforge-identity"
PATTERN = re.compile(r"[0-9a-f]{16}")
WANTED = "16 hexadecimal digits"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterIdentity:
    """Contents of identity.json."""

    identity: str = checked(pattern=PATTERN, wanted=WANTED)
    stack: str | None = checked(None, max_chars=200)
    """The cluster's Pulumi stack, without organization and project."""
    proof: str = checked("", pattern=PROOF, wanted=PROOF_WANTED)
    """Signature of folder, cluster name and identity by this user's key."""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self), indent=2) + "\n"


def new_cluster_identity() -> str:
    """Return 64 random bits in hexadecimal."""
    return secrets.token_hex(8)


def known_cluster_identity(folder: Path, cluster: str) -> str | None:
    """Return the identity of the cluster in `folder`, or None without this user's signature.

    Raises ConfigError if the file is damaged.
    """
    identity, is_proven = recorded_cluster_identity(folder, cluster)
    return identity if is_proven else None


def recorded_cluster_identity(folder: Path, cluster: str) -> tuple[str | None, bool]:
    """Return the identity in the folder's identity.json, and True if this user has signed the file.

    Without a file, there is no identity. Raises ConfigError if the file is damaged.
    """
    found = _read(_path(folder, cluster))
    if found is None:
        return None, False
    return found.identity, is_signed(found.proof, *_parts(folder, cluster, found.identity))


def accept_cluster_identity(folder: Path, cluster: str) -> None:
    """Sign the identity in the folder's identity.json, after the user has confirmed the
    ownership."""
    path = _path(folder, cluster)
    found = _read(path)
    if found is not None:
        _write(path, _signed(found, folder, cluster))


def resolve_cluster_identity(
    folder: Path,
    cluster: str,
    *,
    stack: str | None = None,
    told: Sequence[str] = (),
    writes: bool = True,
) -> str:
    """Return the identity of the cluster that is built from `folder`; create it if it is missing.

    `told` has the identities in the stack's state. These identities take precedence over
    identity.json. `stack` is the current stack. If only the file has the identity, it is returned
    without a new signature. Without `writes`, as in a preview, no file is written. Raises
    ConfigError if another stack of this folder builds a cluster with this name.
    """
    path = _path(folder, cluster)
    found = _read(path)
    if found is not None and None not in (stack, found.stack) and stack != found.stack:
        raise ConfigError(
            f"cluster = {cluster!r}: stack {found.stack} builds a cluster with this name from this "
            "folder. Choose another name: pulumi config set cluster NAME; or, once that cluster is "
            f"destroyed, remove {path}"
        )
    if told and (found is None or found.identity not in told):
        found = ClusterIdentity(identity=told[0], stack=stack)
        if writes:
            _write(path, _signed(found, folder, cluster))
    elif found is None:
        fresh = ClusterIdentity(identity=new_cluster_identity(), stack=stack)
        # If two commands start at the same time, the identity of the first one is kept.
        is_ours = not writes or _write_if_absent(path, _signed(fresh, folder, cluster))
        found = fresh if is_ours else _read(path) or fresh
    elif writes and stack is not None and found.stack is None:
        found = replace(found, stack=stack)
        _write(path, found)
    return found.identity


def identity_in(labels: Mapping[str, str]) -> str | None:
    """Return the identity in labels, or None if it is missing or invalid."""
    text = labels.get(IDENTITY_LABEL, "")
    return text if PATTERN.fullmatch(text) else None


def _path(folder: Path, cluster: str) -> Path:
    return cluster_path(folder, cluster, "identity.json")


def _parts(folder: Path, cluster: str, identity: str) -> tuple[str, ...]:
    """Return the signed parts. They include the folder, so that a copied file is not valid."""
    return "cluster", os.path.realpath(folder), cluster, identity


def _signed(found: ClusterIdentity, folder: Path, cluster: str) -> ClusterIdentity:
    return replace(found, proof=sign(*_parts(folder, cluster, found.identity)))


def _read(path: Path) -> ClusterIdentity | None:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from None
    fix = "This file identifies the cluster of this folder. Restore the file from a copy."
    raw = parse_json(content, where=str(path), fix=fix)
    check_schema(raw, SCHEMA_VERSION, where=str(path), fix=fix)
    return build(ClusterIdentity, raw, where=str(path), fix=fix)


def _write(path: Path, identity: ClusterIdentity) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, identity.to_json())


def _write_if_absent(path: Path, identity: ClusterIdentity) -> bool:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    write_whole(staged, identity.to_json())
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            staged.unlink()
    return True
