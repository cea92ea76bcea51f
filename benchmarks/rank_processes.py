"""Starts the ranks of a benchmark on this machine, and kills the remaining ones at the end."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.harness import REPO
from tests.support.ports import free_port

_SHOWN = 3000
"""Number of characters of a failed rank's output that the error shows."""
_POLL_S = 0.1
_GRACE_S = 20
"""Seconds in which the other ranks must end after a rank has failed."""


class RankProcesses:
    """One single-threaded process per rank; the context manager kills them on exit.

    Each rank leads its own session, so Ctrl-C reaches only the benchmark.
    """

    def __init__(
        self, ranks: int, *program: str, code: Path = REPO, deepspeed: bool = False
    ) -> None:
        """Start `python PROGRAM...` on each rank, with modules from the folder `code`.

        With `deepspeed`, DeepSpeed is added to the path if it is not installed.
        """
        self._outputs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        env, port = _environment(code, deepspeed=deepspeed), free_port()
        try:
            for rank in range(ranks):
                own = _rank_variables(rank, ranks=ranks, port=port) if ranks > 1 else {}
                self._start(program, code=code, env=env | own)
        except BaseException:
            self.kill()
            raise

    def is_running(self) -> bool:
        """Return whether all ranks still run."""
        return all(status is None for status in self._statuses())

    def wait(self, *, within_s: float) -> None:
        """Wait until all ranks have ended. Raises SystemExit if one fails or the time is over."""
        ends_s = time.monotonic() + within_s
        while None in self._statuses() and not any(self._statuses()):
            if time.monotonic() > ends_s:
                raise SystemExit(
                    f"error: {len(self._processes)} rank(s) did not end within {within_s:g} s."
                )
            time.sleep(_POLL_S)
        # The others lose the connection to a failed rank, and end by themselves.
        ends_s = time.monotonic() + _GRACE_S
        while None in self._statuses() and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        failed = [
            f"rank {rank} of {len(self._processes)} ended with status {status}:\n{self._tail(rank)}"
            for rank, status in enumerate(self._statuses())
            if status
        ]
        if failed:
            raise SystemExit("error: " + "\n".join(failed))

    def kill(self) -> None:
        """Kill the running ranks with the processes that they started."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for output in self._outputs:
            output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def _start(self, program: tuple[str, ...], *, code: Path, env: dict[str, str]) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self._outputs.append(output)
        process = subprocess.Popen(
            [sys.executable, *program],
            cwd=code,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)

    def _statuses(self) -> list[int | None]:
        """Return each rank's exit status, or None while it runs."""
        return [process.poll() for process in self._processes]

    def _tail(self, rank: int) -> str:
        output = self._outputs[rank]
        output.seek(0)
        return output.read().decode(errors="replace")[-_SHOWN:]


def _environment(code: Path, *, deepspeed: bool) -> dict[str, str]:
    """Return the environment that all ranks share."""
    paths = [str(code)]
    if deepspeed and not importlib.util.find_spec("deepspeed"):
        from tests.train.strategies.deepspeed_folder import deepspeed_folder

        paths.append(str(deepspeed_folder()))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # Otherwise each rank would compile the payload's modules again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _rank_variables(rank: int, *, ranks: int, port: int) -> dict[str, str]:
    """Return the variables in which torch's launcher gives a process its rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
