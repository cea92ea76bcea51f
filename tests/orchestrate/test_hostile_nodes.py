"""A hostile node: every field of every answer, and what the operator's machine does with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from payload.errors import AnswerError, ConfigError, PreflightError, TileforgeError
from payload.inventory import ClusterInventory
from payload.orchestrate.commands.status import AttachOptions, attach
from payload.orchestrate.preflight.findings import NodeFacts
from payload.orchestrate.preflight.trial_findings import MARK, Outcome, Result
from payload.orchestrate.run.mirror import merge, note_seen, wanted_of
from payload.orchestrate.run.there import RemoteRun, planned_run_dir
from payload.orchestrate.sites.local import LocalAccess
from payload.orchestrate.ssh.connection import Cluster
from payload.orchestrate.ssh.files import RunsThere, RunThere, look, runs_on, this_code
from payload.orchestrate.ssh.keys import _Claimed as Claimed
from payload.orchestrate.ssh.keys import _Made as KeyMade
from payload.orchestrate.ssh.keys import _Names as Names
from payload.orchestrate.ssh.keys import install_run_key
from payload.orchestrate.ssh.streams import (
    FOLDER,
    Begun,
    Finished,
    Left,
    Login,
    MeshAnswer,
    NodeLook,
    Part,
    Signalled,
    parse_answer,
)
from payload.results import RunPaths
from payload.untrusted import RUN_ID, printable
from tests.orchestrate.conftest import SHORT, StartSshd
from tests.orchestrate.hostile import STRINGS, VALUES, command_of, lie
from tests.orchestrate.run_copies import exit_text, progress_text, state_text, write_ranks
from tests.orchestrate.sshd import Sshd, make_cluster

PUBLIC = f"ssh-ed25519 {'A' * 68} tileforge-run:one"
LOOK = {
    "home": "/home/trainer",
    "lacking": ["/opt/x"],
    "tcmalloc": "libtcmalloc.so.4",
    "port": 20_001,
    "running": "one",
    "missing": ["payload/__init__.py"],
    "has": ["data/0/meta.json"],
}
FACTS = {
    "time_unix": 1.0,
    "took_s": 0.5,
    "hostname": "node-0",
    "hostname_addresses": ["10.0.0.2"],
    "architecture": "x86_64",
    "python": "3.11.2",
    "bootstrap": {"step": "done", "ok": True, "reason": None},
    "bootstrap_log": ["done"],
    "cpu_flags": ["amx_bf16"],
    "physical_cores": 4,
    "numa_domains": 1,
    "memory_bytes": 2**34,
    "disk_path": "/home/trainer",
    "disk_free_bytes": 2**34,
    "interface": "eth0",
    "source_address": "10.0.0.2",
    "mtu": 1460,
    "resolver_answers": True,
    "shared": {"folder": "/srv/shared", "mounted": True, "took_s": 0.01, "error": None},
}
HONEST: list[tuple[type[Any], dict[str, Any]]] = [
    (NodeLook, LOOK),
    (
        RunsThere,
        {
            "running": "one",
            "runs": [{"run_id": "one", "checkpoint": "step_00000010", "state": "a" * 64}],
        },
    ),
    (Claimed, {"claim": True, "running": "one", "held": "{}"}),
    (Names, {"names": ["one.0123abcd"]}),
    (Finished, {"wrong": ["payload/__init__.py"]}),
    (KeyMade, {"folder": "/home/trainer/.ssh/tileforge/one", "public": PUBLIC}),
    (Begun, {"pid": 7, "running": None, "status": None, "said": "words"}),
    (
        Part,
        {
            "alive": True,
            "begun": True,
            "whole": {"state.json": "{}"},
            "more": {"metrics.jsonl": {"offset": 0, "content": "aGk="}},
            "left": 0,
        },
    ),
    (Signalled, {"alive": True}),
    (Left, {"pids": [7]}),
    (
        MeshAnswer,
        {
            "bind_error": "no",
            "port_taken": False,
            "pairs": {"node-1": {"failed": {"20001": "refused"}, "largest_packet": 1460}},
        },
    ),
    (NodeFacts, FACTS),
    (
        Outcome,
        {
            "unreached": {"node-1": "refused"},
            "status": 0,
            "late": False,
            "stdout": MARK + '{"rank": 0}',
            "stderr": "",
        },
    ),
]
PATHS = {(NodeLook, "home"), (KeyMade, "folder")}
RUNS = {(NodeLook, "running"), (RunsThere, "running"), (Claimed, "running"), (Begun, "running")}


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of an answer; a list's first stands for the others."""
    yield way
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*way, key))
    elif isinstance(value, list):
        yield from places(value[0], (*way, 0))


def changed(value: Any, way: tuple[Any, ...], by: Any) -> Any:
    """The answer with another value in one place."""
    if not way:
        return by
    copy = value.copy()
    copy[way[0]] = changed(value[way[0]], way[1:], by)
    return copy


@pytest.mark.parametrize(("cls", "honest"), HONEST, ids=lambda each: getattr(each, "__name__", ""))
def test_every_field_of_every_answer_is_held_to_its_form(
    cls: type[Any], honest: dict[str, Any]
) -> None:
    assert parse_answer(cls, json.dumps(honest).encode(), node="node-0")
    for way in places(honest):
        for value in VALUES:
            text = json.dumps(changed(honest, way, value)).encode()
            try:
                found = parse_answer(cls, text, node="node-0")
            except AnswerError as error:
                words = str(error)
                assert words.startswith("node-0: "), words
                assert words == printable(words) and "\n" not in words and len(words) < 500
                continue
            at = (cls, *way)
            if isinstance(value, str) and at in PATHS:
                assert FOLDER.fullmatch(value) and ".." not in value, value
            if isinstance(value, str) and at in RUNS:
                assert RUN_ID.fullmatch(value), value
            assert asdict(found)  # it is whole


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b'"x"',
        b"{" * 20_000,
        b'{"running": ' + b"[" * 20_000,
        b'{"running": NaN}',
        b'{"running": ' + b"1" * 4301 + b"}",
        b'{"running": "\\ud800"}',
    ],
    ids=range(10),
)
def test_an_answer_that_is_none_is_refused_in_one_line(text: bytes) -> None:
    with pytest.raises(AnswerError, match=r"^node-0: ") as raised:
        parse_answer(RunsThere, text, node="node-0")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_head", [True, False])
def test_no_field_of_a_node_s_part_writes_anything_but_that_node_s_files(
    tmp_path: Path, is_head: bool
) -> None:
    paths = RunPaths(tmp_path / "runs" / "one")
    write_ranks(paths, "node-0", "node-1")
    (tmp_path / "secret").write_text("mine")
    wanted = wanted_of(paths, "node-0", is_head=is_head)
    honest = {
        "alive": True,
        "begun": True,
        "whole": {"exits/rank_0000.json": exit_text(0, node="node-0")},
        "more": {"logs/rank_0000.log": {"offset": 0, "content": "aGk="}},
        "left": 0,
    }
    own = {f"runs/one/{name}" for name in (*wanted.whole, *wanted.known)}
    own |= {"runs/one/ranks.json", "secret"}
    answers = [changed(honest, way, value) for way in places(honest) for value in VALUES]
    for name in (*STRINGS, "../../secret", "ranks.json", str(tmp_path / "secret")):
        for text in (*honest["whole"].values(), *STRINGS):  # type: ignore[attr-defined]
            answers.append(honest | {"whole": {name: text}})
        answers.append(honest | {"more": {name: {"offset": 0, "content": "aGk="}}})
    refused = 0
    for answer in answers:
        try:
            part = parse_answer(Part, json.dumps(answer).encode(), node="node-0")
            problems = merge(paths, part, wanted)
        except AnswerError as error:
            refused += 1
            problems = [str(error)]
        for problem in problems:
            assert problem == printable(problem) and "\n" not in problem and len(problem) < 500
        assert set(files_below(tmp_path)) <= own
    assert refused > 1000 and (tmp_path / "secret").read_text() == "mine"
    assert len(paths.ranks.read_text()) > 100


def test_what_ranks_say_in_a_trial_is_held_to_its_form() -> None:
    speed = {"node": "node-0", "bf16": 2e12, "fp32": 1e12}
    exchange = {"all_reduce_bytes_per_s": 1e9, "latency_s": 0.1, "received_bytes_per_s": [1e9]}
    honest = {"rank": 0, "node": "node-0", "result": {"ranks": [speed], "exchange": exchange}}
    for way in places(honest):
        for value in VALUES:
            said = MARK + json.dumps(changed(honest, way, value))
            said += MARK + "[" * 20_000 + MARK + "1" * 5000 + MARK + '{"result": NaN}' + MARK
            outcome = Outcome(unreached={}, status=0, late=False, stdout=said, stderr="")
            result = outcome.result()
            if isinstance(result, Result):
                assert all(rank.bf16 > 0 and rank.fp32 > 0 for rank in result.ranks)


@pytest.fixture
def head(start_sshd: StartSshd, tmp_path: Path) -> Sshd:
    return start_sshd("node-0", "127.0.0.2", more=command_of(tmp_path))


@pytest.fixture
def inventory(head: Sshd) -> ClusterInventory:
    return make_cluster(head.node)


@pytest.fixture
def cluster(inventory: ClusterInventory, login: Login) -> Iterator[Cluster]:
    with Cluster(inventory, login=login, env={}, deadlines=SHORT) as cluster:
        yield cluster


@pytest.fixture
def run(
    head: Sshd, inventory: ClusterInventory, login: Login, tmp_path: Path
) -> Iterator[RemoteRun]:
    """A run with one rank on the head and one on a worker that is not asked."""
    there = head.home / "tileforge" / "runs" / "one"
    there.mkdir(parents=True)
    paths = RunPaths(tmp_path / "operator" / "runs" / "one")
    write_ranks(paths, "node-0", "node-1")
    run = RemoteRun(
        paths,
        inventory,
        run_dir=PurePosixPath(there),
        key=login.key,
        connect=lambda: Cluster(inventory, login=login, env={}, deadlines=SHORT),
    )
    yield run
    run.close()


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".cluster" not in path.parts
    }


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
        note_seen(paths, alive=True, ssh_key=login.key)
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
    with pytest.raises(ConfigError, match=r"is no copy of a run on test, and stays as it is"):
        attach(options, LocalAccess(dict(os.environ)))
    assert files_below(folder) == before


@pytest.mark.sshd
@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../secret", "payload/none.py", "", "pyproject.toml"]
)
def test_a_node_gets_no_file_but_the_payload_s_own(head: Sshd, cluster: Cluster, name: str) -> None:
    lie(head, look={**LOOK, "missing": ["payload/__init__.py", name]})
    with pytest.raises(
        AnswerError, match=r"^node-0: its answer: missing: the file .* not asked for"
    ):
        look(cluster.connect(head.node), this_code(), venv=PurePosixPath("/opt"))


@pytest.mark.sshd
def test_a_login_s_greeting_and_a_short_answer_are_told_apart(head: Sshd, cluster: Cluster) -> None:
    lie(head, look={})
    with pytest.raises(AnswerError, match=r"^node-0: its answer: missing: running, runs"):
        runs_on(cluster.connect(head.node))


@pytest.mark.sshd
def test_what_people_put_beside_a_head_s_runs_keeps_nothing_from_its_answer(
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
    newest = RunThere(run_id="one", checkpoint="step_100000000", state=None)
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
        install_run_key(cluster, inventory, name="one", lasts_s=60)
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
            with pytest.raises(AnswerError, match=r"^node-0: its answer: the file "):
                run.look()
    after = files_below(run.paths.root.parent.parent)
    assert {name: after[name] for name in after if not name.endswith(".lock")} == before


@pytest.mark.sshd
def test_a_worker_s_lie_takes_nothing_from_the_head_s_part(
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
    run = RemoteRun(
        paths,
        inventory,
        run_dir=PurePosixPath(there),
        key=login.key,
        connect=lambda: Cluster(inventory, login=login, env={}, deadlines=SHORT),
    )
    forged = {
        "state.json": state_text("one", error="forged"),
        "exits/rank_0000.json": exit_text(0, node="node-0"),
    }
    lie(worker, control={"alive": True, "begun": True, "left": 0, "whole": forged, "more": {}})
    seen = run.look_at_all()
    run.close()
    assert isinstance(seen.missed["node-1"], AnswerError) and not seen.alive
    assert paths.state.read_text() == state_text("one")
    assert not paths.rank_exit(0).exists()


def write_checkpoint(folder: Path, **files: bytes) -> dict[str, Any]:
    """A checkpoint as the trainer leaves it; returns its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    small = {"config.json": b"{}", "trainer.json": b"{}", "optimizer.safetensors": b""}
    for name, content in {"model.safetensors": b"weights", **small, **files}.items():
        (folder / name).write_bytes(content)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"schema_version": 1, "files": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


@pytest.mark.sshd
@pytest.mark.parametrize("how", ["another's", "damaged", "linked", "manifest alone"])
def test_a_checkpoint_that_lies_here_counts_only_if_it_is_the_head_s(
    run: RemoteRun, head: Sshd, tmp_path: Path, how: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010"
    write_checkpoint(there)
    here = run.paths.checkpoint(10)
    outside = tmp_path / "outside"
    outside.write_bytes(b"weights")
    if how == "another's":
        write_checkpoint(here, **{"model.safetensors": b"planted"})
    else:
        write_checkpoint(here)
        (here / "model.safetensors").unlink()
    if how == "damaged":
        (here / "model.safetensors").write_bytes(b"weightz")
    elif how == "linked":
        (here / "model.safetensors").symlink_to(outside)
    assert run.collect_checkpoint() == here
    assert files_below(here) == files_below(there)
    assert not (here / "model.safetensors").is_symlink() and outside.read_bytes() == b"weights"
    inode = (here / "model.safetensors").stat().st_ino
    assert run.collect_checkpoint() == here  # now it is
    assert (here / "model.safetensors").stat().st_ino == inode
    assert [path.name for path in run.paths.checkpoints.iterdir()] == [here.name]


@pytest.mark.sshd
@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("checkpoints", True),
        ("checkpoints/step_00000010", True),
        ("checkpoints/.step_00000010.collecting", True),
        ("checkpoints/.step_00000009.collecting", False),
        ("logs", True),
        ("progress", True),
    ],
)
def test_a_file_in_the_place_of_a_copy_s_folder_stops_no_collect(
    run: RemoteRun, head: Sshd, name: str, is_kept: bool
) -> None:
    there = head.home / "tileforge" / "runs" / "one"
    write_checkpoint(there / "checkpoints" / "step_00000010")
    (there / "progress").mkdir()
    (there / "progress" / "rank_0000.json").write_text(progress_text(0, node="node-0"))
    path = run.paths.root / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.write_text("mine")
    run.refresh()
    assert run.collect_checkpoint() == run.paths.checkpoint(10)
    assert files_below(run.paths.checkpoint(10)) == files_below(there / "checkpoints/step_00000010")
    aside = path.with_name(f"{path.name}.damaged-1")
    assert aside.read_text() == "mine" if is_kept else not path.exists()


@pytest.mark.sshd
@pytest.mark.parametrize("odd", ["model.safetensors", "config.json.partial", "old/er"])
def test_a_folder_left_where_a_checkpoint_is_collected_stops_no_collect(
    run: RemoteRun, head: Sshd, odd: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010"
    write_checkpoint(there)
    (run.paths.checkpoints / ".step_00000010.collecting" / odd / "x").mkdir(parents=True)
    assert run.collect_checkpoint() == run.paths.checkpoint(10)
    assert files_below(run.paths.checkpoint(10)) == files_below(there)
    assert [path.name for path in run.paths.checkpoints.iterdir()] == ["step_00000010"]


def test_a_folder_in_the_place_of_a_copy_s_lock_is_set_aside(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "one")
    (paths.root / ".mirror.lock" / "x").mkdir(parents=True)
    note_seen(paths, alive=False, ssh_key=Path("/k"))
    assert (paths.root / ".mirror.lock.damaged-1" / "x").is_dir()


MANIFESTS: list[Any] = [
    *({"files": {name: {"bytes": 1, "sha256": "0" * 64}}} for name in STRINGS),
    *(
        {"files": {name: {"bytes": 1, "sha256": "0" * 64}}}
        for name in (
            "manifest.json",
            "../x.json",
            "/x.json",
            "pytorch_model.bin",
            "x.py",
            ".x.json",
        )
    ),
    *(
        {"files": {"config.json": {"bytes": size, "sha256": "0" * 64}}}
        for size in (-1, 10**30, "1")
    ),
    *(
        {"files": {"config.json": {"bytes": 2, "sha256": text}}}
        for text in ("", "0" * 63, "G" * 64, 7)
    ),
    {"files": {}},
    {"files": []},
    {},
    [],
]


@pytest.mark.sshd
def test_a_hostile_manifest_writes_nothing_and_the_checkpoint_before_it_is_collected(
    run: RemoteRun, head: Sshd
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints"
    write_checkpoint(there / "step_00000010")
    operator = run.paths.root.parent.parent
    for manifest in MANIFESTS:
        if isinstance(manifest, dict):
            manifest.setdefault("schema_version", 1)
        newest = there / "step_00000020"
        newest.mkdir(exist_ok=True)
        (newest / "manifest.json").write_text(json.dumps(manifest))
        said: list[str] = []
        assert run.collect_checkpoint(say=said.append) == run.paths.checkpoint(10), manifest
        assert len(said) == 1 and "step_00000020 is passed over" in said[0]
        assert printable(said[0]) == said[0] and "\n" not in said[0]
        left = {path for path in files_below(operator) if "step_00000010/" not in path}
        staged = "runs/one/checkpoints/.step_00000020.collecting/manifest.json"
        assert left <= {"runs/one/ranks.json", "runs/one/.checkpoint.lock", staged}
        assert not run.paths.checkpoint(20).exists()


@pytest.mark.sshd
@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/.step_00000010.collecting", ".checkpoint.lock"]
)
def test_a_checkpoint_is_not_collected_through_a_symlink(
    run: RemoteRun, head: Sshd, tmp_path: Path, name: str
) -> None:
    write_checkpoint(head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010")
    outside = tmp_path / "outside"
    if name.endswith(".lock"):
        outside.write_text("mine")
    else:
        outside.mkdir()
    link = run.paths.root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match="is a symlink"):
        run.collect_checkpoint()
    assert outside.read_text() == "mine" if outside.is_file() else not list(outside.iterdir())


@pytest.mark.sshd
def test_a_checkpoint_that_does_not_fit_here_is_not_begun(run: RemoteRun, head: Sshd) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints"
    write_checkpoint(there / "step_00000010")
    manifest = write_checkpoint(there / "step_00000020")
    manifest["files"]["config.json"]["bytes"] = 2**62
    (there / "step_00000020" / "manifest.json").write_text(json.dumps(manifest))
    # The one before it is no result: what is collected may be destroyed there.
    with pytest.raises(PreflightError, match=r"^node-0: a checkpoint of .* bytes does not fit"):
        run.collect_checkpoint()


@pytest.mark.sshd
@pytest.mark.parametrize("how", ["missing", "flipped", "shorter"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_collected(
    run: RemoteRun, head: Sshd, how: str
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints"
    for step in (9, 10, 100_000_000):
        write_checkpoint(there / f"step_{step:08d}")
    weights = there / "step_100000000" / "model.safetensors"
    if how == "missing":
        weights.unlink()
    else:
        weights.write_bytes(b"wEights" if how == "flipped" else b"w")
    said: list[str] = []
    assert run.collect_checkpoint(say=said.append) == run.paths.checkpoint(10)
    assert len(said) == 1 and "checkpoint step_100000000 is passed over: node-0: " in said[0]


@pytest.mark.sshd
def test_a_file_of_a_checkpoint_that_grows_beyond_its_size_is_not_taken(
    run: RemoteRun, head: Sshd
) -> None:
    there = head.home / "tileforge" / "runs" / "one" / "checkpoints" / "step_00000010"
    write_checkpoint(there)
    (there / "model.safetensors").write_bytes(bytes(10 * 2**20))
    with pytest.raises(PreflightError, match=r"^node-0: it sends more than it was asked for"):
        run.collect_checkpoint()
    left = run.paths.checkpoints / ".step_00000010.collecting" / "model.safetensors.partial"
    assert left.stat().st_size <= 2**20


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
def test_a_run_whose_files_are_damaged_there_is_not_adopted(
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


@pytest.mark.parametrize("run_dir", [*STRINGS, "/home/trainer/tileforge/runs/another"])
def test_where_a_run_lies_on_the_nodes_is_held_to_its_form(tmp_path: Path, run_dir: str) -> None:
    from tests.supervise.planned import plan_stand_in

    paths = plan_stand_in(tmp_path / "one", ranks=1)
    text = paths.plan.read_text()
    plan = json.loads(text)
    plan["environment"]["TILEFORGE_RUN_DIR"] = run_dir
    paths.plan.write_text(json.dumps(plan))
    with pytest.raises(ConfigError):
        planned_run_dir(paths)
