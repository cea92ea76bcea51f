"""Create and read the operator's key of a cluster, `.cluster/NAME/id_ed25519`.

cryptography is imported within functions, as it is slow to import and not always installed.
"""

from __future__ import annotations

import base64
import os
import secrets
import stat
import struct
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.stack.cluster_files import cluster_path


def operator_key_path(root: Path, *, cluster: str) -> Path:
    """Return the path of the operator's key of `cluster` in the project folder `root`.

    Raises ConfigError if a part of the path is a symlink.
    """
    return cluster_path(root, cluster, "id_ed25519")


def make_operator_key(path: Path) -> str:
    """Return the public half of the key at `path`; create the key if it is missing.

    The key has mode 0600 in a folder of mode 0700, and can have a passphrase. Raises ConfigError if
    the key is not private to this user, or is not an OpenSSH private key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    if not path.exists():
        _write_new_key(path)
    require_private(path)
    try:
        public = _public_half(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm, struct.error) as error:
        raise ConfigError(
            f"{path} cannot be read as an OpenSSH private key ({error}). Restore the key, or move "
            "the file away; a new key is then created."
        ) from None
    return _line(public, path)


def write_public_half(path: Path) -> str:
    """Write the public half of the key at `path` to a .pub file, and return it as a line.

    Creates the key if it is missing. Raises ConfigError in the same cases as `make_operator_key`,
    and OSError.
    """
    public = make_operator_key(path)
    write_whole(path.with_name(f"{path.name}.pub"), f"{public}\n")
    return public


def make_key(public_file: Path) -> str:
    """Write the public half to `public_file` and return it as a line, for the cluster program.

    Creates the key in the same folder if it is missing. Raises ConfigError.
    """
    private_file = public_file.with_suffix("")
    try:
        return write_public_half(private_file)
    except OSError as error:
        raise ConfigError(
            f"the operator's key {private_file} cannot be created or read ({error}). Move the file "
            "away; a new key is then created. Or use another key: pulumi config set "
            "operatorPublicKeyFile FILE"
        ) from None


def preview_key(public_file: Path) -> str:
    """Return a new public key for a preview, which writes no files."""
    return _line(_public_half(_new_key()), public_file)


def _public_half(private: bytes) -> bytes:
    """Return the public half of an OpenSSH private key, without its passphrase.

    Raises ValueError, struct.error and UnsupportedAlgorithm.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_ssh_private_key(private, password=None).public_key()
    except TypeError:  # the key has a passphrase; its public half is not encrypted
        key = serialization.load_ssh_public_key(_clear_half(private))
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _clear_half(private: bytes) -> bytes:
    """Return the public key in front of the encrypted part of an OpenSSH private key.

    Source: https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.key.
    """
    content = base64.b64decode(b"".join(private.split(b"-----")[2].split()))
    at = len(b"openssh-key-v1\0")

    def string() -> bytes:
        nonlocal at
        (size,) = struct.unpack_from(">I", content, at)
        at += 4 + size
        return content[at - size : at]

    for _ in ("cipher", "kdf", "kdf's options"):
        string()
    at += 4  # the number of keys, always 1
    blob = string()
    kind = blob[4 : 4 + struct.unpack_from(">I", blob)[0]]
    return kind + b" " + base64.b64encode(blob)


def require_private(path: Path) -> None:
    """Raise ConfigError if a cluster's key belongs to another user or is readable by others.

    The key may have been copied together with the folder. Other users could then own a copy of the
    key.
    """
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"the key {path} is not a regular file that you own. Move the file away; a new key is "
            "then created."
        )
    if mode & 0o077:
        raise ConfigError(
            f"the key {path} is readable by others (mode {mode:o}). If the key is still secret: "
            f"chmod 600 {path}. Otherwise move the file away; a new key is then created."
        )


def _line(public: bytes, path: Path) -> str:
    return f"{public.decode('ascii')} tileforge-operator:{path.parent.name}"


def _new_key() -> bytes:
    """Return a new private key in OpenSSH's format, without a passphrase."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


def _write_new_key(path: Path) -> None:
    text = _new_key()
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link does not replace a key that another process has created.
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
