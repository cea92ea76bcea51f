"""CONTRACT IN: [slurm] of run.toml, and the values that sbatch would reject."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from payload.core.printable_text import shown
from payload.core.validation.fields import checked

_SLURM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+=-]{0,127}")
_OWN_OPTIONS = (
    *("account", "array", "chdir", "cluster", "clusters", "error", "export", "export-file", "help"),
    *("job-name", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node"),
    *(
        "ntasks-per-socket",
        "ntasks-per-tres",
        "open-mode",
        "output",
        "parsable",
        "partition",
        "qos",
        "test-only",
    ),
    *("time", "usage", "version", "wait", "workdir", "wrap"),
)
"""Options of sbatch that the run sets itself. Source: https://slurm.schedmd.com/sbatch.html"""
_OWN_LETTERS = frozenset("AaDehJMNnopqtVW")
_LETTERS_WITHOUT_VALUE = frozenset("HkOQsuv")
"""One-letter options of sbatch that take no value; more letters can follow in one argument."""
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """[slurm]; the job that `run --site slurm` submits; docs/guides/slurm.md"""

    nodes: int = checked(1, low=1, high=4096, unit="nodes")
    """Number of nodes of the job."""
    partition: str | None = None
    """Partition of the job; none = the cluster's default."""
    account: str | None = None
    """Account that pays for the job; none = the cluster's default."""
    qos: str | None = None
    """Quality of service of the job; none = the cluster's default."""
    time: str | None = None
    """Time limit of the job, such as `"12:00:00"`, `"2-00"` (days-hours) or `"90"` (minutes). The
    run saves a checkpoint and stops before this limit. none = the cluster's default."""
    cpus_per_node: int | None = checked(None, low=1, high=16_384, unit="CPUs")
    """Number of CPUs to reserve on each node; none = whole nodes, not shared with other jobs."""
    extra: str = ""
    """Additional options for sbatch, written as on the command line of sbatch, such as
    `"--constraint=amx --mail-type=END"`."""

    def job_options(self) -> list[str]:
        """Return the options of sbatch for partition, account, QOS, time limit and `extra`."""
        keys = ("partition", "account", "qos", "time")
        given = [(key, getattr(self, key)) for key in keys]
        named = [f"--{key}={value}" for key, value in given if value is not None]
        return [*named, *shlex.split(self.extra)]

    def problems(self) -> list[str]:
        """Return a sentence for each value that sbatch would reject or misread."""
        found = []
        for key in ("partition", "account", "qos"):
            value = getattr(self, key)
            if value is not None and not _SLURM_NAME.fullmatch(value):
                found.append(
                    f"slurm.{key} = {shown(value)}: use a name of letters, digits and . _ - , = +."
                )
        if self.time is not None and not _SLURM_TIME.fullmatch(self.time):
            found.append(
                f"slurm.time = {shown(self.time)}: write minutes, HH:MM:SS, DAYS-HOURS or "
                "DAYS-HH:MM:SS, as in '12:00:00'."
            )
        try:
            arguments = shlex.split(self.extra)
        except ValueError as error:
            return [*found, f"slurm.extra = {shown(self.extra)}: {error}. Close every quote."]
        loose = [each for each in arguments if not each.startswith("-")]
        if loose:
            found.append(
                f"slurm.extra: {shown(loose[0])} is not an option. Write each option as "
                "--option=value."
            )
        ours = [each for each in arguments if _is_own_option(each)]
        if ours:
            found.append(
                f"slurm.extra: {shown(ours[0])} is an option that the run sets. Use the settings "
                "of [slurm], or leave the option out."
            )
        return found


def _is_own_option(argument: str) -> bool:
    """Return True if sbatch would read the argument as an option that the run sets, in any form."""
    if argument.startswith("--"):
        # sbatch accepts any unambiguous prefix of an option. It rejects ambiguous prefixes such as
        # `--no`.
        name = argument[2:].partition("=")[0]
        return any(own.startswith(name) for own in _OWN_OPTIONS)
    for letter in argument[1:]:
        if letter in _OWN_LETTERS:
            return True
        if letter not in _LETTERS_WITHOUT_VALUE:
            return False
    return False
