"""Creates or checks the operator's SSH key before a cluster is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import ConfigError
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.stack.operator_key_file import make_operator_key, operator_key_path, write_public_half


def ensure_operator_key(
    known: dict[str, Any], cluster: str, *, there: Sequence[str], talk: Console
) -> None:
    """Create the operator's key pair if it is missing.

    The cluster program reads the public half. Raises ConfigError if the key is missing while
    machines exist: the machines accept only the old key, and a new key would replace the machines.
    Also raises ConfigError for a public key without the private key. Such a key could belong to
    another user, who could then log in.
    """
    if known.get("operatorPublicKeyFile") or known.get("accessMode") == "oslogin":
        return
    path = operator_key_path(Path.cwd(), cluster=cluster)
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        if path.exists():
            is_ours = read_bytes(public).split()[:2] == make_operator_key(path).encode().split()[:2]
        else:
            is_ours = bool(there)
        if is_ours:
            return
        raise ConfigError(
            f"{public}: the private key to this public key is missing, so the key may belong to "
            "another user. Move the file away; a new key is then created. If the key is yours: "
            f"pulumi config set operatorPublicKeyFile {public}"
        )
    if there and not path.exists():
        raise ConfigError(
            f"{path}: missing, but the {len(there)} machine(s) of cluster {cluster} accept no "
            "other key. Copy this file from the machine that built the cluster; or remove the "
            f"cluster and build it again: {command('orchestrate', 'down')}"
        )
    write_public_half(path)
    talk.print(f"created the cluster's SSH key: {path}")
