"""`tileforge` commands, with the recorded cache of the hub."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fork_server import server_name
from tests.support.forked import VARIABLE, read_at_start
from tests.support.launching import PYTHON, rank_env

_CLOUD = ("paramiko", "google.cloud.compute_v1", "google.cloud.storage")
"""Imported once for all commands, as the import takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str

    def last_json(self) -> Any:
        """Return the JSON object in the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


class Commands:
    """`tileforge` in a folder."""

    def __init__(self, *, env: Mapping[str, str]) -> None:
        """`env` is in addition to this process's environment."""
        self._env = rank_env(**env)
        self._env[VARIABLE] = server_name(*_CLOUD, **read_at_start(self._env))

    def run(self, *words: object, folder: Path, env: Mapping[str, str] | None = None) -> Done:
        """Run `tileforge` with these arguments in `folder`."""
        done = subprocess.run(
            [*PYTHON, "-m", "payload", *map(str, words)],
            cwd=folder,
            env={**self._env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        return Done(status=done.returncode, out=done.stdout, err=done.stderr)

    def do(self, *words: object, folder: Path, env: Mapping[str, str] | None = None) -> Done:
        """Run a command and expect success."""
        done = self.run(*words, folder=folder, env=env)
        assert done.status == 0, f"{words}: {done.status}\n{done.err}\n{done.out}"
        return done
