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
        "a Pulumi stack, this machine (local), the nodes of the current Slurm job, or an "
        "inventory FILE (default: the selected stack if it is up, otherwise local)",
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
        "id of the new run (default: the run's name, the time and four digits)", metavar="ID"
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
        "print only a comparison of the parallel strategies by memory and predicted step time"
    )
    export: str | None = option(
        "write a job file for this engine (see docs/guides/exports.md)",
        choices=_engines,
        group=_EXPORT,
    )
    out: Path | None = option(
        "path of the job file (default: stdout)", metavar="FILE", group=_EXPORT
    )
    image: str | None = option(
        "container image that contains Tileforge", metavar="NAME", group=_EXPORT
    )
    nodes: int | None = option(
        "plan for N copies of the inventory's first node", metavar="N", group=_MACHINES
    )
    machine_type: str | None = option(
        "plan for Google Cloud machines of this type",
        metavar="TYPE",
        group=_MACHINES,
    )
    site: str | None = option(
        "plan a Slurm job: slurm.nodes nodes like this machine",
        choices=_sites,
        group=_MACHINES,
    )
    storage: str | None = option(
        "volume, bucket or folder for data and runs of the job",
        metavar="NAME",
        group=_EXPORT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions(ConfigOptions):
    """Options of `preflight`."""

    ssh_key: Path | None = ssh_key_option()
    quick: bool = option("skip mpirun and all measurements")
    wait: float = option(
        "retry for this long while machines boot (default: check only once)",
        default=0.0,
        metavar="MINUTES",
    )
    json: bool = option("print the results as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(NewRunOptions):
    """Options of `run`."""

    site: str | None = option(
        "submit the run as a Slurm job from a login node, instead of starting it on the "
        "inventory's machines",
        choices=_sites,
        group=_MACHINES,
    )
    ssh_key: Path | None = ssh_key_option()
    resume: str | None = option(
        "continue a stopped or failed run. RUN is its id, or its address in a store such as "
        "gs://BUCKET/PREFIX/RUN",
        metavar="RUN",
    )
    quick: bool = option("do not test mpirun and the network on new nodes", advanced=True)
    detach: bool = option("return when the run has started; the run outlives this terminal")
    grace: float = option(
        "maximum time to save a checkpoint after a stop request (default: %(default)g)",
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        advanced=True,
    )
    json: bool = option("print summary.json at the end", advanced=True)
    open: bool = option("show the report in the browser at the end")
    next: bool = option(SUPPRESS)  # payload.finetune sets this
    """If set, a finished run prints the commands that use its model."""
    yes: bool = option("start a run of over a day without confirmation")
    profile: int | None = option(
        "trace this training step and print its operators, slowest first. The traced rank is "
        "train.profile_rank, by default rank 0",
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
        "time to save a checkpoint before the ranks are killed (default: the --grace value of "
        "the command that started the run). A save in progress gets more time",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions:
    """Options of `remove`."""

    runs: Sequence[str] = option("ids of the runs to remove", metavar="RUN", positional=True)
    keep: int | None = option(
        "keep the newest N finished runs, and remove all other inactive runs", metavar="N"
    )
    dry_run: bool = option("print the runs that would be removed, with their sizes")
    yes: bool = option("do not prompt for confirmation")
    now: bool = option(
        "delete the runs immediately instead of moving them to the trash. Without RUN and "
        "--keep, this option empties the trash"
    )
    restore: str | None = option("move this run back from the trash", metavar="RUN")
    force: bool = option(
        "also remove runs that are not collected, and runs with weights that another run's "
        "adapter needs"
    )
    runs_dir: Path = runs_dir_option()
