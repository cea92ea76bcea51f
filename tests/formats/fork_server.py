"""Carries out `tileforge` commands in forks of one process that has imported everything.

The imports take seconds of processor time, and the tests of this folder run a hundred commands.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import payload
from tests.support.launching import REPO, rank_env

_LIBRARIES = (
    *("torch", "safetensors.torch", "tokenizers", "accelerate", "transformers", "rich.table"),
    *("paramiko", "google.cloud.compute_v1", "google.cloud.storage"),
)


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
    """`tileforge` in a folder. A context manager."""

    def __init__(self, scratch: Path, *, env: Mapping[str, str]) -> None:
        """`scratch` takes output; `env` is in addition to this process's environment."""
        self._out, self._err = scratch / "stdout", scratch / "stderr"
        self._env = rank_env(**env)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.formats.fork_server"],
            cwd=REPO,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def run(self, *words: object, folder: Path, env: Mapping[str, str] | None = None) -> Done:
        """Carry out `tileforge WORDS` in `folder`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "words": [str(word) for word in words],
            "folder": str(folder),
            "env": dict(env or {}),
            "out": str(self._out),
            "err": str(self._err),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())
        out, err = (path.read_text(encoding="utf-8") for path in (self._out, self._err))
        return Done(status=status, out=out, err=err)

    def do(self, *words: object, folder: Path, env: Mapping[str, str] | None = None) -> Done:
        """Carry it out and expect success."""
        done = self.run(*words, folder=folder, env=env)
        assert done.status == 0, f"{words}: {done.status}\n{done.err}\n{done.out}"
        return done


def main() -> None:
    """Answer requests from stdin with exit codes, a line each."""
    for name in (*_LIBRARIES, *_modules()):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page of what was imported
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _carry_out(json.loads(line))
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    os._exit(0)  # taking all of it down in order takes seconds


def _modules() -> Iterator[str]:
    """Yield the names of the payload's modules; those that are programs run in the forks."""
    for found in pkgutil.walk_packages(payload.__path__, "payload."):
        if not found.name.endswith(".__main__"):
            yield found.name


def _carry_out(request: Mapping[str, Any]) -> NoReturn:
    """Run the command in this fork and end the process."""
    for descriptor, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, flags), descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # for the whole process
    os.chdir(request["folder"])
    os.environ.update(request["env"])
    sys.argv = ["tileforge", *request["words"]]
    status = 1
    try:
        runpy.run_module("payload", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if sys.exc_info()[0] not in (None, SystemExit):
            sys.excepthook(*sys.exc_info())
        os._exit(status)


if __name__ == "__main__":
    main()
