"""`python -m benchmarks.golden`: its cases, its comparison, and the commit to compare with.

A small trainer replaces the real trainer in a separate repository. tests/train/
test_golden_losses.py has the real trainer's losses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.golden.__main__ import main
from benchmarks.golden.cases import CASES, CONFIG, FEATURES, STEPS, Case
from benchmarks.golden.compare import compare
from benchmarks.golden.inputs import MODELS, TASKS
from benchmarks.golden.runs import SERIES, Run
from benchmarks.golden.stored import PATH, TOLERANCE, Stored
from payload.config.run_config import parse_run_config
from tests.support.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
PARSED = [Case.parse(name) for name in CASES]
ONLY = ("--only", "1-replicate-text-scratch", "2-replicate-text-scratch-muon-resume")

TRAINER = """
import json
import os
import struct
import sys
from pathlib import Path

HEADER = b'{"weight": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}'
FACTOR = 1.0


def main(argv, env):
    settings = dict(each.split("=", 1) for each in argv if "=" in each)
    folder, rate = Path(argv[argv.index("--run-dir") + 1]), float(settings.get("optimizer.lr", 1))
    losses = {step: FACTOR * rate / (1 + step) for step in range(31)}
    if env.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, "loss": losses[step], "grad_norm": 1.0} for step in range(1, 31)]
        rows += [{"step": step, "val_loss": losses[step]} for step in (0, 15, 30)]
        lines = "".join(json.dumps(row) + "\\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines)
        for step in (15, 30):
            checkpoint = folder / f"checkpoints/step_{step:08}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            content = struct.pack("<Q", len(HEADER)) + HEADER + struct.pack("<d", losses[step])
            (checkpoint / "model.safetensors").write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
"""
HANGS = """
import os
import signal
from pathlib import Path


def main(argv, env):
    Path(env["TEST_FOLDER"], str(os.getpid())).touch()
    signal.pause()
"""
FAILS = """
def main(argv, env):
    raise ValueError("the trainer's own error")
"""


def git(repo: Path, *arguments: str) -> str:
    """Run git in a repository without the user's settings; return its output."""
    settings = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "core.hooksPath=")
    return subprocess.run(
        ["git", "-C", str(repo), *settings, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Return a repository with one commit, which has the trainer."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet")
    put_trainer(folder, TRAINER)
    commit(folder)
    return folder


def put_trainer(repo: Path, text: str) -> None:
    """Write the trainer of a working tree."""
    package = repo / "payload" / "train"
    package.mkdir(parents=True, exist_ok=True)
    (repo / "payload" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(text, encoding="utf-8")


def commit(repo: Path) -> None:
    """Commit the whole working tree."""
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "a trainer")


def worktrees(repo: Path) -> list[str]:
    """Return the folders of all working trees of a repository."""
    lines = git(repo, "worktree", "list", "--porcelain").splitlines()
    return [line.removeprefix("worktree ") for line in lines if line.startswith("worktree ")]


def golden(repo: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Compare a repository's working tree with its commit; return exit code and JSON."""
    exit_code = main(["--repo", str(repo), "--against", "HEAD", *ONLY, *arguments])
    out, _ = capsys.readouterr()
    assert worktrees(repo) == [str(repo)]
    return exit_code, json.loads(out)


@pytest.mark.slow
@pytest.mark.processes
def test_the_same_code_has_no_difference(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, found = golden(repo, capsys=capsys)
    assert exit_code == 0
    assert found["against"] == git(repo, "rev-parse", "HEAD").strip() and found["tolerance"] == 0
    assert [row["name"] for row in found["rows"]] == list(ONLY[1:])
    for row in found["rows"]:
        assert row["steps"] == STEPS and row["holds"] and row["weights_equal"] is True
        assert row["largest"] == dict.fromkeys(SERIES, 0) and row["first_step"] is None


@pytest.mark.slow
@pytest.mark.processes
def test_a_change_is_found_unless_it_is_within_the_tolerance(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_trainer(repo, TRAINER.replace("FACTOR = 1.0", "FACTOR = 1.000001"))
    exit_code, found = golden(repo, capsys=capsys)
    assert exit_code == 1
    for row in found["rows"]:
        assert not row["holds"] and row["weights_equal"] is False and row["first_step"] == 0
        assert row["largest"]["loss"] == pytest.approx(1e-6, rel=1e-3)
        assert row["largest"]["grad_norm"] == 0
    assert golden(repo, "--tolerance", "1e-5", capsys=capsys)[0] == 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_setting_changes_the_working_trees_runs_alone(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, found = golden(repo, "--set", "optimizer.lr=1.5", capsys=capsys)
    assert exit_code == 1
    assert {row["largest"]["val_loss"] for row in found["rows"]} == {0.5}


@pytest.mark.slow
@pytest.mark.processes
def test_a_trainer_without_its_function_is_started_as_a_command(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_trainer(repo, TRAINER.replace("main(", "run("))
    exit_code, found = golden(repo, capsys=capsys)
    assert exit_code == 0 and all(row["weights_equal"] for row in found["rows"])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (FAILS, "the trainer's own error"),
        pytest.param(
            TRAINER.replace("main(", "run(").replace("return 0", "return 3"),
            "exit status 3",
            marks=pytest.mark.slow,
        ),
        (TRAINER.replace("range(1, 31)", "range(1, 30)"), "have loss"),
        pytest.param(
            TRAINER.replace("model.safetensors", "optimizer.safetensors"),
            "has no weights",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_commit_that_does_not_train_to_the_end_is_an_error(
    repo: Path, capsys: pytest.CaptureFixture[str], trainer: str, message: str
) -> None:
    put_trainer(repo, trainer)
    commit(repo)
    put_trainer(repo, TRAINER)
    with pytest.raises(SystemExit, match=message):
        golden(repo, capsys=capsys)
    assert worktrees(repo) == [str(repo)]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_the_worktree_and_kills_the_ranks(
    repo: Path, tmp_path: Path, number: signal.Signals
) -> None:
    put_trainer(repo, HANGS)
    commit(repo)
    put_trainer(repo, TRAINER)
    started = tmp_path / "started"
    started.mkdir()
    arguments = ("--repo", str(repo), "--against", "HEAD", "--only", ONLY[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.golden", *arguments],
        cwd=ROOT,
        env=os.environ | {"TEST_FOLDER": str(started)},
    )
    try:
        wait_until(lambda: len(list(started.iterdir())) == 2, what="two ranks of the commit")
        assert len(worktrees(repo)) == 2
        process.send_signal(number)
        assert process.wait(timeout=DEADLINE_S) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert worktrees(repo) == [str(repo)]
    for path in started.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


@pytest.mark.processes
def test_a_commit_that_does_not_exist_is_named(repo: Path) -> None:
    with pytest.raises(SystemExit, match="--against nowhere: not a commit"):
        main(["--repo", str(repo), "--against", "nowhere", *ONLY])


def test_every_strategy_task_model_and_feature_is_in_a_case() -> None:
    assert len(set(CASES)) == len(CASES)
    assert {each.task for each in PARSED} == set(TASKS)
    assert {each.model for each in PARSED} == {"scratch", *MODELS}
    assert set().union(*(each.features for each in PARSED)) == set(FEATURES)
    parts = {part for each in PARSED for part in each.mesh.split("+")}
    assert parts == {"replicate", "shard", "shard2", "tensor2", "pipeline2", "zero3"}
    for task in TASKS:
        assert {each.ranks for each in PARSED if each.task == task} >= {1, 2}


@pytest.mark.parametrize("case", PARSED, ids=CASES)
def test_a_cases_settings_fit_its_ranks(case: Case) -> None:
    settings = case.settings(data=Path("data"), models=Path("models"))
    config = parse_run_config(CONFIG, overrides=settings, where="test")
    config.require_even(case.ranks)
    assert config.distributed.mesh(case.ranks).world_size == case.ranks


def test_a_list_of_cases_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(CASES)


def run_of(loss: dict[int, float], *, weights: str = "0") -> Run:
    """Return a run with these losses."""
    return Run(series=dict.fromkeys(SERIES, loss), weights={STEPS: weights})


@pytest.mark.parametrize(
    ("found", "difference", "first_step"),
    [
        (run_of({1: 2.0, 2: 4.0}), 0, None),
        (run_of({1: 2.0, 2: 5.0}), 0.25, 2),
        (run_of({1: 2.0}), float("inf"), 2),
        (run_of({1: 2.0, 2: 4.0, 3: 1.0}), float("inf"), 3),
        (run_of({1: float("nan"), 2: 4.0}), float("inf"), 1),
    ],
)
def test_the_largest_difference_is_relative_and_a_missing_step_is_infinite(
    found: Run, difference: float, first_step: int | None
) -> None:
    row = compare("case", found, run_of({1: 2.0, 2: 4.0}))
    assert row.largest == dict.fromkeys(SERIES, difference)
    assert row.first_step == first_step
    assert row.holds(0) == (difference == 0)


def test_without_a_tolerance_weights_have_to_be_equal() -> None:
    row = compare("case", run_of({1: 2.0}, weights="1"), run_of({1: 2.0}))
    assert row.weights_equal is False
    assert not row.holds(0) and row.holds(1e-5)


def test_the_stored_values_are_of_every_case_that_does_not_depend_on_the_cpu() -> None:
    stored = Stored.read()
    assert set(stored.runs) == {case.name for case in PARSED if case.is_portable()}
    assert stored.render() == PATH.read_text(encoding="utf-8")
    for run in stored.runs.values():
        assert list(run.series["loss"]) == list(run.series["grad_norm"]) == list(range(1, 31))
        assert list(run.series["val_loss"]) == [0, 15, 30]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_stored_values_are_the_same_with_kernels_and_without(model: str) -> None:
    runs, name = Stored.read().runs, f"1-replicate-text-{model}"
    row = compare(name, runs[f"{name}-torch"], runs[name])
    assert row.holds(TOLERANCE) and not row.holds(0)


def test_new_values_replace_those_of_their_cases_alone(tmp_path: Path) -> None:
    before, (name, other, *_) = Stored.read(), sorted(Stored.read().runs)
    before.runs["1-replicate-text-gpt2-bf16"] = before.runs[name]
    before.replace({name: run_of({1: 0.1, 2: 1e-17})}, inputs={"text": "1"})
    before.write(tmp_path / "losses.json")
    after = Stored.read(tmp_path / "losses.json")
    assert after.runs[name].series == {key: {1: 0.1, 2: 1e-17} for key in SERIES}
    assert after.runs[other] == Stored.read().runs[other]
    assert set(after.runs) == set(Stored.read().runs)
    assert after.inputs == Stored.read().inputs | {"text": "1"}


def test_stored_values_of_other_inputs_are_refused() -> None:
    stored, (case, *_) = Stored.read(), PARSED
    stored.require([case], inputs={"text": stored.inputs["text"]})
    with pytest.raises(SystemExit, match="text: inputs differ from the inputs in"):
        stored.require([case], inputs={"text": "0"})
    with pytest.raises(SystemExit, match=r"has no values of other\."):
        stored.require([replace(case, name="other")], inputs={})


def test_a_case_that_depends_on_the_cpu_has_no_stored_values() -> None:
    with pytest.raises(SystemExit, match=r"its losses depend on the CPU\. Use --against"):
        main(["--only", "1-replicate-text-gpt2-bf16"])
