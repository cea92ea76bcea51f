"""A run's metrics as Prometheus scrapes them: all there, with the right labels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from payload.config.launch_sections import MonitorSection
from payload.core.errors import PreflightError
from payload.monitor import exporter
from payload.monitor.exporter import serving
from payload.monitor.run_metrics import METRICS, PHASES, RunMetrics
from payload.run_record.metrics_log import EvalMetrics, RankTimes, StepMetrics, to_json_line
from payload.run_record.run_files import RankProgress, RunPaths, write_json
from payload.run_record.store_state import StoreState
from tests.supervise.planned import (
    REPO,
    ask_to_stop,
    plan_stand_in,
    supervise,
    wait_for,
    wait_for_steps,
)
from tests.support.ports import free_port
from tests.support.run_folders import make_run
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

HERE = os.uname().nodename
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> Series:
    """Return every sample that is served, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def row(step: int, *, work_s: tuple[float, ...] = (0.2, 0.2)) -> StepMetrics:
    longest = max(work_s)
    return StepMetrics(
        step=step,
        tokens=100 * step,
        loss=5.0 - step / 100,
        lr=1e-3,
        grad_norm=1.5,
        step_time_s=longest + 0.15,
        tokens_per_s=100 / (longest + 0.15),
        mfu=0.25,
        data_time_s=0.0,
        sync_time_s=0.0,
        rss_bytes=10**9,
        time_unix=1_000_000.0 + step,
        ranks=RankTimes(
            steps=1,
            data=(0.0,) * len(work_s),
            forward=tuple(each / 4 for each in work_s),
            backward=tuple(each * 3 / 4 for each in work_s),
            wait=tuple(longest - each + 0.05 for each in work_s),
            checkpoint=(0.02,) * len(work_s),
        ),
    )


def monitored_run(root: Path, rows: list[StepMetrics | EvalMetrics]) -> RunPaths:
    """Write the records of a run with two ranks, as they are while it trains."""
    paths = make_run(
        root,
        settings=("train.steps=100", "train.checkpoint_every=10", "limits.max_hours=2"),
        steps=(30,),
        started_unix=1_000_000.0,
        updated_unix=1_000_040.0,
        attempt=4,
        resumes=1,
        spent_s=600.0,
        cost_usd=1.25,
    )
    paths.metrics.write_text("".join(map(to_json_line, rows)), encoding="utf-8")
    paths.rank_progress(0).parent.mkdir()
    for rank in (0, 1):
        beat = RankProgress(
            rank=rank,
            node=HERE,
            pid=os.getpid(),
            step=40,
            phase="step",
            time_unix=1_000_040.0,
            rss_bytes=(rank + 1) * 10**9,
        )
        write_json(paths.rank_progress(rank), beat)
    store = StoreState(
        address="/results/run",
        checkpoint="step_00000020",
        sent_bytes=7_000,
        sent_unix=time.time() - 600.0,
    )
    write_json(paths.store_state, store)
    return paths


def test_the_scrape_has_every_metric_with_its_labels(tmp_path: Path) -> None:
    rows: list[StepMetrics | EvalMetrics] = [*map(row, range(1, 41))]
    rows.append(EvalMetrics(step=40, val_loss=4.7, val_tokens=1000))
    paths = monitored_run(tmp_path / "run", rows)
    with serving(paths, port=0) as port:
        found = scrape(port)
    wanted = {metric.name: metric.labels for metric in METRICS}
    assert {name for name, _ in found} == set(wanted)
    for name, labels in found:
        assert {key for key, _ in labels} == set(wanted[name])
    one = {("node", HERE), ("run", "run")}

    def value(name: str, **labels: str) -> float:
        return found[f"tileforge_{name}", tuple(sorted({*one, *labels.items()}))]

    assert value("step") == 40 and value("steps_planned") == 100 and value("tokens") == 4000
    assert value("loss") == pytest.approx(4.6) and value("validation_loss") == 4.7
    assert (value("restarts"), value("resumes"), value("cost_dollars")) == (2, 1, 1.25)
    assert value("eta_seconds") == pytest.approx(60.0)  # sixty steps, one a second
    assert value("checkpoint_interval_seconds") == pytest.approx(10.0)
    assert (value("checkpoint_step"), value("ranks"), value("running")) == (30, 2, 1)
    assert (value("spent_seconds"), value("limit_seconds")) == (600, 7200)
    assert (value("store_checkpoint_step"), value("store_sent_bytes")) == (20, 7_000)
    assert value("store_upload_age_seconds") >= 600
    assert value("rank_memory_bytes", rank="1") == 2 * 10**9
    assert {dict(labels)["phase"] for name, labels in found if "phase" in name} == set(PHASES)
    assert value("step_phase_seconds", rank="0", phase="backward") == pytest.approx(0.15)
    # What the other parts leave of 0.35 s.
    assert value("step_phase_seconds", rank="1", phase="optimizer") == pytest.approx(0.08)
    assert value("rank_slowdown_ratio", rank="1") == 1.0


def test_a_slow_rank_s_ratio_is_that_of_the_run_s_records(tmp_path: Path) -> None:
    rows: list[StepMetrics | EvalMetrics] = [
        row(step, work_s=(0.2, 0.4 if step > 10 else 0.2)) for step in range(1, 31)
    ]
    samples = RunMetrics(monitored_run(tmp_path / "run", rows)).samples()
    ratios = {
        each.labels["rank"]: each.value
        for each in samples
        if each.name == "tileforge_rank_slowdown_ratio"
    }
    assert ratios == {"0": 1.0, "1": pytest.approx(2.0)}


def test_a_run_without_any_record_yet_is_served_too(tmp_path: Path) -> None:
    paths = plan_stand_in(tmp_path / "run")
    with serving(paths, port=0) as port:
        names = {name for name, _ in scrape(port)}
    assert names == {"tileforge_ranks", "tileforge_steps_planned"}


@pytest.mark.parametrize("damaged", ["metrics.jsonl", "state.json", "progress/rank_0001.json"])
def test_a_damaged_record_leaves_its_own_metrics_out(tmp_path: Path, damaged: str) -> None:
    paths = monitored_run(tmp_path / "run", [row(1)])
    (paths.root / damaged).write_bytes(b"\xff{\n")
    with serving(paths, port=0) as port:
        found = scrape(port)
    assert ("tileforge_ranks", (("node", HERE), ("run", "run"))) in found


def test_a_rank_with_an_impossible_step_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    paths = monitored_run(tmp_path / "run", [row(1)])
    path = paths.rank_progress(1)
    text = path.read_text(encoding="utf-8").replace('"step": 40', f'"step": {10**400}')
    path.write_text(text, encoding="utf-8")
    with serving(paths, port=0) as port:
        ranks = [
            dict(labels)["rank"] for name, labels in scrape(port) if name.endswith("rank_step")
        ]
    assert ranks == ["0"]


def test_new_rows_count_and_a_resumed_run_s_file_is_read_again(tmp_path: Path) -> None:
    paths = monitored_run(tmp_path / "run", [row(1), row(2)])
    metrics = RunMetrics(paths)

    def step() -> float:
        (found,) = (each.value for each in metrics.samples() if each.name == "tileforge_step")
        return found

    assert step() == 2
    with paths.metrics.open("a", encoding="utf-8") as file:
        file.write(to_json_line(row(3)) + to_json_line(row(4))[:20])
    assert step() == 3
    fresh = paths.metrics.with_name("fresh")
    fresh.write_text(to_json_line(row(1)), encoding="utf-8")
    fresh.replace(paths.metrics)
    assert step() == 1


def test_history_has_each_row_with_its_time(tmp_path: Path) -> None:
    paths = monitored_run(tmp_path / "run", [row(step) for step in range(1, 6)])
    losses = [each for each in RunMetrics(paths).history() if each.name == "tileforge_loss"]
    assert [each.time_unix for each in losses] == [1_000_000.0 + step for step in range(1, 6)]
    assert losses[0].value == pytest.approx(4.99)


@pytest.mark.parametrize(
    ("enabled", "is_set_up", "expected"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_by_default_a_run_is_served_where_the_node_was_set_up_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    enabled: Literal["auto", "on", "off"],
    is_set_up: bool,
    expected: bool,
) -> None:
    place = tmp_path / "monitoring"
    if is_set_up:
        place.mkdir()
    monkeypatch.setattr(exporter, "SET_UP", place)
    assert exporter.is_enabled(MonitorSection(enabled=enabled)) is expected


def test_the_server_listens_on_loopback_alone_and_ends(tmp_path: Path) -> None:
    paths = monitored_run(tmp_path / "run", [row(1)])
    with serving(paths, port=0) as port:
        listed = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
        local = [line.split()[1] for line in listed[1:] if line.split()[3] == "0A"]
        assert [each for each in local if each.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
        with pytest.raises(PreflightError, match=rf"cannot listen on .*:{port} "):
            serving(paths, port=port).__enter__()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


@contextmanager
def supervised(paths: RunPaths) -> Iterator[subprocess.Popen[bytes]]:
    run = supervise(paths)
    try:
        yield run
    finally:
        if run.poll() is None:
            ask_to_stop(paths, run, grace_s=5.0)
            run.wait(60)


@pytest.mark.ranks
def test_a_run_serves_its_metrics_while_it_trains(tmp_path: Path) -> None:
    port = free_port()
    settings = ("monitor.enabled=on", f"monitor.port={port}")
    paths = plan_stand_in(tmp_path / "run", "--steps", "100000", settings=settings)
    with supervised(paths):
        wait_for_steps(paths, step=5)
        wait_for(lambda: ("tileforge_loss", _run_labels()) in scrape(port), "the loss")
        found = scrape(port)
        assert found["tileforge_running", _run_labels()] == 1
        assert len([name for name, _ in found if name == "tileforge_rank_step"]) == 2


def _run_labels() -> tuple[tuple[str, str], ...]:
    return (("node", HERE), ("run", "run"))


@pytest.mark.ranks
def test_a_port_that_is_taken_ends_no_run(tmp_path: Path) -> None:
    settings = ("monitor.enabled=on",)
    paths = plan_stand_in(tmp_path / "run", "--steps", "3", settings=settings)
    with serving(paths, port=0) as port:
        text = paths.config.read_text(encoding="utf-8").replace("port = 9464", f"port = {port}")
        paths.config.write_text(text, encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-m", "payload.supervise", "--run-dir", str(paths.root)],
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert run.returncode == 0
    assert (
        f"note: no metrics are served to Prometheus: cannot listen on 127.0.0.1:{port} ("
        in run.stderr
    )


def test_the_program_ends_with_its_input(tmp_path: Path) -> None:
    paths = monitored_run(tmp_path / "run", [row(1)])
    words = [sys.executable, "-m", "payload.monitor.exporter", "--run-dir", str(paths.root)]
    program = subprocess.Popen(
        words, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None and program.stdout is not None
    address = program.stdout.readline().strip()
    assert scrape(int(address.rpartition(":")[2].partition("/")[0]))
    program.stdin.close()
    assert program.wait(60) == 0
    program.stdout.close()


def test_an_interrupt_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    paths = monitored_run(tmp_path / "run", [row(1)])
    words = [sys.executable, "-m", "payload.monitor.exporter", "--run-dir", str(paths.root)]
    program = subprocess.Popen(
        words, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    program.stdout.readline()
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 0 and said == b""


def test_only_values_of_the_records_are_served(tmp_path: Path) -> None:
    """A row without an MFU has no sample for it."""
    unknown = json.loads(to_json_line(row(1))) | {"mfu": None}
    paths = monitored_run(tmp_path / "run", [row(1)])
    paths.metrics.write_text(json.dumps(unknown) + "\n", encoding="utf-8")
    assert "tileforge_mfu_ratio" not in {each.name for each in RunMetrics(paths).samples()}
