"""What a connection is made with, and what a command over it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who we are to the nodes."""

    user: str
    key: Path
    """File of the private key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each stage of a connection may take."""

    connect_s: float = 10.0
    handshake_s: float = 10.0
    auth_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that ran to its end."""

    status: int
    stdout: bytes
    stderr: bytes


def os_login_command(key: Path) -> str:
    """For messages: what lets a private key's owner in where Google's OS Login decides."""
    return f"gcloud compute os-login ssh-keys add --key-file={key}.pub"
