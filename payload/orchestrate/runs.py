"""The runs folder: names, the newest run, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.errors import ConfigError, ExitCode, UsageError
from payload.hints import command
from payload.launch.ranks import load_ranks
from payload.orchestrate.mirror import read_mirrored
from payload.results import (
    LATEST,
    RankExit,
    RankProgress,
    RunPaths,
    RunState,
    RunStatus,
    read_json,
    read_metrics,
)
from payload.run_config import load_run_config
from payload.run_lock import is_supervised
from payload.untrusted import RUN_ID

# A supervisor takes its lock this soon after the plan was written.
_START_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank, as far as its files tell."""

    rank: int
    node: str
    step: int | None
    phase: str | None
    age_s: float | None
    """Since its last sign of life."""
    exit_code: int | None
    """None while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, as far as its files and its lock tell."""

    run_id: str
    status: RunStatus
    exit_class: str | None
    error: str | None
    note: str | None
    """What happened last, while it goes on."""
    failed_rank: int | None
    step: int
    steps: int
    """Planned."""
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    age_s: float | None
    """Since rank 0's last sign of life."""
    started_unix: float
    ranks: tuple[RankView, ...]


def check_new_id(run_id: str) -> None:
    """Refuse a name that could lead out of the runs folder or be lost in it. Raises ConfigError."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"--run-id {run_id!r}: use letters, digits, dots, dashes and underscores, a letter or "
            f"digit first, and not {LATEST!r}."
        )


def check_named_id(run_id: str) -> None:
    """Refuse what is no run's name, before it becomes part of a path. Raises UsageError."""
    if run_id != LATEST and not RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"run {run_id!r}: no run has such a name. See them with: "
            + command("orchestrate", "list")
        )


def create_run(runs_dir: Path, run_id: str) -> RunPaths:
    """Make a new, empty run folder. Raises ConfigError."""
    check_new_id(run_id)
    root = runs_dir / run_id
    try:
        root.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"run {run_id} exists in {runs_dir}. Continue it with --resume {run_id}, or choose "
            "another --run-id."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{root}: {error.strerror}. Name a folder you can write to with --runs-dir."
        ) from None
    return RunPaths(root)


def all_runs(runs_dir: Path) -> list[RunPaths]:
    """Every run, the newest first."""
    found = [(paths.plan.stat().st_mtime, paths.run_id, paths) for paths in _folders(runs_dir)]
    return [paths for _, _, paths in sorted(found, reverse=True)]


def find_run(runs_dir: Path, run_id: str | None) -> RunPaths:
    """Return the run of that name, or the newest. Raises UsageError.

    `latest` is the newest that has finished a step, where one has.
    """
    runs = all_runs(runs_dir)
    if run_id == LATEST and (runs_dir / LATEST).is_symlink():
        run_id = (runs_dir / LATEST).readlink().name
        run_id = run_id if any(paths.run_id == run_id for paths in runs) else None
    if run_id is None or run_id == LATEST:
        if not runs:
            raise UsageError(
                f"no run in {runs_dir}. Start one with {command('orchestrate', 'run')}, or name "
                "another folder with --runs-dir."
            )
        return runs[0]
    for paths in runs:
        if paths.run_id == run_id:
            return paths
    names = ", ".join(paths.run_id for paths in runs[:5]) or "none"
    raise UsageError(f"no run {run_id!r} in {runs_dir}. The newest there: {names}.")


def view_run(paths: RunPaths, *, now_unix: float) -> RunView:
    """Read everything about a run. Raises ConfigError."""
    state = read_json(RunState, paths.state)
    rows = read_metrics(paths.metrics)
    trained: dict[str, Any] = dict(next((row for row in reversed(rows) if "loss" in row), {}))
    evaluated = [row["val_loss"] for row in rows if "val_loss" in row]
    ranks = tuple(_view_ranks(paths, now_unix=now_unix))
    status, exit_class, error = _status(paths, state, now_unix=now_unix)
    return RunView(
        run_id=paths.run_id,
        status=status,
        exit_class=exit_class,
        error=error,
        note=state.note if state else None,
        failed_rank=state.failed_rank if state else None,
        step=trained.get("step", 0),
        steps=load_run_config(paths.config).train.steps,
        loss=trained.get("loss"),
        val_loss=evaluated[-1] if evaluated else None,
        tokens_per_s=trained.get("tokens_per_s"),
        age_s=ranks[0].age_s if ranks else None,
        started_unix=state.started_unix if state else paths.plan.stat().st_mtime,
        ranks=ranks,
    )


def running_here(runs_dir: Path) -> list[str]:
    """Ids of the runs that a living supervisor holds."""
    return [paths.run_id for paths in all_runs(runs_dir) if is_supervised(paths)]


def _folders(runs_dir: Path) -> Iterator[RunPaths]:
    if not runs_dir.is_dir():
        return
    for folder in runs_dir.iterdir():
        if not folder.is_symlink() and RunPaths(folder).plan.is_file():
            yield RunPaths(folder)


def _status(
    paths: RunPaths, state: RunState | None, *, now_unix: float
) -> tuple[RunStatus, str | None, str | None]:
    """Status, exit class and error; a run whose supervisor is gone without a word has failed."""
    if state is not None and state.status not in ("starting", "running"):
        return state.status, state.exit_class, state.error
    mirrored = read_mirrored(paths)
    if mirrored.alive if mirrored else is_supervised(paths):
        return (state.status if state else "starting"), None, None
    if mirrored is None and state is None and now_unix - paths.plan.stat().st_mtime < _START_S:
        return "starting", None, None
    return (
        "failed",
        ExitCode.RANK_LOST.label,
        "the supervisor is gone without a word (killed, or the machine restarted)"
        if state
        else f"the supervisor never began; see {paths.supervisor_log}",
    )


def _view_ranks(paths: RunPaths, *, now_unix: float) -> Iterator[RankView]:
    for rank in load_ranks(paths.ranks):
        progress = read_json(RankProgress, paths.rank_progress(rank.rank))
        ended = read_json(RankExit, paths.rank_exit(rank.rank))
        yield RankView(
            rank=rank.rank,
            node=rank.node,
            step=progress.step if progress else None,
            phase=progress.phase if progress else None,
            age_s=now_unix - progress.time_unix if progress else None,
            exit_code=ended.exit_code if ended else None,
        )
