"""Identities of runs that tests write by hand."""

from __future__ import annotations

from payload.results import RunPaths, write_whole
from payload.run_identity import RunIdentity

MINE, THEIRS = RunIdentity(identity="1" * 32), RunIdentity(identity="2" * 32)


def write_identity(paths: RunPaths, run: RunIdentity = MINE) -> RunPaths:
    """Give a run's folder an identity."""
    write_whole(paths.identity, run.to_json())
    return paths
