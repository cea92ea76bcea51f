"""CONTRACT IN: [slurm] of run.toml, and what sbatch would not take of it."""

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
"""Those of sbatch (https://slurm.schedmd.com/sbatch.html) that would change what a run needs."""
_OWN_LETTERS = frozenset("AaDehJMNnopqtVW")
_LETTERS_WITHOUT_VALUE = frozenset("HkOQsuv")
"""More letters may follow such a one in the same word."""
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """[slurm]; the job that `run --site slurm` submits"""

    nodes: int = checked(1, low=1, high=4096)
    partition: str | None = None
    """none = the cluster's default; so too the three below."""
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Such as `"12:00:00"`, `"2-00"` (days-hours) or `"90"` (minutes). The run saves a checkpoint
    and stops before it is over."""
    cpus_per_node: int | None = checked(None, low=1, high=16_384)
    """none = whole nodes, which no other job shares."""
    extra: str = ""
    """More of sbatch's options, as on its command line: `"--constraint=amx --mail-type=END"`."""

    def problems(self) -> list[str]:
        """Say what sbatch would not take, or would take for something else."""
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
            words = shlex.split(self.extra)
        except ValueError as error:
            return [*found, f"slurm.extra = {shown(self.extra)}: {error}. Close every quote."]
        loose = [word for word in words if not word.startswith("-")]
        if loose:
            found.append(
                f"slurm.extra: {shown(loose[0])} is no option. Write each as --option=value, in "
                "one word."
            )
        ours = [word for word in words if _is_own_option(word)]
        if ours:
            found.append(
                f"slurm.extra: {shown(ours[0])} is the run's own to say. Use the settings of "
                "[slurm] for it, or leave it out."
            )
        return found


def _is_own_option(word: str) -> bool:
    """Tell whether sbatch would read a word as an option of ours, by any way to write it."""
    if word.startswith("--"):
        # Any beginning that is no other option's stands for the whole name. `--no` and the like
        # are ambiguous, and refused by sbatch as well.
        name = word[2:].partition("=")[0]
        return any(own.startswith(name) for own in _OWN_OPTIONS)
    for letter in word[1:]:
        if letter in _OWN_LETTERS:
            return True
        if letter not in _LETTERS_WITHOUT_VALUE:
            return False
    return False
