"""The launcher seam: a launcher is one file, found by its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ConfigError, ExitCode
from payload.launch.agent_launcher import end_of_agent
from payload.launch.environment import launcher_environment
from payload.launch.launcher import LostNode, Report
from payload.launch.launchers.registry import candidates, find, names
from payload.orchestrate.runs.planning import require_launcher
from payload.run_record.run_files import RunPaths
from tests.launch import toy_launcher
from tests.launch.inventories import make_inventory
from tests.orchestrate.operator import SETTINGS
from tests.support.data_folders import make_data_folder
from tests.support.launching import REPO, losses, summary
from tests.support.waiting import DEADLINE_S

STEPS = 4


def test_a_launcher_has_the_name_of_its_file_and_is_found_by_it() -> None:
    assert {"mpirun", "torchrun"} <= set(names())
    assert [find(name).name for name in names()] == names()


def test_auto_prefers_mpirun_and_a_name_selects_its_launcher() -> None:
    assert [launcher.name for launcher in candidates("auto")] == ["mpirun", "torchrun"]
    assert [launcher.name for launcher in candidates("torchrun")] == ["torchrun"]


@pytest.mark.parametrize("name", ["mpi", "base", "registry", "../mpirun", ""])
def test_an_unknown_launcher_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="Use one of auto, mpirun, srun, torchrun"):
        candidates(name)


def test_a_launcher_keeps_the_variables_that_it_needs() -> None:
    base = {"SLURM_JOB_ID": "7", "PMI_RANK": "1", "PET_NNODES": "9", "HOME": "/home/a"}
    assert launcher_environment(base, {}) == {"HOME": "/home/a"}
    kept = launcher_environment(base, {}, keeps=("SLURM_",))
    assert kept == {"HOME": "/home/a", "SLURM_JOB_ID": "7"}


def test_a_launcher_for_one_machine_is_refused_on_two_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_run_config("[launch]\nlauncher = 'torchrun'", where="test")
    require_launcher(config, make_inventory(num_nodes=2))
    monkeypatch.setattr(type(find("torchrun")), "spans_nodes", toy_launcher.LAUNCHER.spans_nodes)
    require_launcher(config, make_inventory(num_nodes=1))
    with pytest.raises(ConfigError, match=r"'torchrun' is for one machine, but .* has 2"):
        require_launcher(config, make_inventory(num_nodes=2))


def test_the_end_of_a_node_s_agent_names_the_node_only_where_ssh_broke_off() -> None:
    torchrun = find("torchrun")
    lost = torchrun.report(f"{end_of_agent('10.0.0.3', 255)}\n{end_of_agent('10.0.0.2', 1)}\n")
    assert lost == Report(lost=LostNode(address="10.0.0.3", how="exited with status 255"))
    assert torchrun.report(end_of_agent("10.0.0.3", 1)) == Report()


def test_in_a_slurm_job_torchrun_s_tasks_are_agents_and_no_ranks() -> None:
    torchrun = find("torchrun")
    assert torchrun.report("srun: error: node-2: task 1: Killed\n") == Report()
    lost = torchrun.report("srun: error: Node failure on node-2\n").lost
    assert lost == LostNode(address="node-2", how="failed, according to Slurm")
    refused = torchrun.report("srun: error: Unable to create step for job 7: Job violates policy\n")
    assert refused.not_started is not None and "Job violates policy" in refused.not_started


def test_torchrun_keeps_what_srun_needs() -> None:
    base = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "PET_NNODES": "9"}
    assert launcher_environment(base, {}, keeps=find("torchrun").keeps) == {"SLURM_JOB_ID": "7"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the payload that has one file more, and data."""
    folder = tmp_path_factory.mktemp("launchers")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(REPO / "payload", folder / "payload", ignore=ignored)
    toy = folder / "payload" / "launch" / "launchers" / "toy.py"
    shutil.copy(toy_launcher.__file__, toy)
    make_data_folder(folder / "data", num_train_tokens=4000, num_val_tokens=200, vocab_size=512)
    return folder


@pytest.fixture(scope="module")
def toy_run(root: Path) -> tuple[RunPaths, str]:
    """Return a run through the new launcher, and its output."""
    return run(root, "toy", "launch.launcher=toy")


def run(root: Path, run_id: str, *settings: str) -> tuple[RunPaths, str]:
    """Train two ranks by the code in `root`, and expect success."""
    chosen = (*SETTINGS, f"data.dir={root / 'data'}", f"train.steps={STEPS}", *settings)
    words = [word for setting in chosen for word in ("--set", setting)]
    words += ["--run-id", run_id, "--set", "launch.ranks_per_node=2"]
    done = subprocess.run(
        [sys.executable, "-m", "payload.orchestrate", "run", "--inventory", "local", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == ExitCode.OK, done.stderr
    return RunPaths(root / "runs" / run_id), done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_a_new_launcher_is_one_file_and_trains(toy_run: tuple[RunPaths, str]) -> None:
    lines = Path(toy_launcher.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    toy, said = toy_run
    assert "through toy" in said or "toy; files: " in said, said
    result = summary(toy.root)
    assert (result["world_size"], result["ranks_identical"]) == (2, True)
    assert result["status"] == "finished"


@pytest.mark.seeds
@pytest.mark.slow
@pytest.mark.ranks
def test_a_new_launcher_trains_what_mpirun_trains(
    root: Path, toy_run: tuple[RunPaths, str]
) -> None:
    toy, _ = toy_run
    usual, _ = run(root, "usual")
    assert losses(toy.root) == pytest.approx(losses(usual.root), rel=1e-6)
