"""CONTRACT: what can still be known of a run whose files are damaged, and room for new ones.

Nothing that a run wrote may, when damaged, stop the resume of a sound checkpoint: a record is
rebuilt from the others, and what lies in a file's place is set aside.
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
from payload.core.files import is_odd_file, set_aside
from payload.core.links import links_out
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import RUN_ID
from payload.core.validation.records import build
from payload.formats.checkpoint_listing import (
    checkpoint_config,
    checkpoint_dtype,
    checkpoint_folders,
    newest_sound,
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
    """The part of a record that says whose it is."""

    run_id: str = checked(pattern=RUN_ID, wanted="a run id")


def known_summary(paths: RunPaths) -> Summary | None:
    """Return summary.json; None when it is absent, damaged or another run's."""
    summary = last_record(Summary, paths.summary)
    return summary if summary is not None and summary.run_id in _ids_of(paths) else None


def known_state(paths: RunPaths) -> RunState | None:
    """Return state.json, or what summary.json still tells of it; None where neither is readable."""
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
    """Return run.toml, else what the newest checkpoint was trained by, else the defaults.

    For whoever reads a run; a resume asks `resumable_config`.
    """
    with suppress(ConfigError):
        return load_run_config(paths.config)
    newest = paths.newest_checkpoint()
    text = checkpoint_config(newest) if newest else None
    with suppress(ConfigError):
        return parse_run_config(text or "", where="checkpoint")
    return RunConfig()


def known_dtype(paths: RunPaths) -> Dtype | None:
    """Return the dtype of the newest checkpoint that says it; None where none here can be read.

    A resume with `precision.dtype = "auto"` keeps it.
    """
    with suppress(OSError):
        folders = reversed(checkpoint_folders(paths.checkpoints))
        return next(filter(None, map(checkpoint_dtype, folders)), None)
    return None


def config_to_resume(paths: RunPaths, *, overrides: Sequence[str]) -> tuple[RunConfig, str | None]:
    """Return the settings to resume a run with, and a sentence where they are not run.toml's.

    A run.toml that is damaged, or is not the one that the run was trained by, gives way to the
    newest sound checkpoint's. Raises ConfigError where there is neither.
    """
    problem = _problem_with_config(paths)
    if problem is None:
        return load_run_config(paths.config, overrides=overrides), None
    sound = newest_sound(paths.checkpoints)
    text = checkpoint_config(sound) if sound else None
    if sound is None or text is None:
        raise ConfigError(
            f"{problem} There is no sound checkpoint with its settings either; name them with "
            "--config FILE."
        )
    config = parse_run_config(text, overrides=overrides, where=str(sound))
    with suppress(ConfigError):
        # A checkpoint says how the run was trained, and not where anything is or goes. A file that
        # was emptied says nothing at all.
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
    return config, f"{problem} The settings are those of checkpoint {sound.name}."


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
    """Tell whether a record in the folder is this run's by its id: no other program's would be."""
    records = (paths.plan, paths.state, paths.summary)
    return any(_id_in(record) == paths.run_id for record in records)


def make_room(paths: RunPaths) -> list[str]:
    """Set aside whatever lies where the run is going to write a file or a folder.

    So too a link to a file that leads out of the run's folder. Returns a sentence for each. Raises
    OSError, and ConfigError for such a link to a folder: were it set aside, its checkpoints would
    be missing.
    """
    require_own_folders(paths)
    odd = [path for path in _folders(paths) if os.path.lexists(path) and not path.is_dir()]
    odd += [path for path in _replaced_files(paths) if is_odd_file(path)]
    odd += [path for path in _open_files(paths) if path.is_symlink() or is_odd_file(path)]
    # A damaged checkpoint is passed over, and the trackers refuse theirs.
    kept = (paths.checkpoints, paths.track)
    out = [each for each in links_out(paths.root) if not any(map(each.is_relative_to, kept))]
    odd += [path for path in out if path not in odd]
    return [f"{path} was no file or folder of a run; it is now {set_aside(path)}" for path in odd]


def main(argv: Sequence[str]) -> int:
    """Make room in a run folder, as before a node gets the run's files; print what was moved."""
    try:
        moved = make_room(RunPaths(Path(argv[0])))
    except OSError as error:
        sys.stderr.write(f"{error.filename or argv[0]}: {error.strerror}\n")
        return ExitCode.PREFLIGHT
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.writelines(f"{sentence}\n" for sentence in moved)
    return ExitCode.OK


def _ids_of(paths: RunPaths) -> set[str]:
    """Return the run's ids: its folder may have been renamed after the run."""
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
