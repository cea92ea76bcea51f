"""Following a run over connections that break."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from payload.config.training_sections import TrainSection
from payload.core.errors import SshUnreachableError
from payload.orchestrate.follow.follow import ask_to_stop
from payload.orchestrate.runs.mirror import read_mirrored
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.orchestrate.sites import ssh_run as cluster_run
from payload.orchestrate.sites.ssh_run import ClusterRun, Watch, update_with_retries
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.remote_calls import Login
from payload.orchestrate.terminal.console import LiveLine, text_console
from payload.run_record.run_files import RunPaths, StopRequest, read_json
from tests.orchestrate.conftest import PATIENT, StartSshd
from tests.orchestrate.run_copies import write_ranks
from tests.orchestrate.sshd import Sshd, make_cluster

pytestmark = pytest.mark.sshd


@pytest.fixture
def head(start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    monkeypatch.setattr(cluster_run, "_RETRY_S", 0.1)
    monkeypatch.setattr(cluster_run, "_RECONNECT_S", 1.0)
    return start_sshd("node-0", "127.0.0.2")


@pytest.fixture
def run(head: Sshd, login: Login, tmp_path: Path) -> RemoteRun:
    """A run with only one step on its node."""
    there, here = head.home / "runs" / "one", RunPaths(tmp_path / "here" / "one")
    there.mkdir(parents=True)
    (there / "metrics.jsonl").write_text('{"step": 1}\n', encoding="ascii")
    write_ranks(here, "node-0")
    inventory = make_cluster(head.node)

    def connect() -> Cluster:
        return Cluster(inventory, login=login, env={}, deadlines=PATIENT)

    return RemoteRun(here, inventory, run_dir=PurePosixPath(there), key=login.key, connect=connect)


def test_a_broken_connection_is_opened_again(
    run: RemoteRun, head: Sshd, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.refresh() is False
    for process in head.processes()[1:]:
        os.kill(process, signal.SIGKILL)
    with LiveLine(text_console(stderr=True), train=TrainSection(steps=1), nodes=1) as live:
        assert update_with_retries(run, say=live.say).alive is False
    run.close()
    assert "connection lost, retrying for" in capsys.readouterr().err
    assert run.paths.metrics.read_text(encoding="ascii") == '{"step": 1}\n'
    mirrored = read_mirrored(run.paths)
    assert mirrored is not None and not mirrored.alive


def test_a_head_that_stays_unreachable_ends_with_the_attach_command(
    run: RemoteRun, head: Sshd
) -> None:
    head.stop()
    with (
        LiveLine(text_console(stderr=True), train=TrainSection(steps=1), nodes=1) as live,
        pytest.raises(SshUnreachableError, match=r"node-0: .*orchestrate attach one"),
    ):
        update_with_retries(run, say=live.say)
    run.close()


def test_a_run_that_has_started_is_left_without_a_connection(run: RemoteRun, head: Sshd) -> None:
    head.stop()
    words = ClusterRun(run, talk=text_console(stderr=True)).detached()
    assert words is not None and "orchestrate attach one" in words
    run.close()


def test_the_operator_need_not_wait_for_a_connection(
    run: RemoteRun, head: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.stop()
    monkeypatch.setattr(cluster_run, "_RECONNECT_S", 1e6)
    with (
        LiveLine(text_console(stderr=True), train=TrainSection(steps=1), nodes=1) as live,
        pytest.raises(SshUnreachableError, match="attach one"),
    ):
        update_with_retries(run, say=live.say, interrupted=lambda: True)
    run.close()


def test_a_head_that_is_gone_is_watched_for_a_while_only(
    run: RemoteRun, head: Sshd, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(run, [], seen_unix=time.time() - 60)
    head.stop()
    assert watch() is True  # the local copy can be shown
    with pytest.raises(SshUnreachableError, match=r"node-0: .*orchestrate attach one"):
        watch()
    said = capsys.readouterr().err
    assert "warning: state of 1:00 ago: node-0: " in said and "connection lost" in said
    run.close()


SUPERVISOR = """\
import fcntl, json, os, signal
asks = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, asks)
lock = open("supervisor.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
with open("state.json", "w") as state:
    json.dump({"supervisor_pid": os.getpid()}, state)
print("at work", flush=True)
print(signal.sigwait(asks).name, flush=True)
"""


def test_a_stop_reaches_the_supervisor_over_a_new_connection_where_the_old_one_broke(
    run: RemoteRun, head: Sshd
) -> None:
    folder = head.home / "runs" / "one"
    # A supervisor is known by its command line.
    argv = [sys.executable, "-c", SUPERVISOR, "payload.supervise", "--run-dir", str(folder)]
    with (
        subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as supervisor,
        LiveLine(text_console(stderr=True), train=TrainSection(steps=1), nodes=1) as live,
    ):
        assert supervisor.stdout is not None
        try:
            assert supervisor.stdout.readline() == "at work\n"
            assert run.refresh() is True
            for process in head.processes()[1:]:
                os.kill(process, signal.SIGKILL)
            assert ask_to_stop(there(run), live, handled=0) == 2
            assert supervisor.stdout.readline() == "SIGTERM\n"
            request = read_json(StopRequest, RunPaths(folder).stop_request)
            assert request == StopRequest(pids=(supervisor.pid,))
        finally:
            supervisor.kill()
    run.close()


def test_a_stop_that_cannot_be_delivered_is_reported(run: RemoteRun, head: Sshd) -> None:
    head.stop()
    with (
        LiveLine(text_console(stderr=True), train=TrainSection(steps=1), nodes=1) as live,
        pytest.raises(
            SshUnreachableError,
            match=r"the stop was not delivered: node-0: .*one continues.*orchestrate attach one",
        ),
    ):
        ask_to_stop(there(run), live, handled=2)
    run.close()


def there(run: RemoteRun) -> ClusterRun:
    """The run as the loop that follows it knows it."""
    return ClusterRun(run, talk=text_console(stderr=True))
