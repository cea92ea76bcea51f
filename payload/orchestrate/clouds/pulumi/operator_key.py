"""The operator's key of a stack, settled before its cluster is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import ConfigError
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.stack.operator_key import make_operator_key, operator_key_path, write_public_half


def settle_operator_key(
    known: dict[str, Any], cluster: str, *, there: Sequence[str], talk: Console
) -> None:
    """Make the operator's key, whose public half the cluster program reads, unless there is one.

    Raises ConfigError when machines are up: they know another key, and a new one ends them. So too
    for a public half alone, or of another key, as may come with the folder: it would log in.
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
            f"{public}: its private half is not here, so somebody else may have it. Move it away "
            f"for a new key; or, if it is yours: pulumi config set operatorPublicKeyFile {public}"
        )
    if there and not path.exists():
        raise ConfigError(
            f"{path}: the key that opens cluster {cluster} is not here, and its {len(there)} "
            "machine(s) know no other. Bring it from where the cluster was built; or remove the "
            f"cluster and build it from here: {command('orchestrate', 'down')}"
        )
    write_public_half(path)
    talk.print(f"made the key that opens the cluster: {path}")
