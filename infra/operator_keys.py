"""Reads the operator's public keys for a stack, or creates a key if the file is missing."""

from __future__ import annotations

from pathlib import Path

import pulumi

from infra.cloud_init import key_problem
from infra.config import ClusterConfig
from payload.core.regular_files import read_bytes
from payload.stack.operator_key_file import make_key, preview_key

_MOST_KEY_BYTES = 2**18
"""Size limit of the public key file; user-data has the same limit."""

Problems = list[tuple[str, str]]
"""Pairs of a setting's key and the text that follows the key in the error message."""


def make_missing_key(public_file: Path) -> str:
    """Create a missing key pair and return its public key; a preview only reports it as missing."""
    private_file = public_file.with_suffix("")
    if pulumi.runtime.is_dry_run():
        pulumi.info(f"would create the cluster's SSH key: {private_file}")
        return preview_key(public_file)
    public = make_key(public_file)
    pulumi.info(f"created the cluster's SSH key: {private_file}")
    return public


def operator_keys(config: ClusterConfig, *, root: Path) -> tuple[tuple[str, ...], Problems]:
    """Return the lines of the public key file, and the problems found in it."""
    name = "operatorPublicKeyFile"
    path = config.public_key_file()
    private = path.with_suffix("")
    make = f"mkdir -p -m 700 {private.parent} && ssh-keygen -q -t ed25519 -N '' -f {private}"
    try:
        text = read_bytes(root / path, limit_bytes=_MOST_KEY_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        return (), [(name, f": {path}: {reason}. Create a key pair: {make}")]
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        return (), [(name, f": {path} is empty. Create a key pair: {make}")]
    bad = [problem for key in keys if (problem := key_problem(key))]
    return keys, [(name, f": {path}: {problem}") for problem in bad[:1]]
