"""A hostile node's false answers, and the reaction of the operator's machine."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath

import pytest

from payload.core.errors import AnswerError, ConfigError, TileforgeError
from payload.core.printable_text import printable
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.commands.attach import attach
from payload.orchestrate.commands.run_commands_options import AttachOptions
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.mirror import record_contact
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import inspect_node, this_code
from payload.orchestrate.ssh.remote_calls import (
    Login,
)
from payload.orchestrate.ssh.remote_run_folders import NodeRun, runs_on
from payload.orchestrate.ssh.run_keys import install_run_key
from payload.run_record.run_files import RunPaths
from tests.orchestrate.conftest import StartSshd, remote_run
from tests.orchestrate.hostile import LOOK, PUBLIC, STRINGS, command_of, files_below, lie
from tests.orchestrate.run_copies import exit_text, state_text, write_ranks
from tests.orchestrate.sshd import Sshd, make_cluster


@pytest.mark.sshd
@pytest.mark.parametrize("running", STRINGS)
def test_the_run_that_a_head_names_never_leads_out_of_the_runs_folder(
    head: Sshd, login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: str
) -> None:
    folder = tmp_path / "operator"
    (folder / "runs").mkdir(parents=True)
    keys = folder / ".ssh"
    keys.mkdir()
    (keys / "authorized_keys").write_text("mine")
    inventory = folder / "inventory.json"
    inventory.write_text(make_cluster(head.node).to_json())
    monkeypatch.chdir(folder)
    before = files_below(folder)
    hostile = str(keys) if running == "/var/op/.ssh" else running
    lie(head, look={**LOOK, "running": hostile, "missing": None}, control={"whole": {}})
    options = AttachOptions(
        inventory=str(inventory), ssh_key=login.key, run=None, runs_dir=folder / "runs", json=False
    )
    with pytest.raises(TileforgeError) as raised:
        attach(options, LocalAccess(dict(os.environ)))
    assert isinstance(raised.value, AnswerError), raised.value
    assert "\n" not in str(raised.value) and printable(str(raised.value)) == str(raised.value)
    assert files_below(folder) == before


@pytest.mark.sshd
@pytest.mark.parametrize("kind", ["a run of this machine", "another cluster's", "a folder", "link"])
def test_the_run_that_a_head_names_is_no_other_run_of_the_operator_s(
    head: Sshd, login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "operator"
    paths = RunPaths(folder / "runs" / "mine")
    paths.root.mkdir(parents=True)
    paths.state.write_text(state_text("mine"))
    cluster = make_cluster(head.node)
    (folder / "inventory.json").write_text(cluster.to_json())
    if kind != "a folder":
        paths.plan.write_text("{}")
    if kind == "another cluster's":
        other = json.loads(cluster.to_json()) | {"cluster": "another"}
        paths.inventory.write_text(json.dumps(other))
        record_contact(paths, alive=True, ssh_key=login.key)
    if kind == "link":
        paths.root.rename(folder / "elsewhere")
        paths.root.symlink_to(folder / "elsewhere")
    monkeypatch.chdir(folder)
    before = files_below(folder)
    lie(head, look={**LOOK, "running": "mine", "missing": None})
    options = AttachOptions(
        inventory="inventory.json",
        ssh_key=login.key,
        run=None,
        runs_dir=Path("runs"),
        json=False,
    )
    with pytest.raises(ConfigError, match=r"is not a copy of a run on test, and is left unchanged"):
        attach(options, LocalAccess(dict(os.environ)))
    assert files_below(folder) == before


@pytest.mark.sshd
@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../secret", "payload/none.py", "", "pyproject.toml"]
)
def test_a_node_gets_no_file_but_the_payload_s_own(head: Sshd, cluster: Cluster, name: str) -> None:
    lie(head, look={**LOOK, "missing": ["payload/__init__.py", name]})
    with pytest.raises(AnswerError, match=r"^node-0: response: missing: the file .* not requested"):
        inspect_node(cluster.connect(head.node), this_code(), venv=PurePosixPath("/opt"))


@pytest.mark.sshd
def test_a_login_s_greeting_and_a_short_answer_are_distinguished(
    head: Sshd, cluster: Cluster
) -> None:
    lie(head, look={})
    with pytest.raises(AnswerError, match=r"^node-0: response: missing: running, runs"):
        runs_on(cluster.connect(head.node))


@pytest.mark.sshd
def test_foreign_files_beside_a_head_s_runs_do_not_affect_its_answer(
    head: Sshd, cluster: Cluster
) -> None:
    runs = Path(head.home, "tileforge", "runs")
    for name in ("one", "a b", "latest"):
        (runs / name).mkdir(parents=True)
        (runs / name / "plan.json").write_text("{}")
    for name in ("99999999", "100000000", "backup", "200000000.old", "300000000.partial"):
        checkpoint = runs / "one" / "checkpoints" / f"step_{name}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    newest = NodeRun(run_id="one", checkpoint="step_100000000", state=None)
    assert runs_on(cluster.connect(head.node)).runs == (newest,)


@pytest.mark.sshd
@pytest.mark.parametrize(
    ("folder", "public"),
    [
        ("/var/op/.ssh/tileforge/one", PUBLIC + "\nssh-ed25519 " + "B" * 68 + " theirs"),
        ("/var/op/.ssh/tileforge/one", f"ssh-ed25519 {'A' * 68} theirs"),
        ("/var/op/.ssh/tileforge/one", 'command="x" ' + PUBLIC),
        ("/var/op/.ssh/tileforge/other", PUBLIC),
        ("/var/op/.ssh/tileforge/../one", PUBLIC),
    ],
)
def test_a_head_plants_no_key_of_its_own_choice_on_the_nodes(
    head: Sshd, cluster: Cluster, inventory: ClusterInventory, folder: str, public: str
) -> None:
    before = head.authorized_keys.read_text()
    lie(head, run_key={"folder": folder, "public": public})
    with pytest.raises(AnswerError, match=r"^node-0: "):
        install_run_key(cluster, name="one", lasts_s=60)
    assert head.authorized_keys.read_text() == before


@pytest.mark.sshd
def test_a_head_that_sends_another_s_file_changes_nothing(run: RemoteRun, head: Sshd) -> None:
    before = files_below(run.paths.root.parent.parent)
    names = [
        "../../../.ssh/authorized_keys",
        "mirror.json",
        "checkpoints/step_00000010/manifest.json",
    ]
    honest = {"alive": True, "begun": True, "left": 0, "whole": {}, "more": {}}
    for name in names:
        for part in ({"whole": {name: "x"}}, {"more": {name: {"offset": 0, "content": "aGk="}}}):
            lie(head, control=honest | part)
            with pytest.raises(AnswerError, match=r"^node-0: response: the file "):
                run.update()
    after = files_below(run.paths.root.parent.parent)
    assert {name: after[name] for name in after if not name.endswith(".lock")} == before


@pytest.mark.sshd
def test_a_worker_s_false_answer_does_not_affect_the_head_s_files(
    start_sshd: StartSshd, login: Login, tmp_path: Path
) -> None:
    head = start_sshd("node-0", "127.0.0.3")
    worker = start_sshd("node-1", "127.0.0.2", more=command_of(tmp_path))
    there = head.home / "tileforge" / "runs" / "one"
    there.mkdir(parents=True)
    (there / "state.json").write_text(state_text("one"))
    paths = RunPaths(tmp_path / "operator" / "one")
    write_ranks(paths, "node-0", "node-1")
    inventory = make_cluster(head.node, worker.node)
    run = remote_run(paths, inventory, there=there, login=login)
    forged = {
        "state.json": state_text("one", error="forged"),
        "exits/rank_0000.json": exit_text(0, node="node-0"),
    }
    lie(worker, control={"alive": True, "begun": True, "left": 0, "whole": forged, "more": {}})
    seen = run.update_all()
    run.close()
    assert isinstance(seen.missed["node-1"], AnswerError) and not seen.alive
    assert paths.state.read_text() == state_text("one")
    assert not paths.rank_exit(0).exists()


@pytest.mark.sshd
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plan.json", "{}"),
        ("ranks.json", '{"schema_version": 1, "ranks": "x"}'),
        ("run.toml", "[train]\nsteps = 'x'\n"),
        ("run.toml", "\0"),
    ],
)
def test_a_run_whose_files_are_damaged_on_the_head_is_not_adopted(
    run: RemoteRun, head: Sshd, file: str, text: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one"
    for name in ("run.toml", "hosts", "plan.json"):
        (there / name).write_text("")
    write_ranks(RunPaths(there), "node-0")
    (there / file).write_text(text)
    for path in run.paths.root.iterdir():
        path.unlink()
    run.paths.root.rmdir()
    with pytest.raises(TileforgeError):
        run.adopt()
    assert list(run.paths.root.parent.iterdir()) == []
