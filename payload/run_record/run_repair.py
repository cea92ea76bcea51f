"""CONTRACT: recovers a run with damaged files.

No damaged file of a run may keep a valid checkpoint from being resumed. A damaged record is rebuilt
from other records, and anything that blocks the path of a file is moved aside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from payload.config.run_config import (
    RunConfig,
    fixed_differences,
    load_run_config,
    parse_run_config,
)
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError, ExitCode
from payload.core.files import is_not_regular, move_aside
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import links_out
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build
from payload.formats.checkpoint_listing import (
    checkpoint_config,
    checkpoint_dtype,
    checkpoint_folders,
    newest_valid,
)
from payload.run_record.run_files import (
    RunPaths,
    RunState,
    Summary,
    last_record,
    require_own_folders,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The part of a record that contains the id of the run."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")


def known_summary(paths: RunPaths) -> Summary | None:
    """Return summary.json; None if it is absent, damaged or belongs to a different run."""
    summary = last_record(Summary, paths.summary)
    return summary if summary is not None and summary.run_id in _ids_of(paths) else None


def known_state(paths: RunPaths) -> RunState | None:
    """Return state.json, or a state rebuilt from summary.json; None if neither is readable."""
    state = last_record(RunState, paths.state)
    if state is not None and state.run_id in _ids_of(paths):
        return state
    summary = known_summary(paths)
    if summary is None:
        return None
    ended = summary.status not in ("starting", "running")
    return RunState(
        run_id=paths.run_id,
        status=summary.status,
        exit_class=summary.exit_class if ended else None,
        error=summary.error,
        started_unix=max(0.0, _changed_unix(paths.summary) - summary.wall_s),
        updated_unix=_changed_unix(paths.summary),
        attempt=summary.restarts + summary.resumes + 1,
        resumes=summary.resumes,
        spent_s=summary.wall_s,
        cost_usd=summary.cost_usd,
    )


def known_config(paths: RunPaths) -> RunConfig:
    """Return the settings of run.toml; if it is damaged, of the newest checkpoint, or the defaults.

    This is for commands that only show a run; a resume uses `config_to_resume`.
    """
    with suppress(ConfigError):
        return load_run_config(paths.config)
    newest = paths.newest_checkpoint()
    text = checkpoint_config(newest) if newest else None
    with suppress(ConfigError):
        return parse_run_config(text or "", where="checkpoint")
    return RunConfig()


def known_dtype(paths: RunPaths) -> Dtype | None:
    """Return the dtype of the newest checkpoint that records its dtype, or None.

    A resume with `precision.dtype = "auto"` keeps this dtype.
    """
    with suppress(OSError):
        folders = reversed(checkpoint_folders(paths.checkpoints))
        return next(filter(None, map(checkpoint_dtype, folders)), None)
    return None


def config_to_resume(paths: RunPaths, *, overrides: Sequence[str]) -> tuple[RunConfig, str | None]:
    """Return the settings with which to resume a run, and a message if run.toml is not used.

    If run.toml is damaged, or the run was trained with different settings, the settings of the
    newest valid checkpoint are used. Raises ConfigError if no checkpoint has settings.
    """
    problem = _problem_with_config(paths)
    if problem is None:
        return load_run_config(paths.config, overrides=overrides), None
    valid = newest_valid(paths.checkpoints)
    text = checkpoint_config(valid) if valid else None
    if valid is None or text is None:
        raise ConfigError(
            f"{problem} No valid checkpoint has the settings either. Pass the settings with "
            "--config FILE."
        )
    config = parse_run_config(text, overrides=overrides, where=str(valid))
    with suppress(ConfigError):
        # Training settings come from the checkpoint, paths of data and results from run.toml. A
        # run.toml that was truncated has only defaults and is ignored.
        if load_run_config(paths.config) != RunConfig():
            own = load_run_config(paths.config, overrides=overrides)
            config = replace(
                config,
                data=replace(config.data, dir=own.data.dir),
                storage=own.storage,
                slurm=own.slurm,
                track=own.track,
                limits=own.limits,
            )
    return config, f"{problem} Using the settings of checkpoint {valid.name}."


def _problem_with_config(paths: RunPaths) -> str | None:
    try:
        config = load_run_config(paths.config)
    except ConfigError as error:
        return str(error)
    newest = paths.newest_checkpoint()
    text = checkpoint_config(newest) if newest else None
    with suppress(ConfigError):
        if text is not None:
            trained = parse_run_config(text, where=str(newest))
            for name, old, new in fixed_differences(trained, config):
                return f"{paths.config}: {name} = {new!r}, but the run was trained with {old!r}."
    return None


def has_own_record(paths: RunPaths) -> bool:
    """Return True if a record in the folder has this run's id: the folder is then a run folder."""
    records = (paths.plan, paths.state, paths.summary)
    return any(_id_in(record) == paths.run_id for record in records)


def move_blockers_aside(paths: RunPaths) -> list[str]:
    """Move aside anything that blocks the path of a file or folder that the run will write.

    Symlinks to files outside of the run folder are also moved. Returns a message for each moved
    path. Raises OSError, and ConfigError for a symlink to an outside folder: moving that symlink
    could hide checkpoints.
    """
    require_own_folders(paths)
    odd = [path for path in _folders(paths) if os.path.lexists(path) and not path.is_dir()]
    odd += [path for path in _replaced_files(paths) if is_not_regular(path)]
    odd += [path for path in _open_files(paths) if path.is_symlink() or is_not_regular(path)]
    # A damaged checkpoint is skipped, and the trackers check their own folders.
    kept = (paths.checkpoints, paths.track)
    out = [each for each in links_out(paths.root) if not any(map(each.is_relative_to, kept))]
    odd += [path for path in out if path not in odd]
    return [
        f"{path} blocked a file or folder of the run, and was moved to {move_aside(path)}"
        for path in odd
    ]


def main(argv: Sequence[str]) -> int:
    """Run `move_blockers_aside` on a node that will receive a run's files; print the messages."""
    try:
        moved = move_blockers_aside(RunPaths(Path(argv[0])))
    except OSError as error:
        sys.stderr.write(f"{error.filename or argv[0]}: {error.strerror}\n")
        return ExitCode.PREFLIGHT
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.writelines(f"{sentence}\n" for sentence in moved)
    return ExitCode.OK


def _ids_of(paths: RunPaths) -> set[str]:
    """Return the valid ids of the run: the folder's name, and the id in plan.json.

    The two ids differ if the folder was renamed.
    """
    planned = _id_in(paths.plan)
    return {paths.run_id} if planned is None else {paths.run_id, planned}


def _id_in(record: Path) -> str | None:
    try:
        return build(_Named, parse_json(read_bytes(record), where=""), where="").run_id
    except (OSError, ConfigError):
        return None


def _folders(paths: RunPaths) -> Iterator[Path]:
    yield paths.checkpoints
    yield paths.logs
    yield paths.rank_progress(0).parent
    yield paths.rank_exit(0).parent


def _replaced_files(paths: RunPaths) -> Iterator[Path]:
    yield from (paths.config, paths.identity, paths.inventory, paths.plan, paths.hosts, paths.ranks)
    yield from (paths.state, paths.stop_request, paths.metrics, paths.summary)
    yield paths.manifest_hashes
    yield from paths.root.glob("accelerate_node_*.yaml")
    for folder in (paths.rank_progress(0).parent, paths.rank_exit(0).parent):
        if folder.is_dir():
            yield from folder.glob("*.json")


def _open_files(paths: RunPaths) -> Iterator[Path]:
    yield paths.lock
    if paths.logs.is_dir():
        yield from paths.logs.glob("*.log")


def _changed_unix(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
