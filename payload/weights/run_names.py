"""Finds the run for a model's name that is `latest` or a run id in the default folder of runs."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from payload.core.errors import TileforgeError
from payload.core.printable_text import shown
from payload.core.regular_files import can_see, home_path
from payload.core.user_cache import user_cache
from payload.core.validation.names import RUN_ID
from payload.core.validation.suggestion import did_you_mean, nearest
from payload.models.registry import preset_of_hub_name, presets
from payload.run_record.run_files import (
    DEFAULT_RUNS_DIR,
    LATEST,
    RunPaths,
    default_runs_dir,
    latest_folder,
)
from payload.run_record.suggested_run_commands import no_runs

_MADE_ID = re.compile(r".+-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}|quickstart-[0-9]{8}T[0-9]{6}Z-[0-9]+")
"""Pattern of the run ids that `new_run_id` and `make run CONFIG=...` make. Names of hub models do
not match."""

log = logging.getLogger(__name__)


def path_of_run(name: str, *, setting: str, error: type[TileforgeError]) -> str:
    """Return the path of the run with the id `name`; any other name is returned unchanged.

    A local path of that name takes precedence. A generated run id and `runs/NAME` never mean the
    hub. Any other name means a run only if its folder has a run's files; this is logged, because a
    cloned project could contain such a folder on purpose.

    Raises `error` for an unknown run, and for a run with the name of a known hub model. Raises
    UsageError if the default folder of runs is a link.
    """
    parent, _, given = name.rpartition("/")
    is_in_runs = parent == DEFAULT_RUNS_DIR
    run_id = given if is_in_runs else name
    if (run_id != LATEST and not RUN_ID.fullmatch(run_id)) or can_see(home_path(name)):
        return name
    typed, name = name, run_id
    place = Path(DEFAULT_RUNS_DIR, name)
    is_made = is_in_runs or _MADE_ID.fullmatch(name) is not None
    if name == LATEST or (can_see(place) if is_made else _has_run_files(place)):
        runs = default_runs_dir(option=setting, run=name)
        if name == LATEST:
            newest = latest_folder(runs)
            if newest is None:
                found = f"no run in {runs} has completed a step. Use a run id."
                raise error(f"{setting} = {typed}: {found if run_ids() else no_runs(runs)}")
            return str(newest)
        if preset_of_hub_name(name) is not None:
            raise error(
                f"{setting} = {shown(name)} is ambiguous: a run and a hub model. Use {place}, or "
                f"{name}@COMMIT."
            )
        if not is_made:
            _log_once(
                f"{setting} = {shown(name)}: using the run {place}, not the hub model of this name"
            )
        return str(place)
    if is_made:
        raise error(
            f"{setting} = {shown(typed)}: no run of this id in {DEFAULT_RUNS_DIR}."
            f"{did_you_mean(name, run_ids()) or ' tileforge list shows the runs.'}"
        )
    return name


def _has_run_files(folder: Path) -> bool:
    """Return True if `folder` is a run.

    A folder with checkpoints alone also counts, as for a resume.
    """
    paths = RunPaths(folder)
    return can_see(paths.config) or can_see(paths.plan) or paths.newest_checkpoint() is not None


@cache
def _log_once(text: str) -> None:
    """Log a warning once for each process, because a command resolves a name several times."""
    log.warning(text)


def places_without(name: str) -> str:
    """Return text that lists the places, other than the hub, in which a name was not found."""
    return "not a local folder" + ("" if "/" in name else f", not a run in {DEFAULT_RUNS_DIR}")


def near_names(name: str) -> str:
    """Return the hint "Did you mean ...?" for an unknown model, with a leading space, or "".

    Similar names are searched among runs, presets and the neighbours of a path.
    """
    # A run id begins with the run's name, but is too long to be similar to that name.
    begun = [each for each in run_ids() if each.startswith(f"{name}-")]
    if begun:
        return f" Did you mean {max(begun)}?"
    path, beside = home_path(name), dict[str, str]()
    with suppress(OSError):
        beside = {each.name: str(each) for each in path.parent.iterdir()}
    known = {each: each for each in (*run_ids(), *presets())} | beside
    near = nearest(path.name, [each for each in known if each != path.name], cutoff=0.7)
    return "" if near is None else f" Did you mean {known[near]}?"


def cached_copy(name: str) -> str:
    """Return a hint on the copy of a hub model that `make run` fetched, or "".

    The hint begins with a space.
    """
    stem = re.compile(re.escape(name.rpartition("/")[2].lower()) + "-[0-9]+")
    try:
        folders = [*(user_cache(os.environ) / "models").iterdir()]
    except (OSError, RuntimeError):
        return ""
    found = max((str(each) for each in folders if stem.fullmatch(each.name)), default=None)
    return "" if found is None else f" `make run` fetched a 4-bit copy: --model {found}."


def run_ids() -> list[str]:
    """Return the ids of the runs in the default folder."""
    try:
        found = [each.name for each in default_runs_dir().iterdir() if each.is_dir()]
    except (OSError, TileforgeError):
        return []
    return sorted(each for each in found if RUN_ID.fullmatch(each))
