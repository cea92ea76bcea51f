"""The end of a run that lost a machine, and of a run that was restarted in between."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode, NodesError
from payload.machines.rank_variables import RUN_DIR
from payload.orchestrate.runs import remote_run as there
from payload.orchestrate.runs.mirror import Mirrored, write_mirrored
from payload.orchestrate.runs.remote_run import RemoteRun, planned_run_dir
from payload.orchestrate.sites.ssh_run import collect_results, remote_run
from payload.orchestrate.terminal.console import text_console
from payload.run_record.run_files import RunPaths
from tests.orchestrate.cluster.conftest import STEPS, Trained
from tests.orchestrate.cluster.test_run import as_stack
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]

GONE, NOWHERE = "node-between", "127.0.0.9"
KEY_NAME = "far.0a1b2c3d"
LEFTOVER = "sleep 1000"
KEY = f"restrict ssh-ed25519 AAAA tileforge-run:{KEY_NAME}\n"


@pytest.fixture
def mirrored(trained: Trained) -> Mirrored:
    """Return the operator's records of the run while it was active."""
    return Mirrored(alive=True, seen_unix=1.0, ssh_key=str(trained.operator.nodes.key))


@pytest.fixture
def paths(trained: Trained, mirrored: Mirrored, tmp_path: Path) -> Iterator[RunPaths]:
    """Return a copy of the run with a third node, which is gone, between its two nodes."""
    operator = trained.operator
    copy, whole = operator.paths("far"), tmp_path / "far"
    shutil.move(copy.root, whole)
    shutil.copytree(whole, copy.root)
    head, worker = operator.nodes.inventory.nodes
    gone = replace(worker, name=GONE, address=NOWHERE, ssh_port=free_port(NOWHERE))
    inventory = replace(operator.nodes.inventory, nodes=(head, gone, worker))
    copy.inventory.write_text(inventory.to_json(), encoding="utf-8")
    write_mirrored(copy, mirrored)
    yield copy
    shutil.rmtree(copy.root)
    shutil.move(whole, copy.root)


@pytest.fixture
def run(
    paths: RunPaths, mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteRun]:
    monkeypatch.setattr(there, "_LEAVE_S", 0.0)
    with closing(remote_run(paths, mirrored, env=os.environ)) as run:
        yield run


def start_leftover(trained: Trained, paths: RunPaths) -> None:
    """A process of the run on the last node."""
    nodes = trained.operator.nodes
    mark = f"{RUN_DIR}={planned_run_dir(paths)}"
    nodes.within(1, "sh", "-c", f"env {mark} setsid {LEFTOVER} >/dev/null 2>&1 &")
    wait_until(lambda: has_process(trained, 1, LEFTOVER), what="the process")


def has_process(trained: Trained, i: int, words: str) -> bool:
    """Return whether a command line on a node begins with these words.

    The shells that start it contain them too, and have not set the run's variable. Programs of the
    operator's connections may still be ending.
    """
    return any(line.startswith(words) for line in trained.operator.nodes.processes_of(i))


def start_saving(trained: Trained, paths: RunPaths) -> None:
    """A process of the run on the head that saves once `saving` is there.

    It waits for no time, so that a busy machine does not decide what comes first.
    """
    nodes, folder = trained.operator.nodes, planned_run_dir(paths)
    save = f"until [ -e {folder}/saving ]; do sleep 0.05; done; touch {folder}/saved"
    nodes.within(0, "sh", "-c", f"env {RUN_DIR}={folder} setsid sh -c '{save}' >/dev/null 2>&1 &")
    wait_until(lambda: has_process(trained, 0, "sh -c until"), what="the process")


def trusted(trained: Trained) -> Path:
    return trained.operator.nodes.home_of(1) / ".ssh" / "authorized_keys"


def test_a_machine_that_is_gone_hides_nothing_of_the_others(
    trained: Trained, paths: RunPaths
) -> None:
    log = paths.rank_log(1).read_bytes()
    paths.rank_log(1).unlink()
    shutil.rmtree(paths.checkpoint(STEPS))
    code, said, told = as_stack(trained.operator, "down")
    assert code == ExitCode.OK and "1/3 collect: 1 run(s) collected" in said, said
    assert told == ["stack", "stack", "destroy"]
    assert f"warning: the collected results are incomplete: {GONE}: " in said, said
    assert paths.rank_log(1).read_bytes() == log
    assert (paths.checkpoint(STEPS) / "model.safetensors").exists()
    code, said = trained.operator.do("stop", "far")
    assert code == ExitCode.OK and "status           finished" in said, said
    assert GONE in said and "no process of the run is left" not in said, said


def test_leftover_processes_are_ended_although_another_machine_is_gone(
    trained: Trained, paths: RunPaths, run: RemoteRun
) -> None:
    start_leftover(trained, paths)
    with pytest.raises(NodesError, match=rf"processes of run far failed on 1 .*\n  {GONE}: "):
        run.end_leftovers()
    assert not has_process(trained, 1, LEFTOVER)


def test_a_rank_that_saves_after_its_supervisors_death_is_left_to_it(
    trained: Trained, paths: RunPaths, run: RemoteRun
) -> None:
    saved = trained.on_head("saved")
    # In a step: the step has to end before the rank saves.
    changes = {"progress/rank_0000.json": {"phase": "step"}, "state.json": {"exit_class": None}}
    before = {name: trained.on_head(name).read_text(encoding="utf-8") for name in changes}
    for name, change in changes.items():
        changed = json.loads(before[name]) | change
        trained.on_head(name).write_text(json.dumps(changed), encoding="utf-8")
    start_saving(trained, paths)
    said: list[str] = []

    def save(line: str) -> None:
        said.append(line)
        trained.on_head("saving").touch()

    with pytest.raises(NodesError):
        run.end_leftovers(say=save)
    assert saved.exists() and "waiting until the ranks have saved a checkpoint" in said[0]
    saved.unlink()
    trained.on_head("saving").unlink()
    start_saving(trained, paths)
    with pytest.raises(NodesError):
        run.end_leftovers(at_once=True)
    assert not saved.exists() and not has_process(trained, 0, "sh -c until")
    for name, text in before.items():
        trained.on_head(name).write_text(text, encoding="utf-8")


def test_a_run_that_was_started_again_keeps_its_processes_and_its_key(
    trained: Trained, paths: RunPaths, run: RemoteRun
) -> None:
    nodes, talk = trained.operator.nodes, text_console(stderr=True)
    start_leftover(trained, paths)
    with trusted(trained).open("a", encoding="ascii") as file:
        file.write(KEY)
    (nodes.home_of(0) / ".ssh" / "tileforge" / KEY_NAME).mkdir(parents=True, exist_ok=True)
    with trained.on_head("supervisor.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run.end_leftovers()
        assert collect_results(run, talk=talk).alive
        assert has_process(trained, 1, LEFTOVER)
        assert KEY in trusted(trained).read_text(encoding="ascii")
    assert not collect_results(run, talk=talk).alive
    assert not has_process(trained, 1, LEFTOVER)
    assert KEY not in trusted(trained).read_text(encoding="ascii")
