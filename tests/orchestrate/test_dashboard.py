"""`dashboard`: pages of a head through a real sshd, pages of a local run, and missing pages."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from payload.core.errors import PreflightError, UsageError
from payload.monitor.local import local_stack, with_random_hosts
from payload.monitor.tunnel import forwarded
from payload.orchestrate.commands import dashboard
from payload.orchestrate.commands.run_commands_options import DashboardOptions
from payload.orchestrate.ssh.cluster import Cluster, connect_to
from payload.orchestrate.ssh.remote_calls import Login
from payload.run_record.run_files import RunPaths
from tests.orchestrate.conftest import PATIENT, StartSshd
from tests.orchestrate.sshd import make_cluster
from tests.supervise.planned import REPO, plan_stand_in, wait_for
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

BIG = b"x" * 3_000_000


@contextmanager
def page(path: str) -> Iterator[int]:
    """Serve 200 for one path, 404 for others, on a loopback port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's name
            self.send_response(200 if self.path == path else 404)
            self.end_headers()
            self.wfile.write(BIG)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def closed() -> Iterator[int]:
    """Hold a loopback port that refuses connections.

    Head and operator share one machine here, so the tunnel could use a free port itself.
    """
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def options(**more: object) -> DashboardOptions:
    known: dict[str, Any] = {"run": None, "runs_dir": Path("runs"), "inventory": None}
    return DashboardOptions(**{**known, "ssh_key": None, "open": False, **more})


@pytest.mark.sshd
def test_a_port_of_the_head_comes_here_whole_and_for_several_at_once(
    start_sshd: StartSshd, login: Login
) -> None:
    head = start_sshd("node-0", "127.0.0.2")
    with (
        page("/a") as there,
        Cluster(make_cluster(head.node), login=login, env={}, deadlines=PATIENT) as cluster,
        closed() as nobody,
        forwarded(cluster.connect(head.node), [there, nobody]) as (here, dead),
    ):
        assert here != there  # the page itself uses the port: all is on one machine
        answers: list[bytes] = []

        def fetch() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{here}/a", timeout=DEADLINE_S) as answer:
                answers.append(answer.read())

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [BIG] * 4
        with pytest.raises(OSError):  # reset or closed: no server
            urllib.request.urlopen(f"http://127.0.0.1:{dead}/a", timeout=DEADLINE_S)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{here}/a", timeout=DEADLINE_S)


@pytest.mark.sshd
def test_a_head_s_pages_are_named_and_one_without_any_is_told(
    start_sshd: StartSshd, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = start_sshd("node-0", "127.0.0.2")
    cluster = partial(connect_to, make_cluster(head.node), ssh_key=login.key, env=os.environ)
    with page("/api/health") as grafana, page("/-/ready") as prometheus:
        monkeypatch.setattr(dashboard, "GRAFANA_PORT", grafana)
        monkeypatch.setattr(dashboard, "PROMETHEUS_PORT", prometheus)
        with dashboard._cluster_pages(cluster(), "mine") as pages:
            assert len(pages) == 2
            assert pages[0].endswith("/d/tileforge-run?var-run=mine")
            assert pages[1].endswith("/alerts")
    with closed() as nobody, closed() as neither:
        monkeypatch.setattr(dashboard, "GRAFANA_PORT", nobody)
        monkeypatch.setattr(dashboard, "PROMETHEUS_PORT", neither)
        with (
            pytest.raises(PreflightError, match="neither Grafana nor Prometheus"),
            dashboard._cluster_pages(cluster(), "mine"),
        ):
            pass


def test_without_prometheus_the_command_says_what_to_install(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run")
    env = {"PATH": str(tmp_path)}
    with (
        pytest.raises(PreflightError, match="apt-get install prometheus"),
        local_stack(paths, python=sys.executable, env=env, say=lambda _: None),
    ):
        pass


def test_a_program_that_does_not_come_up_is_named_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "prometheus"
    program.write_text("#!/bin/sh\necho 'no such flag' >&2; exit 2\n", encoding="ascii")
    program.chmod(0o755)
    paths = plan_stand_in(tmp_path / "run")
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    with (
        pytest.raises(PreflightError, match=r"Prometheus does not answer.*no such flag"),
        local_stack(paths, python=sys.executable, env=env, say=lambda _: None),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_all_that_it_started(
    tmp_path: Path, promtool: str, number: signal.Signals
) -> None:
    paths = plan_stand_in(tmp_path / "runs" / "one")
    command = [sys.executable, "-m", "payload.orchestrate", "dashboard", "one"]
    process = subprocess.Popen(
        [*command, "--runs-dir", str(paths.root.parent)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    address = urlsplit(process.stdout.readline().strip())
    assert re.fullmatch(r"tileforge-[0-9a-f]{16}\.localhost", address.hostname or "")
    # A browser's request; browsers resolve this name to the local machine themselves.
    request = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=DEADLINE_S)
    request.request("GET", "/-/ready", headers={"Host": address.netloc})
    assert request.getresponse().status == 200
    request.close()
    mine = children(process.pid)
    assert len(mine) >= 2
    while not (line := process.stderr.readline()).startswith("If names under .localhost"):
        assert line
    assert f", open: http://127.0.0.1:{address.port}/" in line
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine), "their ends")


def test_each_server_has_an_origin_of_its_own_and_its_pages_share_it() -> None:
    plain = [
        "http://127.0.0.1:9/d/x?var-run=1",
        "http://127.0.0.1:8/graph?a=%7B",
        "http://127.0.0.1:8/",
    ]
    pages = with_random_hosts(plain)
    hosts = [urlsplit(page).hostname for page in pages]
    assert len({"127.0.0.1", *hosts}) == 3 and hosts[1] == hosts[2]
    assert with_random_hosts(plain) != pages
    back = [re.sub("tileforge-[0-9a-f]{16}[.]localhost", "127.0.0.1", page) for page in pages]
    assert back == plain


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(each) for each in found.split()]


def test_a_cluster_s_page_gets_a_run_s_id_and_no_other_name(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "runs" / "one")
    here = {"runs_dir": paths.root.parent}
    assert dashboard._run_id(options(run="latest", **here)) == "one"
    assert dashboard._run_id(options(run="another-s", **here)) == "another-s"
    assert dashboard._run_id(options(**here)) is None
    with pytest.raises(UsageError, match="is not a run id"):
        dashboard._run_id(options(run="a&b=c", **here))


def test_a_run_on_this_machine_is_found_by_its_own_inventory(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "runs" / "one")
    inventory, found = dashboard._inventory_and_run(options(runs_dir=paths.root.parent), {})
    assert inventory.access.shares_folder and found == RunPaths(paths.root)
