"""The operator's key pair, made where it is missing, so that `pulumi up` alone builds a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from payload.core.errors import ConfigError


def would_make_key(public_file: Path) -> str:
    """Return a public key for a preview, which writes nothing; its private half is dropped."""
    return _public(Ed25519PrivateKey.generate(), public_file)


def make_key(public_file: Path) -> str:
    """Make the key pair (or the public half, where there is the private one); return the public.

    The private half is 0600 in a folder of 0700. Raises ConfigError.
    """
    private_file = public_file.with_suffix("")
    try:
        public_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private_file.exists():
            key = serialization.load_ssh_private_key(private_file.read_bytes(), password=None)
        else:
            key = Ed25519PrivateKey.generate()
            _write_private(private_file, key)
        public = _public(key, public_file)
        public_file.write_text(f"{public}\n", encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the operator's key {private_file} cannot be made or read ({error}). Move it away for "
            "a new one, or name another: pulumi config set operatorPublicKeyFile FILE"
        ) from None
    return public


def _write_private(path: Path, key: Ed25519PrivateKey) -> None:
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)


def _public(key: serialization.SSHPrivateKeyTypes, public_file: Path) -> str:
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return f"{public.decode('ascii')} tileforge-operator:{public_file.parent.name}"
