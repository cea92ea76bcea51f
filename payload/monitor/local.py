"""Runs Grafana and Prometheus on this machine for one run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import payload
from payload.core.errors import PreflightError
from payload.core.printable_text import one_line
from payload.core.python_processes import code_environment, module_command
from payload.run_record.run_files import RunPaths
from payload.stack.node_paths import MONITORING_FOLDER

FILES = Path(payload.__file__).parent.parent / "bootstrap" / "monitoring"
GRAFANA_PORT, PROMETHEUS_PORT = 3000, 9090
_LOOPBACK = "127.0.0.1"
_READY_S = 30.0
_END_S = 10.0
_POLL_S = 0.2

Say = Callable[[str], None]


def stay(pages: Sequence[str], *, show: Say, say: Say, in_browser: bool) -> None:
    """Print the addresses and wait until Ctrl-C. `show` prints the first address, `say` the others.

    The addresses in `pages` have the host 127.0.0.1. Browsers are given random host names instead.
    """
    named = with_random_hosts(pages)
    show(named[0])
    for page in named[1:]:
        say(f"also: {page}")
    say(f"If names under .localhost do not resolve (in Safari or scripts), open: {pages[0]}")
    say("Stop with Ctrl-C.")
    if in_browser:
        webbrowser.open(named[0])
    while True:
        time.sleep(_POLL_S)


def with_random_hosts(pages: Sequence[str]) -> list[str]:
    """Replace 127.0.0.1 by a random name under .localhost for each server.

    Cookies ignore ports, so all servers on 127.0.0.1 would share cookies. Browsers resolve names
    under .localhost to this machine without DNS (RFC 6761, section 6.3), so that DNS cannot
    redirect these names.
    """
    named = [urllib.parse.urlsplit(page) for page in pages]
    names = {each.port: f"tileforge-{secrets.token_hex(8)}.localhost" for each in named}
    return [each._replace(netloc=f"{names[each.port]}:{each.port}").geturl() for each in named]


def run_page(grafana: str, run_id: str | None) -> str:
    """Return the address of the Grafana dashboard for one run, or for all runs."""
    chosen = f"?var-run={urllib.parse.quote(run_id, safe='')}" if run_id else ""
    return f"{grafana}/d/tileforge-run{chosen}"


@contextlib.contextmanager
def local_stack(
    paths: RunPaths, *, python: str, env: Mapping[str, str], say: Say, files: Path = FILES
) -> Iterator[list[str]]:
    """Run Prometheus, and Grafana if it is installed, on this machine for one run.

    The history of the run is loaded first; later metrics are scraped. `files` is the folder with
    the configuration of Prometheus and Grafana; `python` is an interpreter with the payload.
    Yields the addresses of the pages. Raises PreflightError if Prometheus is not installed.
    """
    env = code_environment(env)
    path = env.get("PATH", os.defpath)
    prometheus = shutil.which("prometheus", path=path)
    if prometheus is None:
        raise PreflightError(
            "Prometheus is not installed. On Debian or Ubuntu, install it with: "
            "sudo apt-get install prometheus prometheus-node-exporter"
        )
    with TemporaryDirectory(prefix="tileforge-dashboard-") as folder, _Programs(env) as programs:
        workspace = Path(folder)
        _copy_files(files, workspace)
        options = ["--run-dir", str(paths.root)]
        exporter = module_command("payload.monitor.exporter", *options, python=python)
        _backfill(exporter, workspace, env=env, say=say)
        # The backfilled history has the same label, so that both form one series.
        _target(
            workspace,
            "run",
            programs.first_line(exporter),
            {"instance": "run"},
        )
        node_exporter = shutil.which("prometheus-node-exporter", path=path)
        if node_exporter:
            address = f"{_LOOPBACK}:{free_port()}"
            programs.start(
                [node_exporter, f"--web.listen-address={address}"], workspace / "node.log"
            )
            _target(workspace, "machines", address, {"node": os.uname().nodename})
        prometheus_url = _start_prometheus(programs, workspace, prometheus)
        grafana_url = _start_grafana(programs, workspace, prometheus_url, path=path)
        pages = [run_page(grafana_url, paths.run_id)] if grafana_url else []
        if not grafana_url:
            say(
                "note: Grafana is not installed, so only Prometheus's own charts are shown. See "
                "https://grafana.com/docs/grafana/latest/setup-grafana/installation/"
            )
        yield [*pages, _chart_page(prometheus_url, paths.run_id), f"{prometheus_url}/alerts"]


def _copy_files(files: Path, workspace: Path) -> None:
    shutil.copytree(files, workspace, dirs_exist_ok=True)
    targets = workspace / "targets"
    targets.mkdir(exist_ok=True)
    for name in ("run", "machines", "gpus"):
        target = targets / f"{name}.json"
        if not target.exists():
            target.write_text("[]\n", encoding="utf-8")


def _target(workspace: Path, name: str, address: str, labels: Mapping[str, str]) -> None:
    where = address.removeprefix("http://").removesuffix("/metrics")
    text = json.dumps([{"targets": [where], "labels": labels}])
    (workspace / "targets" / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _backfill(
    exporter: Sequence[str], workspace: Path, *, env: Mapping[str, str], say: Say
) -> None:
    """Load the history of the run into Prometheus. Without promtool, the charts have no history."""
    promtool = shutil.which("promtool", path=env.get("PATH", os.defpath))
    if promtool is None:
        return
    history = workspace / "history"
    with history.open("wb") as file:
        written = subprocess.run([*exporter, "--history"], env=env, stdout=file, check=False)
    make = [
        promtool,
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        str(history),
        str(workspace / "data"),
    ]
    made = subprocess.run(make, capture_output=True, text=True, check=False)
    if written.returncode or made.returncode:
        reason = one_line(made.stderr.strip().rpartition("\n")[2]) or "no reason given"
        if written.returncode:
            reason = "see the error above"
        say(f"note: the charts begin now: the run's history cannot be loaded: {reason}")


def _start_prometheus(programs: _Programs, workspace: Path, program: str) -> str:
    """Start Prometheus with the files in `workspace`; return its address."""
    url = f"http://{_LOOPBACK}:{free_port()}"
    programs.start(
        [
            program,
            f"--config.file={workspace / 'prometheus.yml'}",
            f"--storage.tsdb.path={workspace / 'data'}",
            # Otherwise the history of a run older than two weeks is deleted.
            "--storage.tsdb.retention.time=50y",
            f"--web.listen-address={url.removeprefix('http://')}",
        ],
        workspace / "prometheus.log",
    )
    programs.wait_for(f"{url}/-/ready", "Prometheus", workspace / "prometheus.log")
    return url


def _start_grafana(
    programs: _Programs, workspace: Path, prometheus_url: str, *, path: str
) -> str | None:
    """Start Grafana and return its address; return None if it is not installed."""
    program = shutil.which("grafana", path=path)
    if program is None:
        return None
    port = free_port()
    programs.start(
        [program, "server", "--homepath", _grafana_home(program)],
        workspace / "grafana.log",
        grafana_settings(workspace, port=port, prometheus_url=prometheus_url),
    )
    url = f"http://{_LOOPBACK}:{port}"
    programs.wait_for(f"{url}/api/health", "Grafana", workspace / "grafana.log")
    return url


def grafana_settings(workspace: Path, *, port: int, prometheus_url: str) -> dict[str, str]:
    """Write the addresses into Grafana's provisioning files, and return its environment."""
    lines = (workspace / "grafana.env").read_text(encoding="utf-8").splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    for name, before, after in (
        ("datasources", f"http://{_LOOPBACK}:{PROMETHEUS_PORT}", prometheus_url),
        ("dashboards", str(MONITORING_FOLDER), str(workspace)),
    ):
        file = workspace / "grafana" / name / "tileforge.yml"
        file.write_text(file.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    return settings | {
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_PROVISIONING": str(workspace / "grafana"),
        "GF_PATHS_DATA": str(workspace / "grafana-data"),
        "GF_PATHS_LOGS": str(workspace / "grafana-logs"),
    }


def _grafana_home(program: str) -> str:
    """Return the home folder of Grafana, as installed from its archive or its Debian package."""
    beside = Path(program).resolve().parents[1]
    return str(beside if (beside / "public").is_dir() else Path("/usr/share/grafana"))


def _chart_page(prometheus_url: str, run_id: str) -> str:
    expression = f"tileforge_loss%7Brun%3D%22{run_id}%22%7D"
    return f"{prometheus_url}/graph?g0.expr={expression}&g0.tab=0&g0.range_input=1h"


class _Programs:
    """Starts programs, and terminates them at the end of the block."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for program in reversed(self._started):
            if program.stdin is not None:
                program.stdin.close()
            program.terminate()
        for program in self._started:
            try:
                program.wait(_END_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            if program.stdout is not None:
                program.stdout.close()

    def start(self, argv: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        """Start a program with its output in `log`."""
        with log.open("wb") as file:
            self._started.append(
                subprocess.Popen(
                    argv,
                    env={**self._env, **(extra or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C reaches only this command, which terminates the programs in order.
                    start_new_session=True,
                )
            )

    def first_line(self, argv: Sequence[str]) -> str:
        """Start a program that runs until its stdin is closed; return its first line of output."""
        program = subprocess.Popen(
            argv,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(program)
        assert program.stdout is not None
        line = program.stdout.readline().decode(errors="replace").strip()
        if not line:
            raise PreflightError("the run's metrics cannot be served; see the error above.")
        return line

    def wait_for(self, url: str, name: str, log: Path) -> None:
        """Wait until the last started program answers at `url`. Raises PreflightError."""
        ends = time.monotonic() + _READY_S
        while not is_healthy(url):
            if time.monotonic() > ends or self._started[-1].poll() is not None:
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                raise PreflightError(
                    f"{name} does not answer. Last line of its log: {one_line(last)}"
                )
            time.sleep(_POLL_S)


def is_healthy(url: str) -> bool:
    """Return True if a server on this machine answers at `url` with status 200."""
    import urllib.request  # see payload/weights/hub.py

    # No proxy, because the address is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.create_server((_LOOPBACK, 0)) as holder:
        return int(holder.getsockname()[1])
