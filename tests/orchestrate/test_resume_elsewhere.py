"""A run that has a store is resumed in another place, but not while it goes on anywhere."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from payload.errors import ConfigError, UsageError
from payload.inventory import Access, ClusterInventory
from payload.orchestrate.run.console import text_console
from payload.orchestrate.run.mirror import mirror_file, note_seen
from payload.orchestrate.sites.choose import Chosen
from payload.orchestrate.sites.local import Local, LocalAccess
from payload.orchestrate.sites.ssh import Ssh
from payload.results import RunPaths
from payload.run_lock import RunLock, starting
from tests.launch.inventories import make_inventory
from tests.supervise.planned import plan_stand_in


def cluster(name: str) -> ClusterInventory:
    return replace(make_inventory(num_nodes=2), cluster=name, access=Access(kind="direct"))


def make_run(tmp_path: Path, *, store: bool = True) -> RunPaths:
    results = tmp_path / "results" if store else "none"
    return plan_stand_in(tmp_path / "runs" / "one", settings=[f"storage.results={results}"])


def make_copy(paths: RunPaths, *, alive: bool) -> None:
    """Let a run be one of cluster `first`, as when it was last reached."""
    paths.inventory.write_text(cluster("first").to_json(), encoding="utf-8")
    note_seen(paths, alive=alive, ssh_key=Path("/key"))


def hold(paths: RunPaths, *, name: str | None) -> None:
    """Ask for the run at cluster `name`, or at this machine."""
    talk = text_console(stderr=True)
    with ExitStack() as held:
        if name is None:
            access = LocalAccess(os.environ)
            here = Chosen(inventory=make_inventory(), why="test", domains={})
            Local(here, access).hold_to_resume(paths, os.environ, held, talk)
        else:
            chosen = Chosen(inventory=cluster(name), why="test", domains={})
            site = Ssh(chosen, env=os.environ, talk=talk)
            site.hold_to_resume(paths, os.environ, held, talk)


def test_a_run_that_goes_on_here_is_not_resumed_on_a_cluster(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    with RunLock(paths), pytest.raises(ConfigError, match="run one is running"):
        hold(paths, name="first")
    with starting(paths), pytest.raises(UsageError, match="just being started"):
        hold(paths, name="first")
    hold(paths, name="first")


def test_a_run_that_goes_on_on_a_cluster_is_resumed_nowhere_else(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    make_copy(paths, alive=True)
    for name in ("second", None):
        with pytest.raises(ConfigError, match=r"went on on its cluster when .* remove .*mirror"):
            hold(paths, name=name)
    hold(paths, name="first")  # whose head knows
    mirror_file(paths).unlink()
    for name in ("second", None):
        hold(paths, name=name)


def test_a_run_of_a_cluster_that_has_ended_goes_on_anywhere_if_it_has_a_store(
    tmp_path: Path,
) -> None:
    paths = make_run(tmp_path)
    make_copy(paths, alive=False)
    for name in ("first", "second", None):
        hold(paths, name=name)


def test_without_a_store_a_run_stays_where_it_was(tmp_path: Path) -> None:
    paths = make_run(tmp_path, store=False)
    make_copy(paths, alive=False)
    hold(paths, name="first")
    with pytest.raises(ConfigError, match="its checkpoints are not on second"):
        hold(paths, name="second")
    with pytest.raises(ConfigError, match="this is its copy"):
        hold(paths, name=None)
