"""Reads a run folder for its report, ignoring missing and damaged files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from payload.config.run_config import RunConfig
from payload.config.store_address import is_bucket_address
from payload.core.errors import ConfigError, DataError, UsageError
from payload.core.printable_text import PLAIN_TEXT, shown
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build
from payload.formats.data_folder import META_NAME, DataMeta
from payload.machines.inventory import ClusterInventory
from payload.run_record.approved_settings import unapproved_settings
from payload.run_record.metrics_log import RankTimes, rank_times, read_metrics
from payload.run_record.profile_table import PROFILE_TABLE, ProfileTable, read_table
from payload.run_record.run_files import (
    DEFAULT_RUNS_DIR,
    LATEST,
    RunPaths,
    default_runs_dir,
    latest_folder,
)
from payload.run_record.run_repair import known_config, known_state, known_summary
from payload.run_record.run_samples import Sample, read_samples
from payload.run_record.store_state import StoreState
from payload.run_record.suggested_run_commands import no_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The part of the estimates in plan.json that a report uses."""

    params: int = checked(low=0)
    flops_per_step: int = checked(low=0)
    tokens_per_step: int = checked(low=1)
    grad_accum_steps: int = checked(low=1)
    memory_bytes_per_rank: int = checked(low=0)
    step_s: float | None = checked(None, low=0)
    """Predicted seconds per step; None if the peak FLOP/s were not measured before the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The part of plan.json that a report shows; `LaunchPlan` is the full record."""

    launcher: str
    argv: tuple[str, ...]
    work_dir: str = checked(pattern=PLAIN_TEXT, wanted="a path without control characters")
    world_size: int = checked(low=1)
    nodes: int = checked(low=1)
    arithmetic: Arithmetic
    notes: tuple[str, ...] = ()


class Run:
    """One run folder; each file is read once, on first use."""

    def __init__(self, paths: RunPaths, *, is_started_here: bool = False) -> None:
        """With `is_started_here`, which the supervisor sets, the data folder counts as approved."""
        self.paths = paths
        self._is_started_here = is_started_here
        self.run_id = paths.run_id

    @cached_property
    def config(self) -> RunConfig:
        """Return the settings of run.toml; if run.toml is damaged, the settings of a checkpoint."""
        return known_config(self.paths)

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the valid rows of metrics.jsonl."""
        return read_metrics(self.paths.metrics)

    @cached_property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of training steps."""
        return [row for row in self.rows if "loss" in row]

    @cached_property
    def timed_steps(self) -> Sequence[tuple[int, RankTimes]]:
        """Return the step number and the ranks' times of each row with valid times."""
        return [(row["step"], times) for row in self.steps if (times := rank_times(row))]

    @cached_property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of evaluations."""
        return [row for row in self.rows if "val_loss" in row]

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Return the values of summary.json; empty without a valid file."""
        found = known_summary(self.paths)
        return {} if found is None else {f.name: getattr(found, f.name) for f in fields(found)}

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """Return the values of state.json; empty without a valid file."""
        found = known_state(self.paths)
        return {} if found is None else {f.name: getattr(found, f.name) for f in fields(found)}

    @cached_property
    def plan(self) -> Plan | None:
        """Return plan.json; None without a valid file."""
        with suppress(OSError, ConfigError):
            where = str(self.paths.plan)
            return build(Plan, parse_json(read_bytes(self.paths.plan), where=where), where=where)
        return None

    @cached_property
    def inventory(self) -> ClusterInventory | None:
        """Return the inventory of nodes; None without a valid file."""
        with suppress(ConfigError):
            return ClusterInventory.load(self.paths.inventory)
        return None

    @cached_property
    def data_folder(self) -> Path:
        """Return the data folder; a relative path refers to the working folder of the ranks."""
        work_dir = Path(self.plan.work_dir) if self.plan else Path()
        return work_dir / self.config.data.folder()

    @cached_property
    def data(self) -> DataMeta | None:
        """Return meta.json of the data folder; None if the file is not on this machine.

        Also returns None if this user has not approved the folder, because pages may be shared.
        """
        path, named = self.data_folder / META_NAME, self.config.data.dir
        place = named if is_bucket_address(named) else str(self.data_folder)
        if not self._is_started_here and unapproved_settings(self.paths, {"data.dir": place}):
            return None
        with suppress(OSError, ConfigError, DataError, ValueError):
            raw = parse_json(read_bytes(path), where=str(path), error=DataError)
            return build(DataMeta, raw, where=str(path), error=DataError)
        return None

    @cached_property
    def samples(self) -> Sequence[Sample]:
        """Return texts that the model generated before and after the run."""
        return read_samples(self.paths.samples)

    @cached_property
    def profile(self) -> ProfileTable | None:
        """Return the operator times of the profiled step; None without a profile."""
        return read_table(self.paths.profile / PROFILE_TABLE)

    @property
    def status(self) -> str:
        """Return the run's status from state.json, or from summary.json."""
        found = self.state.get("status") or self.summary.get("status")
        return str(found or "unknown")

    def has_checkpoint(self) -> bool:
        """Return True if a checkpoint is in the run folder or in the run's store."""
        store: StoreState | None = self.state.get("store")
        return self.paths.newest_checkpoint() is not None or bool(store and store.checkpoint)

    @property
    def error(self) -> str | None:
        """Return the error message of a run that failed or was stopped."""
        return self.state.get("error") or self.summary.get("error")


def find_run(name: str, *, runs_dir: Path | None = None, is_started_here: bool = False) -> Run:
    """Return the run that `name` selects: an id, `latest`, or a folder. Raises UsageError."""
    if name == LATEST:
        # The default of the command: no person has named the target of this link.
        found = (latest_folder(runs_dir or default_runs_dir()), latest_folder(Path()))
        folders = [folder for folder in found if folder is not None]
    elif RUN_ID.fullmatch(name):
        folders = [(runs_dir or default_runs_dir()) / name, Path(name)]
    else:
        folders = [Path(name)]
    for folder in folders:
        with suppress(OSError, ValueError, RuntimeError):
            paths = RunPaths(folder.resolve())
            if any(each.is_file() for each in (paths.plan, paths.summary, paths.metrics)):
                return Run(paths, is_started_here=is_started_here)
    place = runs_dir or Path(DEFAULT_RUNS_DIR)
    if Path(name).name == LATEST and not any(place.glob("*/*.json")):
        raise UsageError(no_runs(place))
    raise UsageError(
        f"no run {shown(name)}: neither a run's id in {place} nor a run's "
        "folder. List all runs with: " + command("orchestrate", "list")
    )
