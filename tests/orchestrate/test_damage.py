"""Every file of a run, damaged in ten ways: each command ends cleanly, and the run continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode, UsageError
from payload.formats.checkpoint_listing import manifest_problems
from payload.launch.plan_record import LaunchPlan
from payload.machines.inventory import ClusterInventory
from payload.machines.rank_variables import RUN_DIR
from payload.orchestrate.__main__ import main
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.mirror import Mirrored, write_mirrored
from payload.run_record.approved_settings import record_approved, settings_to_approve
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RunPaths, Summary, read_json
from payload.supervise.processes import processes_of
from tests.orchestrate.damage import WAYS, damage_file
from tests.orchestrate.sshd import USER, make_cluster, make_key
from tests.support.data_folders import make_data_folder
from tests.support.ports import free_port

pytestmark = pytest.mark.ranks
STEPS = 4
SETTINGS = (
    "data.sequence_length=16",
    "model.preset=tiny",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=32",
    "batch.global_batch_size=2",
    "batch.micro_batch_size=1",
    "precision.dtype=fp32",
    "launch.ranks_per_node=1",
    "train.checkpoint_every=2",
    "train.eval_tokens=32",
    "engine.kernels=off",
)
# The files of a run except its checkpoints; those of one rank on one node.
FILES = (
    *("run.toml", "inventory.json", "plan.json", "hosts", "ranks.json", "accelerate_node_0.yaml"),
    *("state.json", "metrics.jsonl", "summary.json", "supervisor.lock"),
    *("progress/rank_0000.json", "exits/rank_0000.json"),
    *("logs/rank_0000.log", "logs/launcher.log", "logs/supervisor.log"),
)
CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json")


DOCUMENTED = {ExitCode.OK, ExitCode.USAGE, ExitCode.CONFIG, ExitCode.SSH_UNREACHABLE}


def cases(names: Sequence[str]) -> list[Any]:
    """Every file in every way; without `seeds`, each file in two ways or three, and every way."""
    return [
        pytest.param(name, way, marks=() if (file + number) % 5 == 0 else pytest.mark.seeds)
        for file, name in enumerate(names)
        for number, way in enumerate(WAYS)
    ]


class Runs:
    """A stopped run with two checkpoints, what it was after the first, and another run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = make_data_folder(
            folder / "data", num_train_tokens=400, num_val_tokens=100, vocab_size=64
        )
        self.settings = (*SETTINGS, f"data.dir={data}")
        self.runs_dir = folder / "runs"
        other = ("train.steps=2", "model.n_embd=16", "optimizer.lr=1e-3", "run.seed=9")
        assert self.run("--run-id", "other", *self.words(*other)) == ExitCode.OK
        first = ("train.steps=2", "schedule.kind=constant")
        assert self.run("--run-id", "one", *self.words(*first)) == ExitCode.OK
        shutil.copytree(self.runs_dir / "one", folder / "older")
        assert self.run("--resume", "one", "--set", f"train.steps={STEPS}") == ExitCode.OK

    def words(self, *settings: str) -> list[str]:
        return [word for each in (*self.settings, *settings) for word in ("--set", each)]

    def run(self, *words: str, runs_dir: Path | None = None) -> int:
        where = ["--inventory", "local", "--runs-dir", str(runs_dir or self.runs_dir)]
        return main(["run", *where, *words], os.environ)

    def copy(self, folder: Path) -> RunPaths:
        """Return a copy of the run, alone in a runs folder, as if it had been run there."""
        shutil.copytree(self.runs_dir / "one", folder / "runs" / "one", symlinks=True)
        paths = RunPaths(folder / "runs" / "one")
        record_approved(paths, settings_to_approve(load_run_config(paths.config)))
        return paths


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("damage"))


def damage(runs: Runs, paths: RunPaths, name: str, *, way: str) -> Path:
    """Damage one file; return a file outside of the run folder, which no command may write."""
    source = runs.folder / "older" if way == "an older copy" else runs.runs_dir / "other"
    outside = paths.root.parent.parent / "outside"
    damage_file(paths.root / name, way=way, source=source / name, outside=outside)
    return outside


class StartedError(UsageError):
    """The supervisor would be started now: all that comes before has passed."""


class StartsNothing(LocalAccess):
    """This machine up to the supervisor's start."""

    def start_supervisor(self, paths: RunPaths, *, detached: bool, grace_s: float) -> NoReturn:
        raise StartedError("started")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), cases(FILES))
def test_commands_end_cleanly_and_a_resume_gets_to_its_start(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, way: str
) -> None:
    paths = runs.copy(tmp_path)
    outside = damage(runs, paths, name, way=way)
    where = ["--runs-dir", str(paths.root.parent)]
    documented = {ExitCode.OK, ExitCode.USAGE, ExitCode.CONFIG}
    for words in (["status", "one"], ["status", "one", "--json"], ["list"], ["stop", "one"]):
        assert main([*words, *where], os.environ) == ExitCode.OK, words
        said = capsys.readouterr()
        assert "one" in said.out + said.err
    for words in (["logs", "one"], ["logs", "one", "--launcher"]):
        assert main([*words, *where], os.environ) in documented
    words = ["run", "--resume", "one", "--inventory", "local", *where, "--set", "train.steps=9"]
    capsys.readouterr()
    assert main(words, os.environ, access=StartsNothing(os.environ)) == ExitCode.USAGE
    assert capsys.readouterr().err.splitlines()[-1] == "error: started"
    assert outside.read_text() == "not the run's"


@pytest.fixture(scope="module")
def copies(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with the copy of a cluster's run, whose nodes do not answer."""
    paths = runs.copy(tmp_path_factory.mktemp("copies"))
    shutil.rmtree(paths.checkpoints)
    (node,) = ClusterInventory.load(paths.inventory).nodes
    node = replace(node, name="node-0", address="127.0.0.9", ssh_port=free_port("127.0.0.9"))
    node = replace(node, host_keys=(make_key(paths.root.parent.parent / "host"),))
    paths.inventory.write_text(make_cluster(node).to_json())
    plan = LaunchPlan.load(paths.plan)
    there = {RUN_DIR: f"/home/{USER}/tileforge/runs/one"}
    paths.plan.write_text(replace(plan, environment={**plan.environment, **there}).to_json())
    key = paths.root.parent.parent / "key"
    make_key(key)
    write_mirrored(paths, Mirrored(alive=True, seen_unix=1.0, ssh_key=str(key)))
    return paths.root.parent


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), cases(("mirror.json", *FILES)))
def test_commands_on_a_damaged_copy_of_a_clusters_run_end_cleanly(
    runs: Runs,
    copies: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    way: str,
) -> None:
    shutil.copytree(copies, tmp_path / "runs", symlinks=True)
    outside = damage(runs, RunPaths(tmp_path / "runs" / "one"), name, way=way)
    codes = {}
    for command in ("collect", "stop", "status", "list", "logs"):
        words = [command, *([] if command == "list" else ["one"])]
        codes[command] = main([*words, "--runs-dir", str(tmp_path / "runs")], os.environ)
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert all(len(line) < 1000 and line.isprintable() for line in errors), errors
        assert codes[command] in DOCUMENTED and (codes[command] == 0 or errors), command
    assert codes["list"] == ExitCode.OK and codes["collect"] != ExitCode.OK, codes
    assert outside.read_text() == "not the run's"


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in ("missing", "another run's") else pytest.mark.seeds)
        for way in WAYS
    ],
)
def test_a_valid_checkpoint_is_resumed_when_all_other_files_are_damaged(
    runs: Runs, tmp_path: Path, way: str
) -> None:
    paths = runs.copy(tmp_path)
    for name in FILES:
        # With another run's plan, too, this would be that run under another name.
        if (name, way) != ("plan.json", "another run's"):
            outside = damage(runs, paths, name, way=way)
    assert runs.run("--resume", "one", "--set", "train.steps=6", runs_dir=paths.root.parent) == 0
    log = paths.rank_log(0).read_bytes().replace(b"\0", b"").decode(errors="replace")
    assert f"resuming after step {STEPS} from" in log
    assert not manifest_problems(paths.checkpoint(6))
    summary = read_json(Summary, paths.summary)
    assert summary is not None and (summary.status, summary.steps) == ("finished", 6)
    rows = [row["step"] for row in read_metrics(paths.metrics) if "loss" in row]
    lost = [step for first, last in summary.missing_metrics for step in range(first, last + 1)]
    assert sorted([*rows, *lost]) == [1, 2, 3, 4, 5, 6]
    assert outside.read_text() == "not the run's"
    assert not processes_of(paths.root)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "an older copy"])
def test_the_checkpoint_before_a_damaged_one_is_resumed(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """Each of its files in turn; the test finds the trainer's checkpoint without training."""
    from payload.train.checkpoints.checkpoint import newest_checkpoint

    newest = f"checkpoints/step_{STEPS:08d}"
    for number, name in enumerate(CHECKPOINT_FILES):
        paths = runs.copy(tmp_path / str(number))
        target = paths.root / newest / name
        other = runs.runs_dir / "other" / "checkpoints" / "step_00000002" / name
        WAYS[way](target, other, tmp_path / "outside")
        assert newest_checkpoint(paths.checkpoints) == paths.checkpoint(2), name
        assert main(["status", "one", "--runs-dir", str(paths.root.parent)], os.environ) == 0
