"""The operator's public keys for a stack: read from their file, or made where there is no file."""

from __future__ import annotations

from pathlib import Path

import pulumi

from infra.cloud_init import key_problem
from infra.config import ClusterConfig
from payload.core.regular_files import read_bytes
from payload.stack.operator_key import make_key, would_make_key

_MOST_KEY_BYTES = 2**18
"""Limit of the public key file: the most that user-data may have."""

Problems = list[tuple[str, str]]
"""A setting's key, and what follows it in the message."""


def make_missing_key(public_file: Path) -> str:
    """Return the key that takes the place of a missing one; a preview only says so."""
    private_file = public_file.with_suffix("")
    if pulumi.runtime.is_dry_run():
        pulumi.info(f"would make the key that opens the cluster: {private_file}")
        return would_make_key(public_file)
    public = make_key(public_file)
    pulumi.info(f"made the key that opens the cluster: {private_file}")
    return public


def operator_keys(config: ClusterConfig, *, root: Path) -> tuple[tuple[str, ...], Problems]:
    """Return the lines of the public key file, and what is wrong with it."""
    name = "operatorPublicKeyFile"
    path = config.public_key_file()
    private = path.with_suffix("")
    make = f"mkdir -p -m 700 {private.parent} && ssh-keygen -q -t ed25519 -N '' -f {private}"
    try:
        text = read_bytes(root / path, limit_bytes=_MOST_KEY_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        return (), [(name, f": {path}: {reason}. Make a key pair: {make}")]
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        return (), [(name, f": {path} is empty. Make a key pair: {make}")]
    bad = [problem for key in keys if (problem := key_problem(key))]
    return keys, [(name, f": {path}: {problem}") for problem in bad[:1]]
