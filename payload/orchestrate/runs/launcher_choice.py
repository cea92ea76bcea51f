"""Resolves `launch.launcher` to a launcher on the machines of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError, PreflightError
from payload.launch.launcher import Launcher
from payload.launch.launchers.registry import AUTO, candidates
from payload.orchestrate.runs.machine_profile import MachineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherChoice:
    """The launcher of a run."""

    launcher: Launcher
    executable: str
    """Path of the launcher's executable on the head."""
    refused: Sequence[tuple[str, PreflightError]] = ()
    """Launchers that `auto` would prefer but cannot use, each with the reason."""

    def notes(self) -> list[str]:
        """Return a note for each preferred launcher that cannot be used."""
        chosen = self.launcher.name
        return [
            f"launcher: {chosen} instead of {name}, because {error}" for name, error in self.refused
        ]


def choose_launcher(setting: str, profile: MachineProfile) -> LauncherChoice:
    """Return the launcher that `launch.launcher` resolves to on these machines.

    Raises ConfigError for an unknown launcher, and PreflightError if none can be used.
    """
    refused: list[tuple[str, PreflightError]] = []
    setting = profile.launcher if setting == AUTO else setting
    for launcher in candidates(setting):
        try:
            executable = profile.executable(launcher)
        except PreflightError as error:
            refused.append((launcher.name, error))
            continue
        return LauncherChoice(launcher=launcher, executable=executable, refused=refused)
    raise refused[-1][1]


def require_fit_for_job(config: RunConfig) -> None:
    """Raise ConfigError for settings that would fail in any Slurm job of `slurm.nodes` nodes."""
    nodes, ranks = config.slurm.nodes, config.launch.ranks_per_node
    require_launcher_of_jobs(config, nodes=nodes)
    if ranks is not None:
        config.require_even(nodes * ranks)


def require_launcher_of_jobs(config: RunConfig, *, nodes: int) -> None:
    """Raise ConfigError for a launcher that cannot start ranks in a Slurm job of `nodes` nodes."""
    if config.launch.launcher == AUTO or nodes == 1:
        return
    launcher = candidates(config.launch.launcher)[0]
    if launcher.needs_ssh:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} reaches other nodes by SSH with the run's key, "
            f"which the {nodes} nodes of a Slurm job do not have. Use 'auto', 'srun' or 'torchrun'."
        )
