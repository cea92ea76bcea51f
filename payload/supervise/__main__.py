"""`python -m payload.supervise --run-dir RUN`: supervise one planned run until it ends."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload.core.command_line import CommandParser
from payload.core.errors import ConfigError, PreflightError, TileforgeError
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.monitor.exporter import monitored
from payload.run_record.report_and_samples_process import write_report
from payload.run_record.run_files import DEFAULT_GRACE_S, RunPaths
from payload.run_record.run_lock import FORCE_SIGNAL, RunLock
from payload.run_record.run_repair import known_config, move_blockers_aside
from payload.run_record.tracker_process import send_to_trackers
from payload.supervise.processes import adopt_orphans
from payload.supervise.stop_requests import Wakeups
from payload.supervise.supervisor import Supervisor


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Supervise one run and return the exit code of the run."""
    arguments = _parser().parse_args(argv)
    # The processes of the run are found by the resolved path.
    paths = RunPaths(arguments.run_dir.resolve())
    wakeups = Wakeups([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, FORCE_SIGNAL])
    try:
        if not paths.plan.exists():
            raise ConfigError(
                f"{paths.root} has no plan.json, so it is not the folder of a planned run. Start a "
                f"run with {command('orchestrate', 'run')}."
            )
        _make_room(paths)
        try:
            adopt_orphans()
        except OSError as error:  # in an emulator
            _note(f"note: processes whose parent ended are found only by their variables ({error})")
        with RunLock(paths), monitored(paths, note=_note):
            ended = Supervisor(
                paths,
                wakeups=wakeups,
                owner_pid=arguments.owner_pid,
                grace_s=arguments.grace,
                env=env,
                job_ends_unix=arguments.job_ends,
            ).run()
        if arguments.owner_pid is None and paths.root.is_dir():
            # No command follows the run, so the supervisor writes the report.
            _write_report(paths)
        return ended
    except TileforgeError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    finally:
        wakeups.close()


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _write_report(paths: RunPaths) -> None:
    problem = write_report(paths, is_started_here=True)
    if problem:
        print(f"note: no report was written: {problem}", file=sys.stderr)
    for note in send_to_trackers(paths, known_config(paths)):
        print(note, file=sys.stderr)


def _make_room(paths: RunPaths) -> None:
    try:
        for sentence in move_blockers_aside(paths):
            print(f"warning: {sentence}", file=sys.stderr)
    except OSError as error:
        raise PreflightError(
            f"{paths.root} cannot be written ({error.strerror}). Free disk space, or correct the "
            "folder's permissions."
        ) from None


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=command("supervise"),
        description="Start the ranks of a planned run, restart them after failures, and wait until "
        "the run ends. Ctrl-C stops it with a checkpoint; SIGUSR1 or a second Ctrl-C stops it "
        "immediately. After SIGTERM or SIGHUP from another program, the run also saves, "
        "but ends with exit code 41 (rank_lost).",
        example=command("supervise", "--run-dir", "runs/latest"),
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="run folder")
    parser.add_argument(
        "--owner-pid",
        type=int,
        metavar="PID",
        help="stop the run when this parent process of the supervisor ends",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help="time to save a checkpoint after a stop request (default: %(default)g)",
    )
    parser.add_argument(
        "--job-ends",
        type=float,
        metavar="UNIX",
        help="time at which a scheduler kills this job; the run saves and stops before that time",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
