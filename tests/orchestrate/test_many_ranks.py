"""Following a run of 512 ranks on 64 nodes: few files, little memory, readable lines."""

from __future__ import annotations

import io
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from rich.console import Console

from payload.config.training_sections import TrainSection
from payload.launch.ranks import Rank, render_ranks
from payload.orchestrate.follow.follow import Tail, show_progress, show_state, show_steps
from payload.orchestrate.follow.run_text import ranks_lines, status_lines
from payload.orchestrate.runs.remote_run import RemoteRun
from payload.orchestrate.runs.run_index import view_run
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.remote_calls import Completed, Login
from payload.orchestrate.terminal.console import LiveLine
from payload.run_record.metrics_log import StepMetrics, to_json_line
from payload.run_record.run_files import RunPaths
from tests.orchestrate.conftest import PATIENT, StartSshd
from tests.orchestrate.run_copies import progress_text, state_text
from tests.orchestrate.sshd import make_cluster

NODES, RANKS_PER_NODE = 64, 8
RANKS = NODES * RANKS_PER_NODE
LOG_BYTES = 200_000
MOST_BYTES = 64 * 2**20
STEP = StepMetrics(
    step=7,
    tokens=70,
    loss=3.5,
    lr=0.1,
    grad_norm=1.0,
    step_time_s=0.5,
    tokens_per_s=123456.0,
    mfu=0.41,
    data_time_s=0.0,
    sync_time_s=0.0,
    rss_bytes=1,
)


def write_plan(paths: RunPaths) -> None:
    """The rank file."""
    paths.root.mkdir(parents=True, exist_ok=True)
    ranks = [
        Rank(
            rank=rank,
            node=f"node-{rank // RANKS_PER_NODE}",
            node_rank=rank // RANKS_PER_NODE,
            local_rank=rank % RANKS_PER_NODE,
            numa_domain=None,
            cores=(rank % RANKS_PER_NODE,),
            threads=1,
        )
        for rank in range(RANKS)
    ]
    paths.ranks.write_text(render_ranks(ranks), encoding="utf-8")


def write_records(paths: RunPaths, *, logs: int) -> None:
    """A heartbeat of every rank, and the logs of the first `logs` ranks."""
    for folder in (paths.rank_progress(0), paths.rank_log(0)):
        folder.parent.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        text = progress_text(rank, node=f"node-{rank // RANKS_PER_NODE}")
        paths.rank_progress(rank).write_text(text, encoding="utf-8")
    line = f"{'x' * 99}\n"
    for rank in range(logs):
        paths.rank_log(rank).write_text(line * (LOG_BYTES // len(line)), encoding="ascii")
    paths.state.write_text(state_text(paths.run_id), encoding="utf-8")
    paths.metrics.write_text(f"{to_json_line(STEP)}\n", encoding="utf-8")


_opened: list[str] = []


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and "/runs/" in str(arguments[0]):
        _opened.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def recorded() -> None:
    """Record which files of runs this process opens. An audit hook cannot be removed."""
    sys.addaudithook(_record)


@contextmanager
def bounded(what: str, *, files: int) -> Iterator[None]:
    """Fail where more files of the run are opened, or the process grows more than it may.

    A time would say more, and would be another one on a busy machine.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _opened.clear()
    yield
    opened = len(_opened)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert opened <= files and peak < MOST_BYTES, (what, opened, peak)


def test_status_of_512_ranks_reads_few_files_and_is_no_wider_than_the_terminal(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path / "runs" / "big")
    write_plan(paths)
    write_records(paths, logs=RANKS)
    with bounded("status", files=2 * RANKS + 50):
        view = view_run(paths, now_unix=time.time())
        assert status_lines(view, width=80)
        lines = ranks_lines(view, width=80)
    assert len(view.ranks) == RANKS and max(map(len, lines)) <= 80
    assert sum("node-63" in line for line in lines) == RANKS_PER_NODE


def test_following_512_ranks_here_shows_one_readable_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "big")
    write_plan(paths)
    write_records(paths, logs=RANKS)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    log, metrics = Tail(paths.rank_log(0), from_end=True), Tail(paths.metrics)
    with (
        bounded("100 ticks", files=500),
        LiveLine(console, train=TrainSection(steps=1000), nodes=NODES) as live,
    ):
        for _ in range(100):
            assert list(log.lines()) == []
            show_steps(metrics, live)
            show_progress(paths, live, stale=None)
            show_state(paths, live, stopping=False)
    last = readable(shown.getvalue())
    assert "step 8/1000" in last and "loss 3.5000" in last and len(last) <= 80, last


def readable(text: str) -> str:
    """The last line that a terminal shows, without its control sequences."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.strip() for line in re.split(r"[\r\n]", plain)]
    return [line for line in lines if line][-1]


@pytest.mark.sshd
def test_a_look_at_512_ranks_on_a_cluster_is_one_command(
    start_sshd: StartSshd, login: Login, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []
    run_there = Connection.run

    def counted(connection: Connection, argv: Sequence[str], **options: Any) -> Completed:
        commands.append(argv)
        return run_there(connection, argv, **options)

    monkeypatch.setattr(Connection, "run", counted)
    head = start_sshd("node-0", "127.0.0.2")
    there = RunPaths(head.home / "runs" / "big")
    here = RunPaths(tmp_path / "here" / "runs" / "big")
    write_plan(there)
    write_plan(here)
    write_records(there, logs=RANKS_PER_NODE)
    inventory = make_cluster(head.node)

    def connect() -> Cluster:
        return Cluster(inventory, login=login, env={}, deadlines=PATIENT)

    run = RemoteRun(
        here, inventory, run_dir=PurePosixPath(there.root), key=login.key, connect=connect
    )
    look: Callable[[], object] = run.refresh
    try:
        with bounded("first look", files=2 * RANKS + 100):
            look()
        assert here.rank_log(RANKS_PER_NODE - 1).stat().st_size == LOG_BYTES
        # Files that are not shown while a run is followed come with `status`, and at the end.
        assert here.rank_progress(0).exists() and not here.rank_progress(1).exists()
        with bounded("a look at everything", files=5 * RANKS + 100):
            run.update(head.node)
        assert here.rank_progress(RANKS - 1).exists()
        with there.rank_log(0).open("a", encoding="ascii") as log:
            log.write("more\n")
        with bounded("next look", files=2 * RANKS + 100):
            look()
        assert here.rank_log(0).read_text(encoding="ascii").endswith("more\n")
        with bounded("a look that finds nothing new", files=2 * RANKS + 100):
            look()
        assert len(commands) == 4
    finally:
        run.close()
