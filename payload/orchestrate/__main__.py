"""`python -m payload.orchestrate`: plan, preflight, run, attach, status, logs, up, down..."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import payload
from payload.core.errors import INTERRUPTED, ExitCode, TileforgeError, UsageError
from payload.core.files import write_whole
from payload.core.interrupts import interrupt_once
from payload.core.suggested_commands import command, quoted
from payload.launch.exports.registry import ENGINES
from payload.orchestrate.commands import plan_and_run as run
from payload.orchestrate.commands.attach import AttachOptions, attach
from payload.orchestrate.commands.cloud_arguments import add_cloud_commands, add_runs_dir, typed
from payload.orchestrate.commands.collect import collect
from payload.orchestrate.commands.dashboard import DashboardOptions, dashboard
from payload.orchestrate.commands.logs import LogsOptions, logs
from payload.orchestrate.commands.remove import RemoveOptions, remove
from payload.orchestrate.commands.run_choice import RunChoice
from payload.orchestrate.commands.run_list import ListOptions, list_runs
from payload.orchestrate.commands.status import StatusOptions, status
from payload.orchestrate.commands.stop import StopOptions, stop
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.export_plan import plan_export
from payload.orchestrate.runs.run_index import check_named_id, check_new_id
from payload.orchestrate.sites.registry import site_names
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import DEFAULT_GRACE_S, default_runs_dir
from payload.storage.store_access import is_address, run_address

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")

_QUICKSTART = "payload/configs/quickstart.toml"
_EXAMPLES = {
    "plan": f"{_QUICKSTART} --set train.steps=100",
    "preflight": "--inventory cluster.json --wait 10",
    "run": f"{_QUICKSTART} --inventory local --set run.name=first",
    "status": "--json",
    "logs": "--rank 1",
    "list": "",
    "attach": "--inventory cluster.json",
    "dashboard": "--open",
    "stop": "--grace 60",
    "collect": "--runs-dir runs",
    "remove": "--keep 3 --dry-run",
    "doctor": "--stack dev",
    "up": "--stack dev --next-zone",
    "sweep": "--json",
    "down": "--stack dev",
    "rehearse": "--budget-usd 1",
}
"""Words after each command in the example below its help."""


def main(argv: Sequence[str], env: Mapping[str, str], *, access: LocalAccess | None = None) -> int:
    """Carry out one command and return its exit code."""
    arguments = parser().parse_args(argv)
    if getattr(arguments, "config_file", None) is not None:
        arguments.config = arguments.config_file
    if getattr(arguments, "profile", None) is not None:
        arguments.overrides = [*arguments.overrides, f"train.profile_step={arguments.profile}"]
    try:
        if "runs_dir" in arguments:
            arguments.runs_dir = _resolved(arguments.runs_dir)
        _check_run_ids(arguments)
        return int(arguments.command(arguments, access or LocalAccess(env)))
    except TileforgeError as error:
        text_console(stderr=True).print(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        text_console(stderr=True).print("interrupted")
        return INTERRUPTED


def _typed(
    kind: type[_T],
    command: Callable[[_T, LocalAccess], int],
    arguments: argparse.Namespace,
    access: LocalAccess,
) -> int:
    """Carry out a command with its own options."""
    return command(typed(kind, arguments), access)


def _resolved(runs_dir: str | None) -> Path:
    """Return the one name of the runs' folder, whatever links lead to it. Raises UsageError."""
    try:
        return (Path(runs_dir) if runs_dir else default_runs_dir()).resolve()
    except (OSError, RuntimeError):  # of Python before 3.13 for links that lead to each other
        raise UsageError(f"--runs-dir {runs_dir}: its links lead nowhere. Name a folder.") from None


def _check_run_ids(arguments: argparse.Namespace) -> None:
    """Hold every run that the command line names to the form of an id: it becomes a path."""
    if (fresh := getattr(arguments, "run_id", None)) is not None:
        check_new_id(fresh)
    for option in ("run", "resume"):
        named = getattr(arguments, option, None)
        if named is None:
            continue
        if option in getattr(arguments, "takes_address", ()) and is_address(named):
            run_address(named)
        else:
            check_named_id(named)
    for named in getattr(arguments, "runs", ()):
        check_named_id(named)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog=command("orchestrate"),
        description="Build clusters; plan, start and follow training runs. Results go to stdout, "
        "talk to stderr.",
        epilog="Example: "
        + command("orchestrate", "run", "--config", "payload/configs/quickstart.toml"),
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_preflight(commands)
    _add_run(commands)
    _add_status(commands)
    _add_logs(commands)
    _add_list(commands)
    _add_attach(commands)
    _add_dashboard(commands)
    _add_stop(commands)
    _add_collect(commands)
    _add_remove(commands)
    add_cloud_commands(commands)
    for verb, words in _EXAMPLES.items():
        commands.choices[verb].epilog = "Example: " + command("orchestrate", verb, *words.split())
    return made


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="print what `run` would do, and start nothing")
    parser.set_defaults(command=_plan)
    _add_what(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--strategies",
        action="store_true",
        help="compare what the ranks can do by memory and predicted step, and print nothing else",
    )
    export = parser.add_argument_group("to write the run as a file for another engine")
    export.add_argument("--export", choices=tuple(ENGINES), help="the engine (docs/exports.md)")
    export.add_argument("--out", type=Path, metavar="FILE", help="(default: stdout)")
    export.add_argument("--image", metavar="NAME", help="container image that has the payload")
    export.add_argument(
        "--nodes", type=int, metavar="N", help="machines like the inventory's first one"
    )
    export.add_argument(
        "--storage", metavar="NAME", help="where data and runs are kept, as the engine names it"
    )


def _plan(arguments: argparse.Namespace, access: LocalAccess) -> int:
    if arguments.export is None:
        for option in ("out", "image", "nodes", "storage"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option} is for a file. Name its engine with --export.")
        return run.plan(typed(run.PlanOptions, arguments), access)
    return _export(arguments, access)


def _export(arguments: argparse.Namespace, access: LocalAccess) -> int:
    """Write the run as one file for another engine, or print it."""
    talk, engine = text_console(stderr=True), ENGINES[arguments.export]
    chosen = load_cluster(arguments.inventory, env=access.environment())
    talk.print(chosen.headline())
    job, notes = plan_export(
        typed(run.ConfigOptions, arguments).load(),
        run_id=arguments.run_id,
        machines=chosen.inventory.nodes,
        domains=chosen.domains,
        nodes=arguments.nodes,
        image=arguments.image,
        storage=arguments.storage,
    )
    engine.require(job)
    for note in notes:
        talk.print(f"note: {note}")
    text, where = engine.render(job), "FILE"
    if arguments.out is None:
        text_console(stderr=False).print(text.removesuffix("\n"))
    else:
        where = quoted(str(arguments.out))
        try:
            write_whole(arguments.out, text)
        except OSError as error:
            raise UsageError(
                f"--out {arguments.out}: {error.strerror}. Name a file that can be written."
            ) from None
    talk.print(
        f"run {job.run_id}: {job.nodes} node(s) x {job.ranks_per_node} rank(s) x "
        f"{job.threads_per_rank} thread(s). Start it with: {engine.start.replace('FILE', where)}"
    )
    return ExitCode.OK


def _add_preflight(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "preflight",
        help="check every node of a cluster",
        description="Ask all nodes at once whether they are fit for a run: SSH, bootstrap, "
        "payload, processor, memory, disk, GPUs where the run computes on them, clock, name, "
        "route, and the ports between every two of them. Then start a small program on all of them "
        "with mpirun, as a run would, and measure matmuls and the exchange of gradients.",
    )
    parser.set_defaults(command=_preflight)
    _add_inventory(parser)
    _add_ssh_key(parser)
    _add_config(parser)
    parser.add_argument("--quick", action="store_true", help="start and measure nothing")
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="ask again for so long while machines boot (default: ask once)",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def _preflight(arguments: argparse.Namespace, access: LocalAccess) -> int:
    # paramiko takes half a second to import, which no other command needs.
    from payload.orchestrate.preflight.checks import PreflightOptions, preflight

    options = PreflightOptions(
        inventory=arguments.inventory,
        ssh_key=arguments.ssh_key,
        config=typed(run.ConfigOptions, arguments).load(),
        is_configured=arguments.config is not None or bool(arguments.overrides),
        quick=arguments.quick,
        wait=arguments.wait,
        json=arguments.json,
    )
    return preflight(options, access)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="start a run and follow it",
        description="Start a run and follow it to its end. On this machine Ctrl-C saves a "
        "checkpoint and stops, and a second one stops at once. On a cluster it detaches, and a "
        "second one within 3 s saves a checkpoint and stops.",
    )
    parser.set_defaults(command=partial(_typed, run.RunOptions, run.run), takes_address=("resume",))
    _add_what(parser)
    parser.add_argument(
        "--site",
        choices=site_names(),
        help="where to run, if not where the inventory says: slurm submits a job from a login node",
    )
    _add_ssh_key(parser)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a stopped or failed run: its id, or its address in a store, "
        "gs://BUCKET/PREFIX/RUN",
    )
    parser.add_argument(
        "--quick", action="store_true", help="do not try mpirun and the network on new nodes first"
    )
    parser.add_argument(
        "--detach", action="store_true", help="return once it runs; it outlives this terminal"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help="time to save a checkpoint after a stop was asked for (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print summary.json at the end")
    parser.add_argument(
        "--open", action="store_true", help="show the report in the browser at the end"
    )
    # payload.finetune's: it knows that the model is small and continues text.
    parser.add_argument("--samples", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--profile",
        type=int,
        metavar="STEP",
        help="record a trace of this step on rank 0 (train.profile_rank: on another one), and "
        "print its operators by time",
    )


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("status", help="show a run and its ranks")
    parser.set_defaults(command=partial(_typed, StatusOptions, status))
    _add_which(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _add_logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("logs", help="print what a rank or the launcher printed")
    parser.set_defaults(command=partial(_typed, LogsOptions, logs))
    _add_which(parser)
    parser.add_argument(
        "--rank", type=int, default=0, metavar="N", help="whose log (default: %(default)s)"
    )
    parser.add_argument("--launcher", action="store_true", help="the launcher's own log")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")


def _add_list(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("list", help="show all runs, the newest first")
    parser.set_defaults(command=partial(_typed, ListOptions, list_runs))
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _add_stop(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "stop",
        help="stop a run with a checkpoint",
        description="Stop a run with a checkpoint; with --inventory also one that another machine "
        "started on that cluster.",
    )
    parser.set_defaults(command=partial(_typed, StopOptions, stop))
    _add_inventory(parser)
    _add_ssh_key(parser)
    _add_which(parser)
    parser.add_argument("--force", action="store_true", help="at once, without a checkpoint")
    parser.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="time to save a checkpoint, before the ranks are killed; one that is being written "
        "gets longer (default: what run was given)",
    )


def _add_attach(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "attach",
        help="follow a run on a cluster to its end",
        description="Follow a run on a cluster to its end, from any terminal; with --inventory "
        "also one that another machine started. Ctrl-C detaches.",
    )
    parser.set_defaults(command=partial(_typed, AttachOptions, attach))
    _add_inventory(parser)
    _add_ssh_key(parser)
    _add_which(parser)
    parser.add_argument("--json", action="store_true", help="print summary.json at the end")


def _add_dashboard(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dashboard",
        help="show a run's metrics in the browser",
        description="Print the address of Grafana's dashboards, and keep it open until Ctrl-C. On "
        "a cluster with `monitoring: prometheus` they come through SSH. For a run on this machine "
        "Prometheus is started here, and Grafana where it is installed.",
    )
    parser.set_defaults(command=partial(_typed, DashboardOptions, dashboard))
    _add_inventory(parser)
    _add_ssh_key(parser)
    _add_which(parser)
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def _add_collect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "collect", help="bring a cluster run's logs, metrics and newest checkpoint here"
    )
    parser.set_defaults(command=partial(_typed, RunChoice, collect), takes_address=("run",))
    _add_which(parser)


def _add_remove(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "remove",
        help="remove old runs with their checkpoints from this disk",
        description="Remove runs with all their checkpoints. One that is running stays, one on a "
        "cluster that was not collected, and one with weights that another run's adapter needs.",
    )
    parser.set_defaults(command=partial(_typed, RemoveOptions, remove))
    parser.add_argument("runs", nargs="*", metavar="RUN", help="ids of the runs to remove")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N instead")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed")
    parser.add_argument("--force", action="store_true", help="also the last two kinds of runs")
    add_runs_dir(parser)


def _add_ssh_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ssh-key",
        type=Path,
        metavar="FILE",
        help="the private key that the nodes know (default: .cluster/CLUSTER/id_ed25519)",
    )


def _add_what(parser: argparse.ArgumentParser) -> None:
    _add_inventory(parser)
    _add_config(parser)
    parser.add_argument("--run-id", metavar="ID", help="(default: name, time and four digits)")
    add_runs_dir(parser)


def _add_config(parser: argparse.ArgumentParser) -> None:
    config = parser.add_mutually_exclusive_group()
    config.add_argument(
        "config_file", nargs="?", type=_toml_file, metavar="FILE.toml", help="the same as --config"
    )
    config.add_argument("--config", type=Path, metavar="FILE", help="run.toml (default: defaults)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; may be repeated",
    )


def _toml_file(text: str) -> Path:
    if not text.endswith(".toml"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no config: a config's name ends in .toml. A run is continued with run "
            f"--resume {text}"
        )
    path, packaged = Path(text), Path(payload.__file__).parent / "configs" / text
    if not path.exists() and packaged.is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: no such file here. Did you mean {packaged}?")
    return path


def _add_inventory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inventory",
        metavar="stack[:NAME]|local|slurm|FILE",
        help="the cluster (default: the selected Pulumi stack if it is up, else this machine); "
        "slurm: the job that this command is in",
    )


def _add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="run id (default: the newest)")
    add_runs_dir(parser)


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main(sys.argv[1:], os.environ))
