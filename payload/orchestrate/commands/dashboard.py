"""`dashboard`: Grafana and Prometheus of a cluster through SSH, or of a run on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import payload
from payload.errors import ExitCode, PreflightError, UsageError
from payload.inventory import ClusterInventory
from payload.orchestrate.run.console import text_console
from payload.orchestrate.run.store import find_run
from payload.orchestrate.sites.choose import load_cluster
from payload.orchestrate.sites.local import LocalAccess
from payload.results import LATEST, RunPaths
from payload.untrusted import RUN_ID, one_line, shown

FILES = Path(payload.__file__).parent.parent / "bootstrap" / "monitoring"
GRAFANA_PORT, PROMETHEUS_PORT = 3000, 9090
_LOOPBACK = "127.0.0.1"
_READY_S = 30.0
_END_S = 10.0
_LOOK_S = 0.2

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """Options of `dashboard`."""

    run: str | None
    runs_dir: Path
    inventory: str | None
    ssh_key: Path | None
    open: bool


def dashboard(options: DashboardOptions, access: LocalAccess) -> int:
    """Show the dashboards until Ctrl-C; return the exit code."""
    say = text_console(stderr=True).print
    inventory, paths = _what(options, access.environment())
    run_id = paths.run_id if paths is not None else _run_id(options)
    try:
        with _ended_by_sigterm():
            if paths is not None and inventory.access.shares_folder:
                with local_stack(paths, access=access, say=say) as pages:
                    _show(pages, options=options, say=say)
            else:
                with _cluster_pages(
                    inventory, replace(options, run=run_id), access.environment()
                ) as pages:
                    _show(pages, options=options, say=say)
    except KeyboardInterrupt:
        say("ended")
    return ExitCode.OK


def _what(
    options: DashboardOptions, env: Mapping[str, str]
) -> tuple[ClusterInventory, RunPaths | None]:
    """Return the cluster, and the run where it is one of this machine. Raises UsageError."""
    if options.inventory is not None:
        chosen = load_cluster(options.inventory, env=env).inventory
        if not chosen.access.shares_folder:
            return chosen, None
    paths = find_run(options.runs_dir, options.run)
    return ClusterInventory.load(paths.inventory), paths


def _run_id(options: DashboardOptions) -> str | None:
    """Return the id of the run that a cluster's page shows first. Raises UsageError.

    The cluster may have runs that nobody has followed from here.
    """
    if options.run is None or options.run == LATEST:
        return None if options.run is None else find_run(options.runs_dir, LATEST).run_id
    if not RUN_ID.fullmatch(options.run):
        raise UsageError(f"{shown(options.run)} is no run's id.")
    return options.run


def _show(pages: Sequence[str], *, options: DashboardOptions, say: Say) -> None:
    """Print the addresses, the first of them for programs, and stay until Ctrl-C."""
    text_console(stderr=False).print(pages[0])
    for page in pages[1:]:
        say(f"also: {page}")
    say("Ctrl-C ends this.")
    if options.open:
        webbrowser.open(pages[0])
    while True:
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what was started is ended, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _cluster_pages(
    inventory: ClusterInventory, options: DashboardOptions, env: Mapping[str, str]
) -> Iterator[list[str]]:
    """Forward the head's Grafana and Prometheus to here. Raises PreflightError without them."""
    # paramiko takes half a second to import.
    from payload.orchestrate.preflight.checks import operator_key
    from payload.orchestrate.ssh.connection import Cluster
    from payload.orchestrate.ssh.streams import Login
    from payload.orchestrate.ssh.tunnel import forwarded

    key = operator_key(inventory, given=options.ssh_key)
    login = Login(user=inventory.ssh_user, key=key)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(inventory, login=login, env=env))
        head = cluster.connect(inventory.head)
        ports = stack.enter_context(forwarded(head, (GRAFANA_PORT, PROMETHEUS_PORT)))
        grafana, prometheus = (f"http://{_LOOPBACK}:{port}" for port in ports)
        pages = []
        if _answers(f"{grafana}/api/health"):
            pages.append(_run_page(grafana, options.run))
        if _answers(f"{prometheus}/-/ready"):
            pages.append(f"{prometheus}/alerts")
        if not pages:
            raise PreflightError(
                f"{inventory.head.name} has neither Grafana nor Prometheus. Build the cluster with "
                "them: pulumi config set monitoring prometheus, then tileforge up"
            )
        yield pages


def _run_page(grafana: str, run_id: str | None) -> str:
    chosen = f"?var-run={urllib.parse.quote(run_id, safe='')}" if run_id else ""
    return f"{grafana}/d/tileforge-run{chosen}"


@contextlib.contextmanager
def local_stack(
    paths: RunPaths, *, access: LocalAccess, say: Say, files: Path = FILES
) -> Iterator[list[str]]:
    """Run Prometheus, and Grafana where it is installed, on this machine for one run.

    What the run has told so far is there at once; what it tells from now on is scraped. `files` are
    what Prometheus and Grafana read. Yields the pages' addresses. Raises PreflightError without
    Prometheus.
    """
    env = access.environment()
    path = env.get("PATH", os.defpath)
    prometheus = shutil.which("prometheus", path=path)
    if prometheus is None:
        raise PreflightError(
            "Prometheus is not installed here. Install it: sudo apt-get install prometheus "
            "prometheus-node-exporter (Debian, Ubuntu)"
        )
    with TemporaryDirectory(prefix="tileforge-dashboard-") as folder, _Programs(env) as programs:
        home = Path(folder)
        _copy_files(files, home)
        exporter = [access.python, "-m", "payload.supervise.exporter", "--run-dir", str(paths.root)]
        _backfill(exporter, home, env=access.code_environment(), say=say)
        # The same label as the history's, so that both are one curve.
        _target(
            home,
            "run",
            programs.first_line(exporter, access.code_environment()),
            {"instance": "run"},
        )
        node_exporter = shutil.which("prometheus-node-exporter", path=path)
        if node_exporter:
            address = f"{_LOOPBACK}:{free_port()}"
            programs.start([node_exporter, f"--web.listen-address={address}"], home / "node.log")
            _target(home, "machines", address, {"node": os.uname().nodename})
        prometheus_url = _start_prometheus(programs, home, prometheus)
        grafana_url = _start_grafana(programs, home, prometheus_url, path=path)
        pages = [_run_page(grafana_url, paths.run_id)] if grafana_url else []
        if not grafana_url:
            say(
                "note: Grafana is not installed here, so there are Prometheus's own charts alone. "
                "https://grafana.com/docs/grafana/latest/setup-grafana/installation/"
            )
        yield [*pages, _chart_page(prometheus_url, paths.run_id), f"{prometheus_url}/alerts"]


def _copy_files(files: Path, home: Path) -> None:
    shutil.copytree(files, home, dirs_exist_ok=True)
    targets = home / "targets"
    targets.mkdir(exist_ok=True)
    for name in ("run", "machines", "gpus"):
        target = targets / f"{name}.json"
        if not target.exists():
            target.write_text("[]\n", encoding="utf-8")


def _target(home: Path, name: str, address: str, labels: Mapping[str, str]) -> None:
    where = address.removeprefix("http://").removesuffix("/metrics")
    text = json.dumps([{"targets": [where], "labels": labels}])
    (home / "targets" / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _backfill(exporter: Sequence[str], home: Path, *, env: Mapping[str, str], say: Say) -> None:
    """Make blocks of what the run has told so far; without them its curves begin now."""
    promtool = shutil.which("promtool", path=env.get("PATH", os.defpath))
    if promtool is None:
        return
    history = home / "history"
    with history.open("wb") as file:
        written = subprocess.run([*exporter, "--history"], env=env, stdout=file, check=False)
    make = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(history), str(home / "data")]
    made = subprocess.run(make, capture_output=True, text=True, check=False)
    if written.returncode or made.returncode:
        said = one_line(made.stderr.strip().rpartition("\n")[2]) or "no reason given"
        say(f"note: the charts begin now: what the run told before cannot be shown ({said})")


def _start_prometheus(programs: _Programs, home: Path, program: str) -> str:
    """Start Prometheus on the files of `home`; return its address."""
    url = f"http://{_LOOPBACK}:{free_port()}"
    programs.start(
        [
            program,
            f"--config.file={home / 'prometheus.yml'}",
            f"--storage.tsdb.path={home / 'data'}",
            # Else the blocks of a run that is older than two weeks were removed.
            "--storage.tsdb.retention.time=50y",
            f"--web.listen-address={url.removeprefix('http://')}",
        ],
        home / "prometheus.log",
    )
    programs.wait_for(f"{url}/-/ready", "Prometheus", home / "prometheus.log")
    return url


def _start_grafana(
    programs: _Programs, home: Path, prometheus_url: str, *, path: str
) -> str | None:
    """Start Grafana if it is here; return its address."""
    program = shutil.which("grafana", path=path)
    if program is None:
        return None
    port = free_port()
    programs.start(
        [program, "server", "--homepath", _grafana_home(program)],
        home / "grafana.log",
        grafana_settings(home, port=port, prometheus_url=prometheus_url),
    )
    url = f"http://{_LOOPBACK}:{port}"
    programs.wait_for(f"{url}/api/health", "Grafana", home / "grafana.log")
    return url


def grafana_settings(home: Path, *, port: int, prometheus_url: str) -> dict[str, str]:
    """Return Grafana's environment, and make the provisioning files name these addresses."""
    lines = (home / "grafana.env").read_text(encoding="utf-8").splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    for name, before, after in (
        ("datasources", f"http://{_LOOPBACK}:{PROMETHEUS_PORT}", prometheus_url),
        ("dashboards", "/etc/tileforge/monitoring", str(home)),
    ):
        file = home / "grafana" / name / "tileforge.yml"
        file.write_text(file.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    return settings | {
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_PROVISIONING": str(home / "grafana"),
        "GF_PATHS_DATA": str(home / "grafana-data"),
        "GF_PATHS_LOGS": str(home / "grafana-logs"),
    }


def _grafana_home(program: str) -> str:
    """Return the folder with Grafana's pages: its package's, or its archive's."""
    beside = Path(program).resolve().parents[1]
    return str(beside if (beside / "public").is_dir() else Path("/usr/share/grafana"))


def _chart_page(prometheus_url: str, run_id: str) -> str:
    expression = f"tileforge_loss%7Brun%3D%22{run_id}%22%7D"
    return f"{prometheus_url}/graph?g0.expr={expression}&g0.tab=0&g0.range_input=1h"


class _Programs:
    """Programs that end with the block, by their process ids."""

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
        """Start a program whose words go to `log`."""
        with log.open("wb") as file:
            self._started.append(
                subprocess.Popen(
                    argv,
                    env={**self._env, **(extra or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C is for this command, which then ends them in order.
                    start_new_session=True,
                )
            )

    def first_line(self, argv: Sequence[str], extra: Mapping[str, str]) -> str:
        """Start a program that lives as long as its input; return its first line."""
        program = subprocess.Popen(
            argv,
            env={**self._env, **extra},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(program)
        assert program.stdout is not None
        line = program.stdout.readline().decode(errors="replace").strip()
        if not line:
            raise PreflightError("the run's metrics cannot be served; the reason is above.")
        return line

    def wait_for(self, url: str, name: str, log: Path) -> None:
        """Return when the program that was started last answers. Raises PreflightError."""
        ends = time.monotonic() + _READY_S
        while not _answers(url):
            if time.monotonic() > ends or self._started[-1].poll() is not None:
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                raise PreflightError(f"{name} does not answer. Its last words: {one_line(last)}")
            time.sleep(_LOOK_S)


def _answers(url: str) -> bool:
    # No proxy: the address is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def free_port() -> int:
    """Return a port of the loopback address that nothing listens on now."""
    with socket.create_server((_LOOPBACK, 0)) as holder:
        return int(holder.getsockname()[1])
