"""The programs for nodes, run as on nodes: with plain python3, from stdin."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import PreflightError
from payload.core.validation.records import build
from payload.machines.inventory import RANK_PORTS
from payload.orchestrate.findings.nodes import NodeFacts, SharedFolder
from payload.orchestrate.hardware.nvidia import QUERY
from payload.orchestrate.node import control
from payload.orchestrate.node.look import FolderTrial
from payload.orchestrate.node.mesh import Mesh
from payload.orchestrate.ssh.remote_calls import (
    NODE_FOLDER,
    Signalled,
    parse_answer,
    remote_argv,
    remote_stdin,
)
from tests.support.ports import free_port
from tests.support.sshfs_mount import sshfs_mount, stopped
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parents[2] / "payload" / "orchestrate" / "node"


def run_remote(program: str, arguments: dict[str, Any], *, home: Path | None = None) -> Any:
    """Return the program's response. -S excludes all installed packages, as on a bare node."""
    argv = remote_argv(program)
    env = dict(os.environ) | ({"HOME": str(home)} if home else {})
    done = subprocess.run(
        [sys.executable, "-S", *argv[1:]],
        input=remote_stdin(program, arguments),
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
        env=env,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_remote_program_needs_the_standard_library_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_node_is_looked_at_for_the_ports_and_the_folder_that_the_operator_means(
    tmp_path: Path,
) -> None:
    held = tmp_path / NODE_FOLDER / "payload-x"
    held.mkdir(parents=True)
    arguments = {"action": "look", "digest": "x", "files": {}, "venv": "/no", "programs": []}
    found = run_remote("look.py", {**arguments, "wholes": []}, home=tmp_path)
    assert found["missing"] is None and found["port"] in RANK_PORTS


def probe(
    tmp_path: Path,
    *,
    state: str | None,
    route_to: str | None = "127.0.0.3",
    shared_folder: str = "/srv/none",
) -> NodeFacts:
    if state is not None:
        (tmp_path / "state.json").write_text(state, encoding="utf-8")
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100)), encoding="utf-8")
    logs = [str(tmp_path / "none"), str(tmp_path / "log")]
    where = {
        "state_file": "~/state.json",
        "route_to": route_to,
        "shared_folder": shared_folder,
        "gpu_query": ",".join(QUERY),
        "torch": [str(tmp_path), "version.py"],
    }
    arguments = {"action": "probe", "logs": logs, **where}
    return build(NodeFacts, run_remote("look.py", arguments, home=tmp_path), where="here")


def test_the_probe_tells_what_the_machine_has(tmp_path: Path) -> None:
    facts = probe(tmp_path, state='{"ok": true}')
    assert facts.hostname == socket.gethostname()
    assert facts.bootstrap == {"ok": True}
    assert facts.bootstrap_log == tuple(f"line {i}" for i in range(88, 100))
    assert facts.disk_free_bytes > 0
    assert facts.took_s >= 0


@pytest.mark.slow
def test_a_shared_folder_answers_is_read_only_or_silent(tmp_path: Path) -> None:
    with sshfs_mount(tmp_path) as (folder, server_pid):

        def ask() -> SharedFolder | None:
            return probe(tmp_path, state=None, route_to=None, shared_folder=str(folder)).shared

        def answer() -> SharedFolder:
            """Return the first response in time, because a probe can time out on a busy machine."""
            found: list[SharedFolder] = []

            def has_answered() -> bool:
                found.extend([each] if (each := ask()) is not None else [])
                return bool(found) and (found[-1].took_s is not None or found[-1].error is not None)

            wait_until(has_answered, what="an answer in time")
            return found[-1]

        fine = answer()
        assert fine.mounted and fine.error is None
        # As left by a test that was killed just after it created its file.
        left = folder / f".tileforge-preflight-{os.uname().nodename}-{2**22 + 1}"
        left.touch()
        assert answer().error is None
        # sshfs hides a deleted file until its close has reached the server, asynchronously.
        wait_until(lambda: list(folder.iterdir()) == [], what="the probe's file to be gone")
        with stopped(server_pid):
            assert ask() == replace(fine, took_s=None)
        remount = ["mount", "-o", "remount,bind,ro", str(folder)]
        # The mount is busy until the probe that timed out has closed its file.
        wait_until(
            lambda: subprocess.run(remount, check=False).returncode == 0, what="nobody to write"
        )
        assert answer().error == "EROFS"


def test_a_folder_that_should_be_mounted_and_is_not_is_told(tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text(f"# a comment\n10.0.0.2:/ {tmp_path} nfs4 hard 0 0\n", encoding="ascii")
    assert FolderTrial(tmp_path, fstab=fstab).result() == {
        "folder": str(tmp_path),
        "mounted": False,
        "took_s": None,
        "error": None,
    }
    assert FolderTrial(tmp_path / "other", fstab=fstab).result() is None


@pytest.mark.parametrize(("state", "found"), [(None, None), ("half", "half"), ("[1]", [1])])
def test_a_state_file_that_is_none_does_not_stop_the_probe(
    tmp_path: Path, state: str | None, found: Any
) -> None:
    assert probe(tmp_path, state=state, route_to=None).bootstrap == found


def test_an_answer_after_a_greeting_is_still_the_answer() -> None:
    text = b'Welcome!\n{"alive": true}\n'
    assert parse_answer(Signalled, text, node="n") == Signalled(alive=True)


@pytest.mark.parametrize("text", [b"", b"Welcome!\n", b"[1]\n", b"\xff\xfe"])
def test_no_answer_is_said_to_be_none(text: bytes) -> None:
    with pytest.raises(PreflightError, match="n: the program printed"):
        parse_answer(Signalled, text, node="n")


def test_arguments_may_be_longer_than_one_word_of_a_command_line(tmp_path: Path) -> None:
    # The kernel's limit of one argument is 128 KiB.
    known = {f"logs/rank_{rank:04d}.log": (0, "A" * 344) for rank in range(2000)}
    arguments = {"action": "read", "run_dir": str(tmp_path), "whole": [], "known": known}
    assert len(json.dumps(arguments)) > 600_000
    assert run_remote("control.py", arguments)["more"] == {}


def mesh_arguments(me: str, peers: dict[str, str], ports: list[int], **more: Any) -> dict[str, Any]:
    addresses = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}
    return {
        "me": me,
        "address": addresses[me],
        "ports": ports,
        "peers": {name: addresses[name] for name in peers},
        "trial": "word",
        "deadline_s": 50.0,
        "mtu": 1500,
    } | more


def run_mesh(members: dict[str, dict[str, Any]]) -> dict[str, Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        answers = pool.map(lambda arguments: run_remote("mesh.py", arguments), members.values())
        return dict(zip(members, answers, strict=True))


@pytest.mark.sshd
def test_nodes_that_reach_each_other_say_so() -> None:
    ports = [free_port(), free_port()]
    names = dict.fromkeys("abc", "")
    members = {me: mesh_arguments(me, {n: "" for n in names if n != me}, ports) for me in names}
    good = {"failed": {}, "largest_packet": 1500}
    assert run_mesh(members) == {
        me: {
            "bind_error": None,
            "port_taken": False,
            "pairs": {peer: good for peer in names if peer != me},
        }
        for me in names
    }


def run_mesh_here(members: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run the members in this process, so that they start at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        answers = pool.map(lambda arguments: Mesh(arguments).run(), members.values())
        return dict(zip(members, answers, strict=True))


@pytest.mark.sshd
def test_a_port_that_only_one_listens_on_is_named_by_the_other() -> None:
    shared, other = free_port(), free_port()
    members = {
        "a": mesh_arguments("a", {"b": ""}, [shared, other], deadline_s=6.0),
        "b": mesh_arguments("b", {"a": ""}, [shared], deadline_s=6.0),
    }
    answers = run_mesh_here(members)
    assert answers["a"]["pairs"]["b"]["failed"] == {str(other): "Connection refused"}
    assert answers["b"]["pairs"]["a"]["failed"] == {}


@pytest.mark.sshd
def test_a_stranger_is_not_taken_for_a_peer() -> None:
    port = free_port()
    members = {
        "a": mesh_arguments("a", {"b": ""}, [port], deadline_s=6.0),
        "b": mesh_arguments("b", {"a": ""}, [port], deadline_s=6.0, trial="another"),
    }
    answers = run_mesh_here(members)
    assert list(answers["a"]["pairs"]["b"]["failed"]) == [str(port)]


def test_a_port_that_is_taken_is_worth_another_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        arguments = mesh_arguments("a", {"b": ""}, [port], address="127.0.0.1")
        answer = run_mesh({"a": arguments})["a"]
    assert answer["port_taken"] and f"127.0.0.1 port {port}" in answer["bind_error"]


def test_an_address_that_is_not_here_cannot_be_listened_on() -> None:
    arguments = mesh_arguments("a", {"b": ""}, [free_port()], address="192.0.2.1")
    assert "192.0.2.1 port" in run_mesh({"a": arguments})["a"]["bind_error"]


def test_run_keys_are_kept_apart_by_their_whole_name(tmp_path: Path) -> None:
    def act(**arguments: Any) -> Any:
        return run_remote("run_key.py", arguments, home=tmp_path)

    path = tmp_path / ".ssh" / "authorized_keys"
    for name in ("r", "r1"):
        public = f"ssh-ed25519 AAAA tileforge-run:{name}"
        act(action="trust", public=public, head="127.0.0.1", is_head=True, lasts_s=60)
    before = path.read_text(encoding="utf-8")
    assert len(before.splitlines()) == 2
    act(action="forget", names=["r"], keeps_names=False)
    assert path.read_text(encoding="utf-8") == before.splitlines(keepends=True)[1]
    assert act(action="forget", names=["none"], keeps_names=True) == {}
    assert not (tmp_path / ".ssh" / "tileforge" / "none").exists()


def test_other_people_s_keys_stay_as_they_are_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / ".ssh" / "authorized_keys"
    path.parent.mkdir()
    others = b"# caf\xe9\n\nssh-rsa AAAA ada\x0b@x\n"
    path.write_bytes(others + b"restrict ssh-ed25519 AAAA tileforge-run:r.00000000\n")
    forget = {"action": "forget", "names": ["r.00000000"], "keeps_names": False}
    run_remote("run_key.py", forget, home=tmp_path)
    assert path.read_bytes() == others


def make_socket(path: Path) -> None:
    """Create a socket's file, also at a path over the limit of 107 bytes."""
    folder = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


LOCK_DAMAGE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a socket": make_socket,
}


@pytest.mark.parametrize("way", LOCK_DAMAGE)
def test_what_lies_in_an_old_run_s_lock_s_place_keeps_no_other_run_from_the_node(
    tmp_path: Path, way: str
) -> None:
    runs = tmp_path / "tileforge" / "runs"
    for name in ("old", "new"):
        (runs / name).mkdir(parents=True)
    LOCK_DAMAGE[way](runs / "old" / "supervisor.lock")
    with (runs / "new" / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = ["old.00000000", "new.00000000"]
        for name in names:
            (tmp_path / ".ssh" / "tileforge" / name).mkdir(parents=True)
        dead = run_remote("run_key.py", {"action": "dead", "names": names}, home=tmp_path)
        claim = {"action": "claim", "run_dir": str(runs / "old"), "name": names[0]}
        assert run_remote("control.py", claim)["running"] == "new"
        assert run_remote("look.py", {"action": "running"}, home=tmp_path)["running"] == "new"
    assert dead == {"names": ["old.00000000"]}


def try_out(tmp_path: Path, *argv: str, deadline_s: float = 20.0) -> Any:
    arguments: dict[str, Any] = {"ssh": [], "workers": {}}
    arguments |= {"hosts_file": str(tmp_path / "hosts")}
    arguments |= {"hosts": "10.0.0.2\n", "argv": argv, "environment": {"OURS": "1"}}
    arguments |= {
        "path": str(tmp_path),
        "without": ["SLURM_"],
        "keeps": [],
        "deadline_s": deadline_s,
    }
    return run_remote("mesh.py", arguments)


def test_a_trial_has_its_environment_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    words = 'cat "$1"; echo "$OURS" "${SLURM_JOB_ID-none}" "${PATH%%:*}"; echo oh >&2; exit 3'
    answer = try_out(tmp_path, "sh", "-c", words, "sh", str(tmp_path / "hosts"))
    assert answer["stdout"] == f"10.0.0.2\n1 none {tmp_path}\n"
    assert (answer["status"], answer["late"], answer["stderr"]) == (3, False, "oh\n")


def test_a_trial_that_hangs_ends_at_its_deadline_with_all_it_started(tmp_path: Path) -> None:
    # Like mpirun: a script that waits for another process.
    answer: dict[str, Any] = {"stdout": ""}
    for deadline_s in (0.5, 5, 50):  # a busy machine can take longer to start it
        if not answer["stdout"]:
            words = ("sh", "-c", "sleep 1000 & echo $!; wait")
            answer = try_out(tmp_path, *words, deadline_s=deadline_s)
    assert (answer["status"], answer["late"]) == (None, True)
    stat = Path("/proc", str(int(answer["stdout"])), "stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), what="its end")


def test_a_stop_is_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "is_held", lambda _: True)
    monkeypatch.setattr(control, "supervisors", lambda _: [7])
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / f".stop.json.{os.getpid()}.partial").symlink_to(victim)
    control.send(tmp_path, [], {"by": "me"})
    assert victim.read_text() == "theirs"
    stop = tmp_path / "stop.json"
    assert json.loads(stop.read_text()) == {"by": "me", "pids": [7]} and not stop.is_symlink()
