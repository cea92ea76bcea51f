"""`python -m payload.storage`: a run's results in a bucket or a mounted folder."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from payload.config.run_config import load_run_config
from payload.config.store_address import StoreAddress, parse_store_address
from payload.core.command_line import CommandParser
from payload.core.error_line import print_error
from payload.core.errors import ExitCode, TileforgeError, UsageError
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable, shown_name
from payload.core.suggested_commands import command
from payload.formats.checkpoint_listing import CHECKPOINTS_NAME
from payload.run_record.approved_settings import (
    override_keys,
    require_approved,
    settings_to_approve,
)
from payload.run_record.run_files import RunPaths, require_own_folders
from payload.storage.checkpoints import whole_checkpoints
from payload.storage.isolated_reader import serve, watched_store
from payload.storage.opening import check_store, open_store
from payload.storage.restore import has_run, require_absent, restore
from payload.storage.uploader import Uploader

_NICE = 10
"""Niceness of the upload, so that ranks have priority."""
_UPLOAD_RETRY_S = 8.0
"""Time for retries of one request. The uploader then logs the error and retries the upload."""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _check(arguments: argparse.Namespace) -> int:
    address = parse_store_address(arguments.address, setting="ADDRESS")
    check_store(address)
    if arguments.new is not None:
        require_absent(address.under(arguments.new))
    print(f"{shown_name(str(address))} can be written and read")
    return ExitCode.OK


def _list(arguments: argparse.Namespace) -> int:
    store = open_store(parse_store_address(arguments.address, setting="ADDRESS"))
    if not has_run(store):
        print("\n".join(map(shown_name, store.groups())))
        return ExitCode.OK
    for name in whole_checkpoints(store):
        size = sum(each.bytes for each in store.entries(f"{CHECKPOINTS_NAME}/{name}/"))
        print(f"{name}  {size / 1e6:,.1f} MB")
    return ExitCode.OK


def _upload(arguments: argparse.Namespace) -> int:
    paths, address = _run_of(arguments)
    config = load_run_config(paths.config)
    os.nice(_NICE)
    Uploader(
        paths,
        open_store(address, retry_s=_UPLOAD_RETRY_S),
        keep=config.train.keep_checkpoints,
        final_wait_s=config.storage.final_wait_s,
        is_new=arguments.new,
        say=_say,
    ).run(sys.stdin)
    return ExitCode.OK


def _restore(arguments: argparse.Namespace) -> int:
    paths, address = _run_of(arguments)
    with watched_store(address, env=os.environ, say=_say) as store:
        found = restore(store, paths, say=_say)
    print(found.name if found else "")
    return ExitCode.OK


def _serve(arguments: argparse.Namespace) -> int:
    address = parse_store_address(arguments.address, setting="ADDRESS")
    address = replace(address, num_below=arguments.below)
    serve(address, sys.stdin.buffer, sys.stdout.buffer)
    return ExitCode.OK


def _run_of(arguments: argparse.Namespace) -> tuple[RunPaths, StoreAddress]:
    """Return the run's folder and its address in the store.

    Raises ConfigError if the folder contains a linked folder, or if only the run's own settings
    name the store. Without this check, a copied run folder could make this program write to any
    path.
    """
    paths = RunPaths(arguments.run_dir.resolve())
    require_own_folders(paths)
    config = load_run_config(paths.config, overrides=arguments.overrides)
    if not arguments.started_here:
        require_approved(
            paths,
            settings_to_approve(config, of=["storage.results"]),
            named=override_keys(arguments.overrides),
        )
    results = config.storage.address()
    if results is None:
        raise UsageError(
            f'{paths.config}: storage.results = "none". Set storage.results to an address.'
        )
    return paths, results.under(paths.run_id)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("storage"),
        description="Check, list, upload or restore a run's results in a bucket "
        "(gs://BUCKET/PREFIX) or a mounted folder.",
        example=command("storage", "list", "gs://BUCKET/PREFIX"),
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for verb, act, summary in (
        ("check", _check, "write, read and delete a small object"),
        ("list", _list, "list the runs at an address, or the checkpoints of a run"),
        ("serve", _serve, "answer another process's requests to a store"),
    ):
        at = _add_verb(commands, verb, summary, "gs://BUCKET/PREFIX")
        at.set_defaults(command=act)
        if verb == "check":
            at.add_argument(
                "--new", metavar="RUN", help="fail if the store already has a run with this id"
            )
        if verb == "serve":
            below = "refuse symlinks in the last N components of the address (default: 0)"
            at.add_argument("--below", type=int, default=0, metavar="N", help=below)
        at.add_argument(
            "address",
            metavar="ADDRESS",
            help="address of the store or of a run: gs://BUCKET/PREFIX or a folder",
        )
    for verb, act, summary in (
        ("upload", _upload, "upload a run's results to its store until stdin ends"),
        ("restore", _restore, "fetch the newest checkpoint from the store if it is newer"),
    ):
        of = _add_verb(commands, verb, summary, "--run-dir", "runs/latest")
        of.set_defaults(command=act, new=False)
        of.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="run folder")
        of.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="override one setting; for example, set storage.results if another machine "
            "wrote the run",
        )
        of.add_argument("--started-here", action="store_true", help=argparse.SUPPRESS)
        if verb == "upload":
            new = "treat the run as new: fail if the store already contains this run"
            of.add_argument("--new", action="store_true", help=new)
    return made


def _add_verb(
    commands: argparse._SubParsersAction[CommandParser], verb: str, summary: str, *example: str
) -> CommandParser:
    return commands.add_parser(
        verb,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        example=command("storage", verb, *example),
    )


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main(sys.argv[1:]))
