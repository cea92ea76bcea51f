"""Runs on several nodes: real sshd, real mpirun over ssh, the real trainer."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from payload.core.errors import INTERRUPTED, ExitCode, PreflightError
from payload.core.interrupts import PRESS_S
from payload.launch.plan_record import LaunchPlan
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.endpoints import VARIABLE
from payload.orchestrate.runs.mirror import read_mirrored
from payload.orchestrate.sites import ssh as ssh_site
from payload.orchestrate.sites import ssh_start
from payload.orchestrate.ssh import files, node_code, start_claim
from payload.orchestrate.ssh.connection import Connection
from payload.run_record.checkpoint_manifest_hashes import known_hashes, note_hash
from payload.run_record.run_files import RunPaths
from tests.orchestrate.cloud.fake_pulumi import FakePulumi
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn
from tests.orchestrate.cluster.conftest import STEPS, Trained
from tests.orchestrate.cluster.operating import Operator, wait_for_nobody
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.orchestrate.operator import finish
from tests.orchestrate.sshd import make_cluster, make_gcloud, make_key
from tests.supervise.planned import state_of
from tests.support.launching import losses, summary
from tests.support.sampled import sampled
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]


def as_stack(operator: Operator, *arguments: str) -> tuple[int, str, list[str]]:
    """Run `up` or `down` as if the nodes were a Pulumi stack's; return Pulumi's commands, too.

    Its previews replace the head.
    """
    with CloudStandIn() as cloud:
        pulumi = FakePulumi(operator.folder / "stack")
        inventory = json.loads(operator.nodes.inventory.to_json())
        for node in inventory["nodes"]:
            node["zone"] = ZONE
            cloud.add_node(node["name"], labels={})
            kind, _, key = node["host_keys"][0].partition(" ")
            cloud.guest_attributes[node["name"]] = {kind: key}
        pulumi.outputs(inventory=inventory, project=PROJECT, region=REGION)
        pulumi.machines("node-0", "node-1", going=["node-0"])
        for word in ("up", "destroy"):
            pulumi.on(word)
        pulumi.on("config", "--json", out='{"tileforge:cluster": {"value": "test"}}')
        path = f"{pulumi.bin}:{os.environ['PATH']}"
        code, said = operator.do(*arguments, "--yes", env={"PATH": path, VARIABLE: cloud.url})
        told = [str(call[1]) for call in pulumi.calls()]
    shutil.rmtree(operator.folder / "stack")
    return code, said, told


def wait_for_a_look(paths: RunPaths) -> None:
    """Wait until a command updates the copy."""
    before = read_mirrored(paths)
    wait_until(lambda: read_mirrored(paths) != before, what="a look at the run")


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    with SeparateNodes(tmp_path, num_nodes=2) as nodes:
        yield Operator(tmp_path, nodes)


@pytest.fixture
def another(trained: Trained, tmp_path: Path) -> Operator:
    """A user of nodes that have the payload, from a machine without records of any run."""
    return Operator(tmp_path, trained.operator.nodes)


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold the lock; other processes wait for it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def interrupt(process: subprocess.Popen[str]) -> None:
    """Send what a terminal sends at Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)


def test_two_nodes_train_what_one_machine_trains(trained: Trained) -> None:
    operator, far = trained.operator, trained.operator.paths("far")
    assert "all-reduce over 2 ranks: " in trained.said
    assert "kernels: built on node-0, node-1" in trained.said
    numbers = LaunchPlan.load(far.plan).arithmetic
    assert numbers.compute_s is not None and numbers.compute_s > 0
    result = summary(far.root)
    assert (result["world_size"], result["nodes"], result["status"]) == (2, 2, "finished")
    assert result["ranks_identical"] is True
    assert (far.checkpoint(STEPS) / "model.safetensors").exists()
    assert far.rank_log(1).exists()
    mirrored = read_mirrored(far)
    assert mirrored is not None and mirrored.collected == far.checkpoint(STEPS).name
    local = ["run", "--run-id", "near", "--set", "launch.ranks_per_node=2"]
    code, said = operator.do(*local, *operator.set_words(f"train.steps={STEPS}"))
    assert code == ExitCode.OK, said
    assert losses(far.root) == pytest.approx(losses(operator.paths("near").root), rel=1e-5)
    wait_for_nobody(operator)
    for i in range(2):
        assert "tileforge-run:" not in (
            operator.nodes.home_of(i) / ".ssh" / "authorized_keys"
        ).read_text(encoding="ascii")
    private = operator.nodes.key.read_bytes().splitlines()[2]
    folders = [operator.folder / "runs", operator.nodes.folder / "node-0" / "home" / "tileforge"]
    written = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 50 and not [path for path in written if private in path.read_bytes()]


def test_missing_results_are_collected_before_anything_is_destroyed(
    trained: Trained,
) -> None:
    checkpoint = trained.operator.paths("far").checkpoint(STEPS)
    shutil.rmtree(checkpoint)
    code, said, told = as_stack(trained.operator, "down")
    assert code == ExitCode.OK and "1/3 collect: 1 run(s) collected" in said, said
    assert (checkpoint / "model.safetensors").exists()
    assert told == ["stack", "stack", "destroy"]


def test_another_operator_s_runs_are_collected_before_anything_is_destroyed(
    trained: Trained, another: Operator, tmp_path: Path
) -> None:
    code, said = another.do(*another.run_words("one", "train.steps=2"))
    assert code == ExitCode.OK, said
    (tmp_path / "b").mkdir()
    rival = Operator(tmp_path / "b", another.nodes)
    shutil.copytree(another.paths("one").root, rival.paths("one").root, symlinks=True)
    head = RunPaths(another.nodes.home_of(0) / "tileforge" / "runs" / "one")
    for paths, step in ((head, 1), (rival.paths("one"), 2)):
        note_hash(paths, f"step_{step:08d}", f"{step:064x}")
    code, said = rival.do(*rival.run_words("one", "train.steps=4"), "--resume", "one")
    assert code == ExitCode.OK and not another.paths("one").checkpoint(4).exists(), said
    # What either knew of the head's checkpoints, both know: the head may be a new machine.
    for paths in (head, rival.paths("one")):
        assert known_hashes(paths).by_name().keys() == {"step_00000001", "step_00000002"}
    # A run that this machine has never seen cannot be collected without its inventory.
    code, said, told = as_stack(another, "down")
    assert code == ExitCode.CONFIG and told == ["stack", "stack"], said
    assert "removed or damaged): far, so nothing was destroyed" in said, said
    mine = another.paths("far").root
    shutil.copytree(trained.operator.paths("far").root, mine, symlinks=True)
    code, said, told = as_stack(another, "down")
    assert code == ExitCode.OK and "1/3 collect: 1 run(s) collected" in said, said
    assert (another.paths("one").checkpoint(4) / "model.safetensors").exists()
    assert summary(another.paths("one").root)["steps"] == 4 and told == [
        "stack",
        "stack",
        "destroy",
    ]


def test_a_run_continues_without_the_operator_and_stops_on_request(operator: Operator) -> None:
    words = operator.run_words("one", "train.steps=100000", "train.checkpoint_every=0")
    first = operator.start(*words)
    metrics = operator.paths("one").metrics
    operator.wait_for_a_step()
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=DEADLINE_S)
    # Again: the run is followed, not started.
    again = operator.start(*words)
    seen = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > seen, what="steps to arrive")
    again.send_signal(signal.SIGINT)
    _, err = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == INTERRUPTED and "detached; run one continues" in err, err
    assert "run one is active on this cluster, so nothing was started" in err
    logins = operator.nodes.log_of(0).count("Accepted publickey")
    follower = operator.start("logs", "one", "-f")
    for _ in range(2):
        wait_for_a_look(operator.paths("one"))
    assert operator.nodes.log_of(0).count("Accepted publickey") == logins + 1
    code, said = operator.do("status")
    assert code == ExitCode.OK and "running" in said, said
    code, said, told = as_stack(operator, "down")
    assert code == ExitCode.CONFIG and "run one is active, so nothing was destroyed" in said, said
    assert told == ["stack", "stack"]
    # In a folder without the run, the head names it.
    own = operator.folder / ".cluster" / "test" / "id_ed25519"
    shutil.copy(operator.nodes.key, own)
    code, said, told = as_stack(operator, "down", "--runs-dir", "none")
    assert code == ExitCode.CONFIG and "run one is active, so nothing was destroyed" in said, said
    assert "attach one --inventory stack" in said and told == ["stack", "stack"]
    code, said = operator.do(*operator.run_words("two"), "--runs-dir", "none")
    assert code == ExitCode.CONFIG, said
    assert "run one is active on this cluster, and was not started from" in said
    assert "attach one --inventory" in said and not (operator.folder / "none").exists(), said
    code, said, told = as_stack(operator, "up")
    assert code == ExitCode.CONFIG and "run one is active, so nothing was built" in said, said
    assert "up" not in told
    code, said = operator.do("stop", "one", "--grace", "120")
    assert code == ExitCode.OK and "no process of the run is left on any node" in said, said
    assert not operator.nodes.processes()
    assert state_of(operator.paths("one")).grace_s == 120.0
    code, said = finish(follower)
    assert code == ExitCode.OK, said
    assert said == operator.paths("one").rank_log(0).read_text(encoding="utf-8")
    result = summary(operator.paths("one").root)
    assert result["status"] == "stopped"
    assert len(losses(operator.paths("one").root)) == result["steps"]
    code, said = operator.do("run", "--resume", "one")
    assert code == ExitCode.CONFIG and "is on a cluster" in said, said
    last = result["steps"] + 2
    words = operator.run_words("one", f"train.steps={last}")
    code, said = operator.do(*words, "--resume", "one")
    assert code == ExitCode.OK, said
    assert len(losses(operator.paths("one").root)) == last
    assert operator.paths("one").checkpoint(last).is_dir()
    words = operator.run_words("one", "train.steps=100000")
    code, said = operator.do(*words, "--resume", "one", "--detach")
    assert code == ExitCode.OK and "detached; run one continues" in said, said
    code, said = operator.do("stop", "one", "--force")
    assert code == ExitCode.OK and "no process of the run is left on any node" in said, said
    assert not operator.nodes.processes()


def programs_of_head(operator: Operator) -> list[str]:
    """The programs of node/ that run on the head."""
    lines = operator.nodes.processes_of(0)
    return [line for line in lines if line.startswith("python3 -I") and "control.py" in line]


def test_ctrl_c_shows_how_to_attach_and_keeps_the_tunnel_for_a_second_one_that_stops_the_run(
    another: Operator, tmp_path: Path
) -> None:
    head, worker = another.nodes.inventory.nodes
    another.write_inventory(make_cluster(replace(head, zone="here"), worker, kind="iap"))
    tunnels = make_gcloud(tmp_path, head).with_suffix(".starts")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    there = another.nodes.home_of(0) / "tileforge" / "runs"
    words = another.run_words("one", "train.steps=100000", "train.checkpoint_every=0")
    with ExitStack() as starting:
        with held(folders_of_keys(another)[1] / ".tileforge.lock"):
            process = another.start(*words, env=env)
            wait_for_a_key(another)
            starting.enter_context(held(there / ".start.lock"))
        wait_until(
            lambda: len(programs_of_head(another)) > 1,  # The claim is of the other attempt.
            what="the head to be told to start",
        )
        interrupt(process)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130 and err.splitlines()[-1] == "interrupted", err
    assert "unknown whether the run has begun; if so, run one continues. Follow it with: " in err, (
        err
    )
    # No process holds the claim of its start any more.
    wait_for_nobody(another)
    code, said = another.do(*words, "--resume", "one", "--detach", env=env)
    assert code == ExitCode.OK and "was removed from the nodes" in said, said
    process = another.start("attach", "one", env=env)
    another.wait_for_a_step()
    opened = tunnels.read_text(encoding="ascii")
    interrupt(process)
    assert process.stderr is not None
    while "detaching; Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(PRESS_S)
    interrupt(process)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED and "status           stopped" in out, out + err
    assert tunnels.read_text(encoding="ascii") == opened
    steps = summary(another.paths("one").root)["steps"]
    assert another.paths("one").checkpoint(steps).is_dir()
    assert not another.nodes.processes()


def folders_of_keys(operator: Operator) -> list[Path]:
    return [operator.nodes.home_of(i) / ".ssh" for i in range(2)]


def keys_of_runs(operator: Operator) -> list[list[str]]:
    """By node: the names of the runs' keys that it lets in."""
    texts = [path / "authorized_keys" for path in folders_of_keys(operator)]
    return [re.findall(r"tileforge-run:(\S+)", path.read_text(encoding="ascii")) for path in texts]


def wait_for_a_key(operator: Operator) -> None:
    """Until the head lets one in."""
    wait_until(lambda: bool(keys_of_runs(operator)[0]), what="the head to trust it")


def wait_for_a_waiter(lock: Path) -> None:
    """Until a process waits for the lock that `held` has, by proc_locks(5)."""
    file = f":{lock.stat().st_ino} "
    wait_until(
        lambda: any(
            "->" in line and file in line
            for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()
        ),
        what="the worker to wait for its lock",
    )


def test_no_key_outlives_a_run_that_is_not_started(another: Operator) -> None:
    words = another.run_words("one")
    folders = folders_of_keys(another)
    lock = folders[1] / ".tileforge.lock"
    with held(lock):
        process = another.start(*words)
        wait_for_a_key(another)
        interrupt(process)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130 and err.splitlines()[-1] == "interrupted", err
    assert keys_of_runs(another) == [[], []] and not list((folders[0] / "tileforge").iterdir())
    assert not another.paths("one").root.exists()
    # Now the key can neither be copied to the worker nor removed from it.
    lock.unlink()
    lock.mkdir()
    try:
        code, said = another.do(*words)
    finally:
        lock.rmdir()
    assert code == ExitCode.PREFLIGHT, said
    assert "error: installing the run's key failed on 1 node(s):\n  node-1: " in said
    assert "warning: removing the run's key failed on 1 node(s):\n  node-1: " in said
    assert keys_of_runs(another) == [[], []]
    # The head keeps the key's name, without the key, until a later command has reached the worker.
    (kept,) = (folders[0] / "tileforge").iterdir()
    assert not list(kept.iterdir())
    code, said = another.do(*another.on_cluster("preflight"), "--quick")
    assert code == ExitCode.OK and f"the stale key {kept.name} was removed" in said, said
    assert not list((folders[0] / "tileforge").iterdir())


@pytest.mark.parametrize("command", sampled(("preflight", "run", "stop"), sample=("run",)))
def test_the_key_of_an_operator_who_was_killed_before_the_supervisor_is_cleared_away(
    another: Operator, command: str
) -> None:
    lock = folders_of_keys(another)[1] / ".tileforge.lock"
    with held(lock):
        process = another.start(*another.run_words("one"))
        wait_for_a_key(another)
        # The worker's part has begun as well: it continues when the operator is gone.
        wait_for_a_waiter(lock)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
    wait_for_nobody(another)
    before = keys_of_runs(another)
    assert before[0] == before[1] and before[0][0].startswith("one.")
    if command == "preflight":
        code, said = another.do(*another.on_cluster("preflight"), "--quick")
    elif command == "run":
        code, said = another.do(*another.run_words("two", "train.steps=2"))
    else:
        shutil.copytree(another.nodes.folder / "runs" / "far", another.paths("far").root)
        code, said = another.do("stop", "far")
    assert code == ExitCode.OK, said
    assert command == "stop" or f"the stale key {before[0][0]} was removed" in said, said
    assert keys_of_runs(another) == [[], []]
    assert not list((folders_of_keys(another)[0] / "tileforge").iterdir())


def test_of_two_who_resume_one_run_at_once_one_does_and_the_other_breaks_nothing(
    another: Operator, tmp_path: Path
) -> None:
    endless = ("train.steps=100000", "train.checkpoint_every=5")
    code, said = another.do(*another.run_words("one", "train.steps=6"))
    assert code == ExitCode.OK, said
    (tmp_path / "b").mkdir()
    rival = Operator(tmp_path / "b", another.nodes)
    shutil.copytree(another.paths("one").root, rival.paths("one").root)
    processes = [
        operator.start(*operator.run_words("one", *endless), "--resume", "one", "--detach")
        for operator in (another, rival)
    ]
    wait_until(
        lambda: any(process.poll() is not None for process in processes),
        what="one of them to have started it",
    )
    (name,), same = keys_of_runs(another)
    assert same == [name]
    there = RunPaths(another.nodes.home_of(0) / "tileforge" / "runs" / "one")
    assert f"tileforge/{name}/ssh_config" in there.plan.read_text(encoding="utf-8")
    code, said = another.do("stop", "one")
    assert code == ExitCode.OK and "no process of the run is left on any node" in said, said
    ends = [finish(process) for process in processes]
    won = [text for _, text in ends if "detached; run one continues" in text]
    lost = [text for _, text in ends if "so nothing was started; following that run" in text]
    assert len(won) == len(lost) == 1, ends
    assert keys_of_runs(another) == [[], []]


def test_no_rank_outlives_a_supervisor_that_is_killed(operator: Operator) -> None:
    endless = ("train.steps=100000", "train.checkpoint_every=0")
    code, said = operator.do(*operator.run_words("one", *endless), "--detach")
    assert code == ExitCode.OK and "detached; run one continues" in said, said
    far = operator.nodes.home_of(1) / "tileforge" / "runs" / "one" / "progress"
    wait_until(lambda: any(far.glob("*.json")), what="the worker's rank")
    operator.nodes.kill(0, "payload.supervise ")
    wait_for_nobody(operator)
    code, said = operator.do("status", "one")
    assert code == ExitCode.OK and "the supervisor was killed" in said, said


def at_first_call(
    module: ModuleType, name: str, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let something happen just before a function of the product does its work."""
    real, calls = getattr(module, name), itertools.count()

    def after_it(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 0:
            happens()
        return real(*arguments, **more)

    monkeypatch.setattr(module, name, after_it)


def run_here(operator: Operator, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run two steps, by a command in this process."""
    monkeypatch.chdir(operator.folder)
    return main([*operator.run_words("one", "train.steps=2"), *words], os.environ)


@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        (files, "put", "(writing|running `sha256sum`)"),
        pytest.param(*(ssh_site, "install_run_key", "running `python3`"), marks=pytest.mark.seeds),
        pytest.param(*(ssh_start, "unpack", "running `(env|mkdir)`"), marks=pytest.mark.seeds),
    ],
    ids=["data", "key", "run-folder"],
)
def test_a_start_whose_connection_breaks_reconnects_and_continues(
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    name: str,
    place: str,
) -> None:
    at_first_call(module, name, lambda: operator.nodes.cut_sessions(0), monkeypatch)
    code = run_here(operator, monkeypatch)
    said = capsys.readouterr().err
    assert code == ExitCode.OK, said
    (note,) = [line for line in said.splitlines() if "Reconnecting" in line]
    assert re.match(rf"note: node-[01]: the connection broke while {place}", note), said
    assert summary(operator.paths("one").root)["status"] == "finished"
    assert keys_of_runs(operator) == [[], []]


def test_a_start_whose_second_connection_fails_is_20_and_can_be_repeated(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_the_worker() -> None:
        operator.nodes.kill_node(1)
        operator.nodes.cut_sessions(0)

    at_first_call(ssh_start, "unpack", lose_the_worker, monkeypatch)
    code = run_here(operator, monkeypatch)
    said = capsys.readouterr().err
    assert code == ExitCode.SSH_UNREACHABLE, said
    assert "cannot be reached from node-0" in said.partition("Reconnecting.")[2], said
    assert not operator.paths("one").root.exists()
    # The head answers: the key's name stays for a later command that reaches the worker.
    head = operator.nodes.home_of(0) / ".ssh" / "tileforge"
    assert keys_of_runs(operator)[0] == [] and not list(head.glob("*/*"))


@pytest.mark.seeds
def test_a_resume_whose_second_connection_fails_leaves_the_run_as_it_was(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_the_worker() -> None:
        operator.nodes.kill_node(1)
        operator.nodes.cut_sessions(0)

    def files_here() -> dict[Path, bytes]:
        found = operator.paths("one").root.rglob("[!.]*")
        return {path: path.read_bytes() for path in found if path.is_file()}

    assert run_here(operator, monkeypatch) == ExitCode.OK, capsys.readouterr().err
    before = files_here()
    at_first_call(ssh_start, "unpack", lose_the_worker, monkeypatch)
    code = run_here(operator, monkeypatch, "--set", "train.steps=4", "--resume", "one")
    said = capsys.readouterr().err
    assert code == ExitCode.SSH_UNREACHABLE and "Reconnecting." in said, said
    after = files_here()
    assert not [path for path in before | after if before.get(path) != after.get(path)]


@pytest.mark.seeds
def test_a_start_whose_worker_connection_breaks_reconnects_and_continues(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_first_call(ssh_start, "unpack", lambda: operator.nodes.cut_sessions(1), monkeypatch)
    code = run_here(operator, monkeypatch)
    said = capsys.readouterr().err
    assert code == ExitCode.OK, said
    (note,) = [line for line in said.splitlines() if "Reconnecting" in line]
    assert re.match(r"note: node-1: the connection broke while running", note), said
    assert "node-0" not in note
    assert keys_of_runs(operator) == [[], []]


@pytest.mark.seeds
def test_a_start_whose_connection_breaks_during_the_claim_waits_and_continues(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = operator.nodes.home_of(0) / "tileforge" / "runs" / ".start.lock"
    lock.parent.mkdir(parents=True)
    with ExitStack() as stack:
        stack.enter_context(held(lock))

        def break_it() -> None:
            wait_for_a_waiter(lock)  # which has the claim, but cannot report it
            operator.nodes.cut_sessions(0)

        breaker = threading.Thread(target=break_it)
        breaker.start()
        # Once the claim was refused for the first attempt, that attempt may end.
        at_first_call(start_claim, "_holder", stack.close, monkeypatch)
        code = run_here(operator, monkeypatch)
        breaker.join()
    said = capsys.readouterr().err
    assert code == ExitCode.OK, said
    assert "note: node-0: the connection broke while running `python3`" in said, said
    assert "node-0: the broken connection still holds the claim; waiting" in said, said
    assert keys_of_runs(operator) == [[], []]


def test_a_start_that_fails_for_another_reason_beside_a_connection_is_not_repeated(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unpack(connection: Connection, *arguments: Any) -> None:
        if connection.node.name == "node-0":
            raise PreflightError("node-0: its disk is full")
        operator.nodes.cut_sessions(1)
        node_code.unpack(connection, *arguments)

    monkeypatch.setattr(ssh_start, "unpack", unpack)
    code = run_here(operator, monkeypatch)
    said = capsys.readouterr().err
    assert code == ExitCode.SSH_UNREACHABLE and "Reconnecting" not in said, said
    assert "\n  node-0: its disk is full\n  node-1: the connection broke while" in said, said
    assert not operator.paths("one").root.exists()


def test_a_wrong_host_key_is_22_and_nothing_is_started(operator: Operator, tmp_path: Path) -> None:
    head, worker = operator.nodes.inventory.nodes
    other = make_key(tmp_path / "other")
    inventory = replace(operator.nodes.inventory, nodes=(head, replace(worker, host_keys=(other,))))
    operator.nodes.write_inventory(operator.inventory, inventory)
    code, said = operator.do(*operator.run_words("one"))
    assert code == ExitCode.HOST_KEY and "node-1: host key" in said, said
    assert not (operator.nodes.home_of(0) / "tileforge").exists()
    assert not operator.paths("one").root.exists()
    assert "Accepted" not in operator.nodes.log_of(1)


def test_a_run_whose_files_are_damaged_here_and_on_its_nodes_is_resumed(another: Operator) -> None:
    code, said = another.do(*another.run_words("one", "train.steps=2"))
    assert code == ExitCode.OK, said
    here = another.paths("one")
    for path in (here.inventory, here.root / "mirror.json"):
        path.write_text("half")
    shutil.rmtree(here.logs)
    here.logs.touch()
    head, worker = (another.nodes.home_of(i) / "tileforge/runs/one" for i in range(2))
    for path in (here.summary, head / "plan.json", head / "logs/supervisor.log", worker / "hosts"):
        path.unlink()
        (path / "x").mkdir(parents=True)
    shutil.rmtree(worker / "logs")
    os.mkfifo(worker / "logs")
    words = [*another.run_words("one", "train.steps=4"), "--resume", "one"]
    (here.root / ".mirror.lock").unlink()
    (here.root / ".mirror.lock").symlink_to("nowhere")
    code, refused = another.do(*words)
    assert code == ExitCode.CONFIG and ".mirror.lock is a symlink" in refused, refused
    assert keys_of_runs(another) == [[], []]
    (here.root / ".mirror.lock").unlink()
    code, said = another.do(*words)
    assert code == ExitCode.OK, said
    assert summary(here.root)["steps"] == 4
    assert "resuming after step 2" in here.rank_log(0).read_text()
    assert keys_of_runs(another) == [[], []]
    assert f"warning: {here.inventory}" in refused
    for path in (here.summary, head / "plan.json", worker / "hosts", worker / "logs"):
        assert path.with_name(f"{path.name}.damaged-1").exists()
