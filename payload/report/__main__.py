"""`python -m payload.report RUN [RUN ...]`: write an HTML page or print a table of runs."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import os
import shutil
import signal
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload.core.command_line import CommandParser
from payload.core.elapsed_line import elapsed_line
from payload.core.error_line import print_error
from payload.core.errors import ConfigError, ExitCode, TileforgeError, UsageError
from payload.core.files import write_whole
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable, shown_name
from payload.core.suggested_commands import command, program_name
from payload.report.source import Run, find_run
from payload.report.terminal_comparison import comparison
from payload.report.track import track
from payload.run_record.approved_settings import SENDING_TRACKERS
from payload.run_record.run_files import DEFAULT_RUNS_DIR, LATEST
from payload.run_record.tracker_process import missing_notes

_SEVERAL = "report.html"
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables. On Linux, a browser needs at least one of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    # As `tileforge compare` starts this program.
    is_compare = list(given[:1]) == ["--compare"]
    arguments = (compare_parser() if is_compare else parser()).parse_args(argv)
    try:
        _report(arguments)
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return ExitCode.OK


def compare_parser() -> CommandParser:
    """Return the parser of `compare`."""
    made = CommandParser(
        prog=f"{program_name()} compare",
        description="Print a table with the results of several runs and the settings in which they "
        "differ. A star marks the best value of a row; losses get a star only if the runs have the "
        "same task and data.",
        example=f"{program_name()} compare first second",
    )
    made.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("runs", nargs="*", metavar="RUN", help="id or folder of a run, or `latest`")
    _add_runs_dir(made)
    made.set_defaults(track=False, started_here=False)
    return made


def _add_runs_dir(made: CommandParser) -> None:
    made.add_argument(
        "--runs-dir",
        type=Path,
        metavar="DIR",
        help=f"folder of all runs (default: {DEFAULT_RUNS_DIR})",
    )


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("report"),
        description="Write a run's report: one HTML page with result, curves, time, cost, data and "
        "settings. The page needs no network. Several runs are shown side by side. Prints the "
        "path.",
        example=command("report", "latest", "--open"),
    )
    made.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="id or folder of a run, or `latest` (default: latest)",
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="output file (default: report.html in the run's folder; for several runs, "
        "report.html in the current folder)",
    )
    made.add_argument("--open", action="store_true", help="show the page in the browser")
    made.add_argument(
        "--compare",
        action="store_true",
        help="print a table that compares the runs, and write no page",
    )
    made.add_argument(
        "--track",
        action="store_true",
        help="send the run again to the trackers in its setting track.to, and write no page",
    )
    made.add_argument(
        "--to",
        action="append",
        default=[],
        choices=SENDING_TRACKERS,
        help="with --track: send the run to this tracker, even if the tracker is not enabled "
        "for the run on this machine",
    )
    made.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--started-here", action="store_true", help=argparse.SUPPRESS)
    _add_runs_dir(made)
    return made


def _report(arguments: argparse.Namespace) -> None:
    names = list(dict.fromkeys(arguments.runs or [LATEST]))
    runs = [
        find_run(name, runs_dir=arguments.runs_dir, is_started_here=arguments.started_here)
        for name in names
    ]
    if arguments.track:
        if len(runs) > 1:
            raise UsageError(
                f"--track takes one run, not {len(runs)}. Run the command once per run."
            )
        for note in missing_notes(runs[0].config):
            print(note, file=sys.stderr)
        track(
            runs[0],
            live=arguments.live,
            named=arguments.to,
            say=lambda line: print(line, file=sys.stderr),
        )
        return
    if arguments.compare:
        if len(runs) < 2:
            raise UsageError(f"compare {names[0]}: this is only one run. Name two or more runs.")
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        with elapsed_line(f"reading {len(runs)} runs"):
            table = comparison(runs, width=width)
        print(printable(table))
        return
    # Imported late: jinja2 takes a third of the time of `--help`.
    from payload.report.page import render

    out = _out_path(arguments.out, runs)
    try:
        with elapsed_line(f"writing {shown_name(str(out))}"):
            write_whole(out, render(runs), durable=False)
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror}). Choose another path with --out."
        ) from None
    print(shown_name(str(out)))
    if arguments.open:
        _open(out, os.environ)


def _open(page: Path, env: Mapping[str, str]) -> None:
    """Show the page in the browser; print a note if it cannot be shown."""
    # A text browser on PATH would take over the terminal, so only $BROWSER works without a display.
    if sys.platform == "linux" and not any(map(env.get, _DISPLAYS)):
        problem = "there is no display. Copy the page to a machine with one, or set BROWSER"
    elif webbrowser.open(page.resolve().as_uri()):
        return
    else:
        problem = "no browser was found"
    print(f"note: the page is not shown: {problem}.", file=sys.stderr)


def _out_path(out: Path | None, runs: Sequence[Run]) -> Path:
    if out is None:
        return runs[0].paths.report if len(runs) == 1 else Path(_SEVERAL)
    return out / _SEVERAL if out.is_dir() else out


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())
