"""Options of the commands about runs, from which parsers, help and completion are made."""

from __future__ import annotations

import os
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import payload
from payload.core.command_line import option
from payload.core.validation.suggestion import nearest
from payload.run_record.run_files import DEFAULT_GRACE_S

_SETTINGS, _MACHINES, _EXPORT = "settings", "machines", "export the run to another engine"


def toml_file(text: str) -> Path:
    """Return the path of a config file. Raises ArgumentTypeError."""
    path = Path(text)
    similar = None if path.is_file() and path.suffix == ".toml" else _similar_config(path)
    if similar is not None:
        raise ArgumentTypeError(f"{text!r}: file not found. Did you mean {similar}?")
    if path.suffix != ".toml":
        raise ArgumentTypeError(
            f"{text!r} is not a config: its name must end in .toml. To continue a run: run "
            f"--resume {text}"
        )
    return path


def shipped_configs() -> Path:
    """Return the folder of the configs that come with the package."""
    return Path(os.path.relpath(Path(payload.__file__).parent / "configs"))


def _similar_config(path: Path) -> Path | None:
    """Return an existing config with the same or a similar name, or None.

    A config in the same folder is preferred to one that comes with the package.
    """
    for folder in (path.parent, shipped_configs()):
        known = {each.stem: each for each in sorted(folder.glob("*.toml"))}
        near = nearest(path.name.removesuffix(".toml"), known)
        if near is not None:
            return known[near]
    return None


def _sites() -> Collection[str]:
    from payload.orchestrate.sites.registry import site_names

    return site_names()


def _engines() -> Collection[str]:
    from payload.launch.exports.registry import ENGINES

    return tuple(ENGINES)


def runs_dir_option() -> Path:
    """Return the option for the folder of all runs; the command line resolves the path."""
    folder: Path = option("folder of all runs (default: runs)", metavar="DIR", parse=str)
    return folder


def inventory_option() -> str | None:
    """Return the option for the cluster."""
    source: str | None = option(
        "cluster (default: the selected Pulumi stack if it is up, otherwise this machine); slurm: "
        "the nodes of the current Slurm job",
        metavar="stack[:NAME]|local|slurm|FILE",
        group=_MACHINES,
    )
    return source


def ssh_key_option() -> Path | None:
    """Return the option for the private SSH key."""
    key: Path | None = option(
        "private SSH key for the nodes (default: .cluster/CLUSTER/id_ed25519)",
        metavar="FILE",
        advanced=True,
    )
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """Selects the run that a command reads or changes; `collect` has no other options."""

    run: str | None = option("run id (default: the newest run)", metavar="RUN", positional=True)
    runs_dir: Path = runs_dir_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRunChoice(RunChoice):
    """Selects a run in the folder of runs, or on the cluster of an inventory."""

    inventory: str | None = inventory_option()
    ssh_key: Path | None = ssh_key_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """The inventory and the settings of a run, as `plan`, `run` and `preflight` accept them."""

    inventory: str | None = inventory_option()
    config_file: Path | None = option(
        "same as --config",
        default=None,
        metavar="FILE.toml",
        positional=True,
        exclusive=True,
        parse=toml_file,
    )
    config: Path | None = option(
        "config of the run (default: built-in defaults)", metavar="FILE", exclusive=True
    )
    overrides: Sequence[str] = option(
        "override one setting; can be repeated", "--set", metavar="SECTION.KEY=VALUE"
    )

    @property
    def config_path(self) -> Path | None:
        """Return the path of the config file, which is given with or without `--config`."""
        return self.config_file or self.config


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunOptions(ConfigOptions):
    """Options of `plan` and `run`."""

    run_id: str | None = option(
        "id of the new run (default: name, time and four digits)", metavar="ID"
    )
    runs_dir: Path = runs_dir_option()
    samples: bool = option(SUPPRESS)  # payload.finetune sets this for small models
    """If set, the report shows text that the model generates before and after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(NewRunOptions):
    """Options of `plan`."""

    val_tokens: int | None = option(SUPPRESS)  # payload.finetune sets this
    """Expected number of validation tokens, for data that do not exist yet."""
    mean_tokens: float | None = option(SUPPRESS)  # payload.finetune sets this
    """Mean number of tokens in a text, for data that do not exist yet; None if all sequences are
    full."""
    json: bool = option("print the plan as JSON")
    strategies: bool = option(
        "only compare the parallel strategies by memory and predicted step time"
    )
    export: str | None = option(
        "write a job file for this engine (docs/guides/exports.md)", choices=_engines, group=_EXPORT
    )
    out: Path | None = option("job file (default: stdout)", metavar="FILE", group=_EXPORT)
    image: str | None = option(
        "container image that contains Tileforge", metavar="NAME", group=_EXPORT
    )
    nodes: int | None = option(
        "plan for N nodes like the first of the inventory", metavar="N", group=_MACHINES
    )
    machine_type: str | None = option(
        "plan for Google Cloud machines of this type",
        metavar="TYPE",
        group=_MACHINES,
    )
    site: str | None = option(
        "slurm: assume slurm.nodes nodes like this machine",
        choices=_sites,
        group=_MACHINES,
    )
    storage: str | None = option(
        "volume, bucket or folder for data and runs",
        metavar="NAME",
        group=_EXPORT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions(ConfigOptions):
    """Options of `preflight`."""

    ssh_key: Path | None = ssh_key_option()
    quick: bool = option("skip mpirun and all measurements")
    wait: float = option(
        "retry for this long while machines boot (default: check once)",
        default=0.0,
        metavar="MINUTES",
    )
    json: bool = option("print the results as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(NewRunOptions):
    """Options of `run`."""

    site: str | None = option(
        "where the run starts, instead of the inventory's machines; slurm: submit a job from a "
        "login node",
        choices=_sites,
        group=_MACHINES,
    )
    ssh_key: Path | None = ssh_key_option()
    resume: str | None = option(
        "continue a stopped or failed run: its id, or its address in a store, "
        "gs://BUCKET/PREFIX/RUN",
        metavar="RUN",
    )
    quick: bool = option("skip the test of mpirun and the network on new nodes", advanced=True)
    detach: bool = option("return when the run has started; the run outlives this terminal")
    grace: float = option(
        "time to save a checkpoint after a stop request (default: %(default)g)",
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        advanced=True,
    )
    json: bool = option("print summary.json at the end", advanced=True)
    open: bool = option("show the report in the browser at the end")
    next: bool = option(SUPPRESS)  # payload.finetune sets this
    """If set, a finished run prints the commands that use its model."""
    yes: bool = option("start without confirmation, even a run of over a day")
    profile: int | None = option(
        "trace this step on rank 0 (or on the rank in train.profile_rank), and print its "
        "operators, slowest first",
        metavar="STEP",
        advanced=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions(RunChoice):
    """Options of `status`."""

    json: bool = option("print the status as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsOptions(RunChoice):
    """Options of `logs`."""

    rank: int = option("rank whose log is printed (default: %(default)s)", default=0, metavar="N")
    launcher: bool = option("print the launcher's log instead")
    follow: bool = option("keep printing until the run ends", "-f", "--follow")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Options of `list`."""

    runs_dir: Path = runs_dir_option()
    json: bool = option("print the runs as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions(ClusterRunChoice):
    """Options of `attach`."""

    json: bool = option("print summary.json at the end")


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions(ClusterRunChoice):
    """Options of `dashboard`."""

    open: bool = option("show the dashboard in the browser")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions(ClusterRunChoice):
    """Options of `stop`."""

    force: bool = option("kill the ranks immediately, without a checkpoint")
    grace: float | None = option(
        "time to save a checkpoint before the ranks are killed; a save in progress gets more time "
        "(default: the --grace of run)",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions:
    """Options of `remove`."""

    runs: Sequence[str] = option("ids of the runs to remove", metavar="RUN", positional=True)
    keep: int | None = option(
        "remove all inactive runs except the newest N finished ones", metavar="N"
    )
    dry_run: bool = option("print the runs that would be removed, with their sizes")
    yes: bool = option("do not prompt for confirmation")
    now: bool = option(
        "delete immediately instead of moving to the trash; if neither RUN nor --keep is given, "
        "empty the trash"
    )
    restore: str | None = option("move this run back from the trash", metavar="RUN")
    force: bool = option(
        "also remove uncollected runs, and runs with weights that another run's adapter needs"
    )
    runs_dir: Path = runs_dir_option()
