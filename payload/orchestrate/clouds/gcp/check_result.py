"""The result of one check of `doctor`: outcome and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from payload.core.errors import ExitCode, TileforgeError

Outcome = Literal["ok", "error", "warning", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check."""

    name: str
    outcome: Outcome
    found: str
    """The observed state of the project or machine, with numbers."""
    fix: str = ""
    exit_code: ExitCode = ExitCode.OK
    """Exit code if the outcome is an error."""


def auth(name: str, found: str, fix: str) -> Check:
    """Return the error for a missing permission or a disabled service."""
    return Check(name=name, outcome="error", found=found, fix=fix, exit_code=ExitCode.AUTH)


def denied(name: str, error: TileforgeError, permission_fix: str) -> Check:
    """Return the error for a refused request.

    `permission_fix` is the fix if a permission is missing. Other refusals, for example because of
    billing or a perimeter of VPC Service Controls, have a fix of the error catalog.
    """
    own = error.fix if error.fix and "Request the roles" not in error.fix else ""
    lacks_permission = not own or "roles/" in own
    found = error.cause.removeprefix(f"{name}: ")
    return auth(name, found, permission_fix if lacks_permission else own)


def wrong(name: str, found: str, fix: str) -> Check:
    """Return the error for a setting that names a missing or unusable resource."""
    return Check(name=name, outcome="error", found=found, fix=f"{fix}.", exit_code=ExitCode.CONFIG)


def unknown(name: str, error: TileforgeError) -> Check:
    """Return the result of a check that could not run because of `error`."""
    fix = str(error).removeprefix(f"{name}: ")
    return Check(name=name, outcome="unknown", found="could not be checked", fix=fix)
