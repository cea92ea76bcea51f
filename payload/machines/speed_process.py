"""Returns this machine's measured speed, and starts the measurement if the cache lacks it."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from payload.core.errors import ConfigError, ExitCode
from payload.core.one_line import last_line
from payload.core.python_processes import code_environment, module_command
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build
from payload.machines.process_variables import spin_environment, tuned_malloc
from payload.machines.speed_cache import (
    MachineSpeed,
    SpeedKey,
    read_speed,
    speed_folder,
    torch_version,
)

MODULE = "payload.train.measure_machine"
SOURCE = "TILEFORGE_MACHINE_SPEED"
"""Environment variable; with `table`, plans use the table of typical speeds."""
_NOT_MEASURED = "note: the speed of this machine is not measured"
_TIMEOUT_S = 120.0


def cached_speed(env: Mapping[str, str], *, cores: int | None = None) -> MachineSpeed | None:
    """Return this machine's cached measurement; None if it is missing or the cores were busy.

    A process that may use only some of the machine's cores passes the number of all `cores`.
    """
    return None if _uses_table(env) else _usable(_cached(env, cores=cores))


def measured_speed(
    env: Mapping[str, str], *, now_unix: float, say: Callable[[str], None]
) -> MachineSpeed | None:
    """Return this machine's speed from the cache, or measure it in a child process.

    Return None if torch is not installed, if other programs use the cores, if the measurement
    fails, or if `SOURCE` selects the table. `say` receives a line before a measurement, and the
    reason if a measurement is not used.
    """
    if _uses_table(env):
        return None
    found = _cached(env)
    if not _is_current(found, now_unix) and torch_version() is not None:
        # Two measurements at the same time would each see half of the machine.
        with _locked(env):
            found = _cached(env)
            if not _is_current(found, now_unix):
                found = _measure(env, say)
    return _usable(found)


def _cached(env: Mapping[str, str], *, cores: int | None = None) -> MachineSpeed | None:
    key = SpeedKey.of_this_machine(env, cores=cores)
    with suppress(RuntimeError):  # without a home
        return read_speed(speed_folder(env), key) if key else None
    return None


def _uses_table(env: Mapping[str, str]) -> bool:
    return env.get(SOURCE) == "table"


def _is_current(found: MachineSpeed | None, now_unix: float) -> bool:
    return found is not None and found.is_current(now_unix)


def _usable(found: MachineSpeed | None) -> MachineSpeed | None:
    return found if found is not None and found.is_usable() else None


def _measure(env: Mapping[str, str], say: Callable[[str], None]) -> MachineSpeed | None:
    say("measuring the speed of this machine, once: a few seconds")
    try:
        done = subprocess.run(
            module_command(MODULE),
            env={**code_environment(env), **tuned_malloc(), **spin_environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"{_NOT_MEASURED}: {error}")
        return None
    found, reason = None, last_line(done.stderr, otherwise=f"exit status {done.returncode}")
    with suppress(ConfigError):
        if done.returncode == ExitCode.OK:
            found = build(MachineSpeed, parse_json(done.stdout, where=MODULE), where=MODULE)
    if found is None:
        say(f"{_NOT_MEASURED}: {reason}")
    elif not found.is_usable():
        busy = f"other programs use {found.others_share:.0%} of the cores"
        say(f"{_NOT_MEASURED}: {busy}. Plan again when these programs have ended")
    return found


@contextmanager
def _locked(env: Mapping[str, str]) -> Iterator[None]:
    """Wait for other measurements of this user; without a usable cache folder, do not wait."""
    try:
        folder = speed_folder(env)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "measure.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError):
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
