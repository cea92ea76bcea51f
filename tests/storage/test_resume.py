"""The head's machine is lost at a random moment: the run resumes from its store, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.formats.checkpoint_listing import manifest_problems
from payload.machines.inventory import Access
from payload.orchestrate.__main__ import main
from payload.orchestrate.runs.mirror import read_mirrored, record_contact
from payload.run_record.run_files import RunPaths, RunState, Summary, last_record, read_json
from payload.run_record.store_state import StoreState
from payload.supervise.processes import processes_of
from tests.launch.inventories import make_inventory
from tests.storage.server import BUCKET, Faults, FaultyProxy
from tests.support.data_folders import make_data_folder
from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S, wait_until

RESULTS = f"gs://{BUCKET}/runs"
STEPS, EVERY = 240, 12
SETTINGS = (
    "data.sequence_length=16",
    "model.preset=tiny",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "batch.global_batch_size=8",
    "batch.micro_batch_size=1",
    "precision.dtype=fp32",
    f"train.steps={STEPS}",
    f"train.checkpoint_every={EVERY}",
    "train.eval_every=48",
    "train.eval_tokens=64",
    "launch.ranks_per_node=2",
    "launch.threads_per_rank=1",
    "track.to=none",
)


# The run must not finish before the test acts, even on a host that stalls for seconds.
_FREEZE = f"""
import os, signal, sys

def at_a_checkpoint(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("step_{STEPS - 5 * EVERY:08d}"):
        os.kill(os.getpid(), signal.SIGSTOP)

if os.environ.get("RANK") == "0":
    sys.addaudithook(at_a_checkpoint)
"""


class Place:
    """A machine with its own runs folder, and the store at `store_url`."""

    def __init__(
        self, folder: Path, data: Path, store_url: str, *, freezes_late: bool = False
    ) -> None:
        """If it `freezes_late`, rank 0 stops itself after three quarters of the run."""
        self.runs = folder / "runs"
        self._data = data
        self._env = {**os.environ, "STORAGE_EMULATOR_HOST": store_url, "PYTHONPATH": str(REPO)}
        folder.mkdir()
        if freezes_late:
            (folder / "sitecustomize.py").write_text(_FREEZE, encoding="utf-8")
            self._env["PYTHONPATH"] = f"{REPO}{os.pathsep}{folder}"

    def start(self, *words: str, results: str = RESULTS) -> subprocess.Popen[str]:
        return self._popen(self.words(*words, results=results))

    def words(self, *words: str, results: str = RESULTS) -> list[str]:
        """Return the arguments of `run`; settings in `words` override the others."""
        settings = [*SETTINGS, f"data.dir={self._data}", f"storage.results={results}"]
        sets = (word for each in settings for word in ("--set", each))
        return ["run", "--inventory", "local", "--runs-dir", str(self.runs), *sets, *words]

    def command(self, *words: str) -> subprocess.Popen[str]:
        return self._popen([*words, "--runs-dir", str(self.runs)])

    def _popen(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "payload.orchestrate", *words],
            cwd=REPO,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, results: str = RESULTS) -> tuple[int, str, str]:
        return ended(self.start(*words, results=results))


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, talk = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, talk


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    return make_data_folder(folder, num_train_tokens=9000, num_val_tokens=200, vocab_size=512)


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with FaultyProxy(Faults(seed=4)) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, data: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A machine whose commands can run in the test's process."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    return Place(tmp_path / "here", data, proxy.url)


@pytest.fixture(scope="module")
def uninterrupted(
    data: Path, proxy: FaultyProxy, tmp_path_factory: pytest.TempPathFactory
) -> RunPaths:
    place = Place(tmp_path_factory.mktemp("whole") / "here", data, proxy.url)
    code, _, talk = place.run("--run-id", "whole", results="none")
    assert code == ExitCode.OK, talk
    return RunPaths(place.runs / "whole")


def kill_machine(place: Place, command: subprocess.Popen[str], run_id: str) -> None:
    """Kill all processes of a run and of its store, and remove the disk."""
    paths = RunPaths(place.runs / run_id)
    state = read_json(RunState, paths.state)
    assert state is not None and state.supervisor_pid is not None
    uploaders = children_of(state.supervisor_pid)
    for pid in (command.pid, state.supervisor_pid, *uploaders):
        with_no_mercy(pid)
    while left := processes_of(paths.root):
        for pid in left:
            with_no_mercy(pid)
    command.communicate()
    shutil.rmtree(place.runs)


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(word) for word in listed.split()]


def with_no_mercy(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def losses(paths: RunPaths) -> dict[int, float]:
    rows = (json.loads(line) for line in paths.metrics.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def assert_same_end(one: RunPaths, other: RunPaths, *, steps: int = STEPS) -> None:
    assert losses(one) == losses(other)
    last = [paths.checkpoint(steps) for paths in (one, other)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(each, marks=pytest.mark.seeds) for each in (2, 3))]
)
def test_a_run_whose_machine_is_gone_goes_on_from_the_bucket_and_ends_bitwise_equal(
    tmp_path: Path, data: Path, proxy: FaultyProxy, uninterrupted: RunPaths, seed: int
) -> None:
    draw, run_id = random.Random(seed), f"lost-{seed}"
    here = Place(tmp_path / "here", data, proxy.url, freezes_late=True)
    there = Place(tmp_path / "there", data, proxy.url)
    command = here.start("--run-id", run_id)
    paths = RunPaths(here.runs / run_id)

    def is_stored() -> bool:
        assert command.poll() is None, command.communicate()
        state = last_record(StoreState, paths.store_state)
        return state is not None and state.checkpoint is not None

    wait_until(is_stored, what="a checkpoint in the bucket")
    proxy.faults.share = 0.1
    time.sleep(draw.uniform(0, 1.5))
    kill_machine(here, command, run_id)

    code, _, talk = there.run("--resume", f"{RESULTS}/{run_id}")
    proxy.faults.share = 0.0
    assert code == ExitCode.OK, talk
    resumed = RunPaths(there.runs / run_id)
    assert_same_end(uninterrupted, resumed)
    summary = read_json(Summary, resumed.summary)
    assert summary is not None and summary.status == "finished"
    assert summary.store is not None and summary.store.is_drained
    assert summary.store.checkpoint == f"step_{STEPS:08d}"
    # The store also has the summary, and the checkpoints of the disk.
    third_place = Place(tmp_path / "third", data, proxy.url)
    code, _, talk = ended(third_place.command("collect", f"{RESULTS}/{run_id}"))
    assert code == ExitCode.OK, talk
    third = RunPaths(tmp_path / "third" / "runs" / run_id)
    assert_same_end(uninterrupted, third)
    assert manifest_problems(third.checkpoint(STEPS)) == []
    assert read_json(Summary, third.summary) == summary


@pytest.mark.slow
@pytest.mark.ranks
def test_the_machine_that_started_a_run_on_a_cluster_that_is_gone_takes_it_from_the_store(
    tmp_path: Path, data: Path
) -> None:
    results = str(tmp_path / "results")
    place = Place(tmp_path / "here", data, "")
    code, _, talk = place.run("--run-id", "one", results=results)
    assert code == ExitCode.OK, talk
    # The copy of the cluster's run: no checkpoint was downloaded.
    paths = RunPaths(place.runs / "one")
    gone = replace(make_inventory(num_nodes=2), access=Access(kind="direct"))
    paths.inventory.write_text(gone.to_json(), encoding="utf-8")
    record_contact(paths, alive=False, ssh_key=Path("/key"))
    shutil.rmtree(paths.checkpoints)

    # The run's own settings with more steps: the arguments end with 240.
    more = ("--set", f"train.steps={STEPS + 4}", "--resume", f"{results}/one")
    code, _, talk = ended(place.command("run", "--inventory", "local", *more))
    assert code == ExitCode.OK, talk
    assert sorted(losses(paths)) == list(range(1, STEPS + 5))
    assert read_mirrored(paths) is None  # this machine owns the run now
    code, out, talk = ended(place.command("status", "one"))
    assert code == ExitCode.OK and "finished" in out, talk


@pytest.mark.slow
@pytest.mark.ranks
def test_a_store_that_fails_takes_nothing_from_a_run_but_the_final_wait(
    tmp_path: Path, data: Path
) -> None:
    short = ("--set", f"train.steps={2 * EVERY}", "--set", "launch.ranks_per_node=1")
    with FaultyProxy(Faults(seed=5)) as own:
        place = Place(tmp_path / "here", data, own.url)
        code, _, talk = place.run("--run-id", "whole", *short, results="none")
        assert code == ExitCode.OK, talk
        command = place.start("--run-id", "alone", *short, "--set", "storage.final_wait_s=15")
        paths = RunPaths(place.runs / "alone")
        wait_until(paths.plan.exists, what="the start")
        own.down = True
        code, _, talk = ended(command)
    assert code == ExitCode.OK, talk
    assert_same_end(RunPaths(place.runs / "whole"), paths, steps=2 * EVERY)
    summary = read_json(Summary, paths.summary)
    assert summary is not None and summary.store is not None
    assert not summary.store.is_drained
    assert summary.store.problem is not None and "503" in summary.store.problem
    said = (paths.logs / "storage.log").read_text()
    assert said.count("warning: results are not in") == 1


@pytest.mark.processes
@pytest.mark.parametrize("results", ["gs://no-such-bucket/x", "results", "s3://b/x"])
def test_a_store_that_cannot_be_used_is_refused_before_anything_is_written(
    place: Place, capsys: pytest.CaptureFixture[str], results: str
) -> None:
    assert main(place.words("--run-id", "never", results=results), os.environ) == ExitCode.CONFIG
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
    assert not (place.runs / "never").exists()


@pytest.mark.processes
def test_a_run_that_no_store_has_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place.words("--resume", f"{RESULTS}/no-such-run")
    assert main(words, os.environ) == ExitCode.CONFIG
    assert "no run found" in capsys.readouterr().err
    assert not place.runs.exists() or not list(place.runs.iterdir())
