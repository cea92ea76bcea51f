"""A shared folder whose server is silent is named, ends a run that waits for it, and comes back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ExitCode
from payload.run_record.run_files import RunState
from payload.supervise import shared_folders
from payload.supervise.shared_folders import (
    FolderWatch,
    describe,
    folders_of,
    network_mounts,
    short,
)
from tests.supervise.planned import plan_stand_in, state_of, supervise, wait_for, wait_for_steps
from tests.support.sshfs_mount import sshfs_mount, stopped
from tests.support.waiting import DEADLINE_S

MOUNTS = """\
/dev/vda / ext4 rw 0 0
10.60.0.10:/srv /srv/tileforge/shared nfs4 rw,hard 0 0
server:/a /mnt/two\\040words nfs rw 0 0
you@there: /mnt/far fuse.sshfs rw 0 0
/dev/vdb /srv/tileforge/shared/local xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/srv/tileforge/shared/data/owt", ["/srv/tileforge/shared"]),
        ("/mnt/two words/x", ["/mnt/two words"]),
        ("/mnt/far/../far/data", ["/mnt/far"]),
        ("/srv/tileforge/shared/local/data", []),
        ("/srv/tileforge/shared-not", []),
        ("/mnt", []),
    ],
)
def test_the_network_mount_of_a_folder_is_found_without_access_to_it(
    tmp_path: Path, path: str, found: list[str]
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS, encoding="ascii")
    assert network_mounts([path], mounts=tmp_path / "mounts") == found
    assert network_mounts([path], mounts=tmp_path / "none") == []


def test_data_first_weights_and_the_cluster_s_folder_are_watched() -> None:
    settings = ["data.dir=/mnt/data", "model.init=/mnt/weights"]
    config = parse_run_config("", overrides=settings, where="test")
    shared = "/srv/tileforge/shared"
    assert folders_of(config, work_dir="/srv/work") == [shared, "/mnt/data", "/mnt/weights"]
    config = parse_run_config("", overrides=["data.dir=data/owt"], where="test")
    assert folders_of(config, work_dir="/srv/work") == [shared, "/srv/work/data/owt"]
    config = parse_run_config("", overrides=["data.dir=gs://bucket/data"], where="test")
    cache = str(config.data.folder())
    assert cache.startswith(str(Path.home()))
    assert folders_of(config, work_dir="/srv/work") == [shared, cache]


@pytest.mark.processes
def test_a_watch_without_a_process_reports_nothing_and_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sshfs_mount(tmp_path) as (folder, _):
        monkeypatch.setattr(shared_folders, "_RESTART_S", 0.0)
        with monkeypatch.context() as without_python:
            without_python.setattr(sys, "executable", str(tmp_path / "no-python"))
            watch = FolderWatch([str(folder)], env=os.environ)
            assert watch.troubles() == {}
        wait_for(lambda: not watch.troubles() and bool(watch.processes()), "a process")
        watch.close()
        assert watch.processes() == []


def test_another_node_s_report_on_its_folders_is_one_short_line() -> None:
    words = describe("node-1", {short("/mnt/a\nb"): short("x\x1b[31m" * 999)})
    assert "\n" not in words and "\x1b" not in words and len(words) < 300


@pytest.mark.slow
@pytest.mark.ranks
def test_a_silent_shared_folder_is_named_and_the_run_continues_once_it_answers(
    tmp_path: Path,
) -> None:
    with sshfs_mount(tmp_path) as (folder, server):
        paths = plan_stand_in(
            tmp_path / "run",
            *("--steps", "100", "--reads", str(folder)),
            settings=(
                f"data.dir={folder}",
                # Above the time after which the folder is named.
                "limits.hang_timeout_s=15",
                "limits.max_restarts=1",
            ),
        )
        supervisor = supervise(paths, silent_s=5.0)
        wait_for_steps(paths)
        node = state_of(paths).node

        def state() -> RunState:
            return state_of(paths)

        with stopped(server):
            named = f"the shared folder {folder} on {node} has not answered for "
            wait_for(lambda: named in str(state().note), "the folder's name")
            assert "a program that reads this folder blocks" in str(state().note)
            # It is not started again before the folder answers.
            wait_for(lambda: state().events[-1].kind == "failure", "the end of the attempt")
            error = state().events[-1].text
            assert "no rank made progress for" in error and named in error, error
        assert supervisor.wait(2 * DEADLINE_S) == ExitCode.OK
    assert [event.kind for event in state().events] == ["start", "failure", "restart", "finished"]
    assert state().attempt == 2
