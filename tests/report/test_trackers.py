"""Trackers with their real packages, offline: their data matches the run's files."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from payload.config.launch_sections import TRACKERS
from payload.config.run_config import load_run_config, parse_run_config
from payload.core.errors import ConfigError, ExitCode
from payload.report import track as tracking
from payload.report.__main__ import main as report
from payload.report.source import Run
from payload.report.trackers import mlflow, wandb
from payload.report.trackers.base import About, Row
from payload.run_record.approved_settings import record_approved, settings_to_approve
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths
from payload.run_record.tracker_process import missing_notes, wanted_trackers
from tests.report.real_runs import TRACKERS as TRACKERS_OF_RUNS
from tests.report.real_runs import printed
from tests.report.tracker_packages import PACKAGES, environment
from tests.support.launching import REPO
from tests.support.run_folders import make_run
from tests.support.waiting import DEADLINE_S

KEY = "0123456789abcdef0123456789abcdef01234567"


def tracked_copy(runs: Path, target: Path, *trackers: str) -> RunPaths:
    """Copy the stopped run, with these trackers in its config and no tracked data."""
    shutil.copytree(
        runs / "stopped", target, ignore=shutil.ignore_patterns(RunPaths(target).track.name)
    )
    paths = RunPaths(target)
    text = paths.config.read_text(encoding="utf-8")
    names = ", ".join(f'"{name}"' for name in trackers)
    assert f"to = {TRACKERS_OF_RUNS}" in text
    changed = text.replace(f"to = {TRACKERS_OF_RUNS}", f"to = [{names}]")
    paths.config.write_text(changed, encoding="utf-8")
    record_approved(paths, {"track.to": ",".join(trackers)})
    return paths


def send(paths: RunPaths, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "payload.report", "--track", str(paths.root)],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return "\n".join(line for line in done.stderr.splitlines() if line.startswith("note: "))


def losses(paths: RunPaths, key: str) -> list[list[float]]:
    return [[row["step"], row[key]] for row in read_metrics(paths.metrics) if key in row]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("tracker", PACKAGES)
def test_a_tracker_s_offline_data_matches_the_files_and_has_no_key(
    tracker: str, runs: Path, tmp_path: Path
) -> None:
    paths = tracked_copy(runs, tmp_path / "runs" / "one", tracker)
    env = environment(
        tracker, TRACKIO_DIR=str(tmp_path / "trackio"), WANDB_API_KEY=KEY, HF_TOKEN=KEY
    )
    assert send(paths, env) == ""
    reader = Path(__file__).parent / "readers" / f"{tracker}.py"
    read = subprocess.run(
        # -P: the readers have the names of the packages.
        [sys.executable, "-P", str(reader), str(paths.track)],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    logged, texts = json.loads(read.stdout.splitlines()[-1])
    for key in ("loss", "val_loss"):
        expected = losses(paths, key)
        assert [step for step, _ in logged[key]] == [step for step, _ in expected]
        values = [value for _, value in expected]
        assert [value for _, value in logged[key]] == pytest.approx(values, rel=1e-6)
    assert {"config", "summary"} <= set(texts)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.ranks
def test_csv_needs_no_package_and_follows_a_resumed_run(runs: Path, tmp_path: Path) -> None:
    paths = tracked_copy(runs, tmp_path / "runs" / "one", "csv")
    assert send(paths, dict(os.environ)) == ""
    with (paths.track / "csv" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kept = [[int(row["step"]), float(row["loss"])] for row in rows if row["loss"]]
    assert kept == losses(paths, "loss")
    shutil.copyfile(runs / "resumed" / "metrics.jsonl", paths.metrics)
    assert send(paths, dict(os.environ)) == ""
    text = (paths.track / "csv" / "metrics.csv").read_text(encoding="utf-8")
    assert len(text.splitlines()) == len(read_metrics(paths.metrics)) + 1
    summary = json.loads((paths.track / "csv" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == json.loads(paths.summary.read_text(encoding="utf-8"))["steps"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_tracker_that_fails_is_one_note_and_the_others_continue(
    runs: Path, tmp_path: Path
) -> None:
    paths = tracked_copy(runs, tmp_path / "runs" / "one", "wandb", "csv", "mlflow")
    broken = tmp_path / "broken" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('no\\nsuch \\x1b[31mthing')\n")
    notes = send(paths, {**os.environ, "PYTHONPATH": str(broken.parent)}).splitlines()
    assert notes == [
        "note: track.to = mlflow: its package is not installed, so the run continues without "
        "it. Install it with: pip install mlflow",
        "note: track.to: wandb failed; the run continues without this tracker: no.",
    ]
    assert (paths.track / "csv" / "metrics.csv").is_file()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("run", ["stopped", "resumed"])
def test_a_real_run_is_tracked_while_it_runs_and_after_it(run: str, runs: Path) -> None:
    lines = printed(runs / run).read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if "track.to = mlflow" in line]) == 1
    paths = RunPaths(runs / run)
    rows = read_metrics(paths.metrics)
    kept = (paths.track / "csv" / "metrics.csv").read_text(encoding="utf-8")
    assert kept.count("\n") == len(rows) + 1
    assert (paths.track / "csv" / "summary.json").is_file()


def test_every_tracker_has_a_module() -> None:
    folder = REPO / "payload" / "report" / "trackers"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base", "registry"}
    assert files == set(TRACKERS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('["csv", "wandb"]', ("csv", "wandb")),
        ("csv,wandb", ("csv", "wandb")),
        ('"csv"', ("csv",)),
        ("none", ()),
        ("[]", ()),
    ],
)
def test_a_list_is_written_in_toml_or_with_commas(given: str, expected: Any) -> None:
    config = parse_run_config("", overrides=[f"track.to={given}"], where="test")
    assert config.track.to == expected
    assert parse_run_config(config.to_toml(), where="again") == config


@pytest.mark.parametrize("given", ["[1]", "7", "true", '["csv", "nosuch"]', '["a\\u001b"]'])
def test_an_unknown_tracker_is_refused_in_one_line(given: str) -> None:
    with pytest.raises(Exception, match=r"track\.to") as caught:
        parse_run_config("", overrides=[f"track.to={given}"], where="test")
    assert len(str(caught.value).splitlines()) == 1


def test_auto_is_trackio_if_it_is_installed() -> None:
    config = parse_run_config("", where="test")
    assert wanted_trackers(config.track.to) in ((), ("trackio",))
    assert missing_notes(config) == []


class Kept:
    """A tracker that records its rows."""

    starts_over: ClassVar[bool] = False

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def start(self, about: About) -> None:
        del about

    def log(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        del summary, report


def test_every_row_comes_once_however_they_arrive(tmp_path: Path) -> None:
    rows: list[Row] = [{"step": 0, "val_loss": 3.0}]
    for step in range(1, 8):
        rows.append({"step": step, "loss": 2.0})
        if step % 2 == 0:
            rows.append({"step": step, "val_loss": 1.0})
    kept = Kept()
    tracked = tracking.Tracked(name="kept", tracker=kept, last=-1, place=tmp_path / "kept.last")
    for end in range(len(rows) + 1):
        tracked.log(rows[max(0, end - 2) : end])  # as after a resume, some are repeated
    assert kept.rows == rows
    assert (tmp_path / "kept.last").read_text(encoding="ascii") == "14\n"


def test_wandb_reads_no_settings_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, seen = ModuleType("wandb"), []

    def init(**options: Any) -> None:
        seen.append((Path.cwd(), Path(options["dir"])))

    monkeypatch.setattr(package, "init", init, raising=False)
    monkeypatch.setattr(package, "Settings", dict, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.chdir(tmp_path)
    about = About(run_id="r", name="n", folder=Path("track/wandb"), config={})
    wandb.make().start(about)
    assert (seen, Path.cwd()) == ([(Path("/"), tmp_path / "track" / "wandb")], tmp_path)


RUN = "0123456789abcdef" * 2


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake MLflow with artifacts at MLFLOW_PLACE; return the list of uploads."""
    made: list[str] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            self.store = tracking_uri

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, at: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id="f" * 32))

        def get_run(self, run: str) -> Any:
            own = f"{self.store}/1/{run}/artifacts"
            place = os.environ.get("MLFLOW_PLACE", own)
            return SimpleNamespace(info=SimpleNamespace(experiment_id="1", artifact_uri=place))

        def log_batch(self, run: str, **_: object) -> None:
            del run

        def set_tag(self, run: str, *_: object) -> None:
            made.append(run)

        def log_artifact(self, run: str, path: str) -> None:
            made.append(f"{run} {path}")

    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    vars(package).update(MlflowClient=Client)
    vars(entities).update(Param=lambda *_: None, Metric=lambda *_: None)
    for each in (package, entities):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


@pytest.mark.parametrize("place", ["http://attacker/x", "file:///home/me", "mlflow-artifacts:/x"])
def test_a_planted_mlflow_store_does_not_decide_where_the_report_goes(
    place: str, sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: meta.yaml in a run's folder had the report sent with the user's token."""
    about = About(run_id="r", name="n", folder=tmp_path / "mlflow", config={})
    own = mlflow.make()
    own.start(about)
    own.end({}, tmp_path / "report.html")
    assert sent == [f"{'f' * 32} {tmp_path / 'report.html'}"]
    again = mlflow.make()
    again.start(about)
    monkeypatch.setenv("MLFLOW_PLACE", place)
    with pytest.raises(ConfigError, match="was made for another folder"):
        again.end({}, tmp_path / "report.html")
    for known in (f"{RUN}\n", "../../x"):
        (tmp_path / "mlflow" / "mlflow_run_id").write_text(known)
        with pytest.raises(ConfigError, match="was made for another folder"):
            mlflow.make().start(about)
    assert len(sent) == 1


def test_a_run_folder_cannot_choose_a_run_on_a_server(
    sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: mlflow_run_id named another run of the user's server, which got the rows."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    about = About(run_id="r", name="n", folder=tmp_path / "mlflow", config={})
    about.folder.mkdir()
    for known in (RUN, f"{RUN} {'0' * 64}"):
        (about.folder / "mlflow_run_id").write_text(known)
        tracker = mlflow.make()
        tracker.start(about)
        tracker.end({}, tmp_path / "report.html")
    assert not [each for each in sent if each.startswith(RUN)] and len(sent) == 2
    monkeypatch.setattr(sys.modules["mlflow"].MlflowClient, "create_run", None)
    mlflow.make().start(about)  # this user's own run is continued


@pytest.mark.processes
def test_an_unapproved_run_and_a_linked_report_are_not_sent(
    sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: report.html was a link to a private key, and run.toml named MLflow."""
    monkeypatch.setattr(tracking, "installed_trackers", lambda names: names)
    paths = make_run(tmp_path / "demo", settings=["track.to=mlflow,csv"])
    (tmp_path / "key").write_text("private")
    paths.report.symlink_to(tmp_path / "key")
    notes: list[str] = []
    tracking.track(Run(paths), live=False, say=notes.append)
    assert "--track --to mlflow" in notes[0] and len(notes) == 1 and not sent
    assert (paths.track / "csv").is_dir() and not (paths.track / "mlflow").exists()
    tracking.track(Run(paths), live=False, say=notes.append, named=["mlflow"])
    record_approved(paths, settings_to_approve(load_run_config(paths.config)))
    tracking.track(Run(paths), live=False, say=notes.append)
    assert len(notes) == 1 and not [each for each in sent if "report.html" in each]
    refused = make_run(tmp_path / "other", settings=["track.to=mlflow"])
    assert report([str(refused.root), "--track"]) == ExitCode.CONFIG
    tracking.track(Run(refused), live=False, say=notes.append, named=["mlflow"])
    paths.report.unlink()
    paths.report.write_text("page")
    tracking.track(Run(paths), live=False, say=notes.append)
    assert [each for each in sent if "report.html" in each]
