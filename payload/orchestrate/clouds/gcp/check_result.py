"""One of `doctor`'s checks: its outcome and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from payload.core.errors import ExitCode, TileforgeError

Outcome = Literal["ok", "error", "warning", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    outcome: Outcome
    found: str
    """With the numbers."""
    fix: str = ""
    exit_code: ExitCode = ExitCode.OK
    """The exit code for an error."""


def auth(name: str, found: str, fix: str) -> Check:
    """Return the error of something that is not permitted or not enabled."""
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.AUTH)


def denied(name: str, error: TileforgeError, permission_fix: str) -> Check:
    """Return the error of a refusal; `permission_fix` is for one that a permission would end.

    Another one has its own fix, such as billing, or a perimeter of VPC Service Controls.
    """
    own = error.fix if error.fix and "Ask for" not in error.fix else ""
    lacks_permission = not own or "roles/" in own
    found = error.cause.removeprefix(f"{name}: ")
    return auth(name, found, permission_fix if lacks_permission else own)


def wrong(name: str, found: str, fix: str) -> Check:
    """Return the error of a setting that names what is not there, or cannot be used."""
    return Check(name=name, outcome="error", found=found, fix=f"{fix}.", exit_code=ExitCode.CONFIG)


def unknown(name: str, error: TileforgeError) -> Check:
    """Return the check of something that could not be looked at."""
    fix = str(error).removeprefix(f"{name}: ")
    return Check(name=name, outcome="unknown", found="could not be looked at", fix=fix)
