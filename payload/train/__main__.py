"""`python -m payload.train`: one rank, alone or under mpirun, torchrun or `accelerate launch`."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import contextlib
import datetime
import logging
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Never

from payload.config.run_config import RunConfig, load_run_config
from payload.core.command_line import CommandParser
from payload.core.errors import ExitCode, TileforgeError, TrainingError, UsageError
from payload.core.interrupts import Presses
from payload.core.missing_packages import missing_package_error
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.core.validation.names import RUN_ID
from payload.machines.process_variables import PLAIN_MALLOC
from payload.machines.rank_variables import RUN_DIR
from payload.run_record.approved_settings import (
    override_keys,
    require_approved,
    settings_to_approve,
)
from payload.run_record.run_files import DEFAULT_RUNS_DIR, RunPaths, default_runs_dir, new_run_id
from payload.train.start_clock import StartClock

if TYPE_CHECKING:
    from payload.train.parts import Observer
    from payload.train.ranks.world import World

log = logging.getLogger("payload.train")

_TRAINED_FROM = ("data.dir", "model.init")


def main(
    argv: Sequence[str], env: Mapping[str, str], *, observer: Observer | None = None
) -> ExitCode:
    """Train and return the exit code; `observer` is notified of this rank's progress."""
    exit_recorder = ExitRecorder()
    sys.excepthook = exit_recorder.record_exception
    arguments = parser().parse_args(argv)
    stop = StopSignal()
    is_launched = arguments.run_dir is not None and _is_launched(arguments.run_dir, env)
    config = _load_config(arguments, is_launched=is_launched)
    clock = StartClock()
    _set_up_logging(env)
    # torch takes seconds to import; a wrong config should not cost them.
    from payload.kernels.cpu_allocator import use_plain_malloc
    from payload.train.ranks.world import World
    from payload.train.session import train
    from payload.train.setup import pin_initial

    world = exit_recorder.world = World.from_env(env).on(
        config.device, deterministic=config.engine.deterministic
    )
    exit_recorder.paths = RunPaths(arguments.run_dir) if arguments.run_dir else None
    logging.getLogger().setLevel(logging.INFO if world.is_main else logging.WARNING)
    if config.launch.malloc in PLAIN_MALLOC and world.is_cpu:
        use_plain_malloc()
    clock.lap("imports")
    world.join(config.distributed)
    run_dir = arguments.run_dir
    if run_dir is None:
        fresh = world.broadcast(_new_run(config), _NewRun)
        run_dir = Path(DEFAULT_RUNS_DIR, fresh.run_id)
    clock.lap("group")
    paths = exit_recorder.paths = RunPaths(run_dir)
    config = pin_initial(config, paths=paths, world=world)
    outcome = train(
        config,
        paths=paths,
        world=world,
        stop_requested=stop.requested,
        clock=clock,
        observer=observer,
        named={} if is_launched else _named(arguments, config),
    )
    if outcome.stopped and stop.number is not None:
        exit_recorder.record_stop(stop.number)
    world.leave()
    if world.is_main:
        ended = "stopped" if outcome.stopped else "finished"
        log.info(f"{ended} after step {outcome.step}: {paths.root}")
    return ExitCode.OK


class StopSignal:
    """Remembers SIGTERM or SIGINT until the end of the step; a second Ctrl-C ends the process."""

    def __init__(self) -> None:
        self._presses = Presses()
        self.number: signal.Signals | None = None
        """The signal that was received; None before."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self.number is not None

    def _remember(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            if not self._presses.is_new():
                return
            if self.number == signal.SIGINT:
                raise KeyboardInterrupt
            with contextlib.suppress(OSError):
                print(
                    "stopping after this step; press Ctrl-C again to stop immediately",
                    file=sys.stderr,
                )
        self.number = signal.Signals(number)


class ExitRecorder:
    """Ends this process on an error: prints the error, writes the exit record and exits."""

    def __init__(self) -> None:
        self.paths: RunPaths | None = None
        self.world: World | None = None

    def record_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> Never:
        """Print the error in one line, write the exit record and end this process."""
        if isinstance(error, KeyboardInterrupt):
            exit_now(128 + signal.SIGINT)
        exit_code = ExitCode.TRAINING
        try:
            converted = self._as_tileforge_error(error)
            exit_code = converted.exit_code
            # The log may be on the disk that is full.
            with contextlib.suppress(OSError):
                print(f"error: {printable(str(converted))}", file=sys.stderr)
            self._record(converted.exit_code, str(converted))
        finally:
            exit_now(exit_code)

    def record_stop(self, number: signal.Signals) -> None:
        """Record that this rank received the signal and stopped normally."""
        self._record(ExitCode.OK, f"was sent {number.name}")

    def _record(self, exit_code: ExitCode, text: str) -> None:
        if self.paths is None or self.world is None or not self.paths.root.is_dir():
            return
        # Not at the top: this import needs torch, and an error can come before torch is imported.
        from payload.train.rank_metrics_and_heartbeat import write_rank_exit

        with contextlib.suppress(OSError):
            write_rank_exit(self.paths, self.world, exit_code=exit_code, error=text)

    def _as_tileforge_error(self, error: BaseException) -> TileforgeError:
        """Convert an error to a TileforgeError; an unknown error's traceback goes to the log."""
        if isinstance(error, TileforgeError):
            return error
        if missing := missing_package_error(error):
            return missing
        first_line = str(error).splitlines()[0] if str(error) else ""
        text = f"{type(error).__name__}: {first_line}"
        if self.world is not None:
            from payload.train.ranks.world import as_rank_lost

            lost = as_rank_lost(error, world=self.world)
            if lost is not None:
                return lost
        if isinstance(error, MemoryError) or "allocate memory" in text:
            return TrainingError(f"out of memory ({text}). Lower batch.micro_batch_size.")
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        return TrainingError(f"{text} (traceback above, in this rank's log)")


def exit_now(status: int) -> Never:
    """End this process immediately, after flushing its output.

    sys.exit is not used. After another rank has disappeared, gloo's threads can keep the
    interpreter alive for minutes. After a finished run, a torch thread has aborted the process
    (SIGABRT, "terminate called without an active exception"). An orderly shutdown of torch also
    takes 0.7 s.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _is_launched(run_dir: Path, env: Mapping[str, str]) -> bool:
    """Return True for a rank of a run that a command has planned and started."""
    return os.path.realpath(env.get(RUN_DIR, "/")) == os.path.realpath(run_dir)


def _load_config(arguments: argparse.Namespace, *, is_launched: bool) -> RunConfig:
    """Return the run's settings.

    Raises ConfigError if only the run.toml in the run folder names the data or the model: the
    author of the folder could name any file of this machine. Raises UsageError if the options name
    no run, or if the default folder `runs` is a link.
    """
    path: Path | None = arguments.config
    if path is None and arguments.run_dir is None:
        raise UsageError("choose a config with --config FILE, or a run folder with --run-dir DIR.")
    if arguments.run_dir is not None and not RUN_ID.fullmatch(arguments.run_dir.resolve().name):
        raise UsageError(
            f"--run-dir {str(arguments.run_dir)!r}: the folder's name is the run's id. Use "
            "letters, digits, dots, dashes and underscores, begin with a letter or digit, and do "
            "not use 'latest'."
        )
    if arguments.run_dir is None:
        default_runs_dir(option="--run-dir", run="NAME")
    paths = RunPaths(arguments.run_dir or Path())
    config = load_run_config(path or paths.config, overrides=arguments.overrides)
    if path is None and not is_launched:
        named = override_keys(arguments.overrides)
        require_approved(paths, settings_to_approve(config, of=_TRAINED_FROM), named=named)
    return config


def _named(arguments: argparse.Namespace, config: RunConfig) -> dict[str, str]:
    """Return the settings with effects outside the run folder that the user has approved.

    Without `--config`, these are only the data, the model and the settings given by `--set`.
    """
    if arguments.config is not None:
        return settings_to_approve(config)
    return settings_to_approve(config, of={*_TRAINED_FROM, *override_keys(arguments.overrides)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewRun:
    """Rank 0's message to the other ranks: the id of a run that was started without a folder."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")


def _new_run(config: RunConfig) -> _NewRun:
    now = datetime.datetime.now(tz=datetime.UTC)
    return _NewRun(run_id=new_run_id(config.run.name, now=now, suffix=secrets.token_hex(2)))


def _set_up_logging(env: Mapping[str, str]) -> None:
    level = logging.getLevelNamesMapping().get(env.get("TILEFORGE_LOG_LEVEL", "INFO"), logging.INFO)
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("train"),
        description="Train a model in this process, or on all ranks that a launcher started. A "
        "run folder that contains a checkpoint is resumed.",
        example="torchrun --nproc-per-node 2 -m payload.train --config "
        "payload/configs/quickstart.toml",
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="config of the run")
    made.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="run folder (default: runs/<name>-<time>-<random>). Without --config, the "
        "run.toml in this folder is the config",
    )
    made.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; can be repeated",
    )
    return made


if __name__ == "__main__":
    exit_now(main(sys.argv[1:], os.environ))
