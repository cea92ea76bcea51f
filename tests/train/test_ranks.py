"""Real ranks train one model, and a resume is exact."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import equal

from payload.config.run_config import load_run_config
from payload.train.start_clock import process_age_s
from tests.support.launching import (
    evaluations,
    losses,
    metrics,
    mpirun,
    rank_env,
    run,
    summary,
    torchrun,
    train,
    train_program,
    train_several,
)
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.ranks


Trained = Callable[..., Path]

DROPOUT = {dtype: (f"precision.dtype={dtype}", "model.dropout=0.1") for dtype in ("fp32", "bf16")}
MICRO_BATCH_4 = ("batch.micro_batch_size=4",)
BF16_GRADIENTS = ("distributed.grad_dtype=bf16",)
ON_TWO = (*DROPOUT.values(), MICRO_BATCH_4, BF16_GRADIENTS)
"""The settings of runs on two ranks that share one start."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Trained:
    """Return `trained(num_ranks, *overrides)`: the folder of 20 steps, run once, not to be changed.

    Next to it, `stderr` is the ranks' output, for the plain run on two ranks with all imports; the
    runs of `ON_TWO` have no `stderr`.
    """

    @functools.cache
    def on_two() -> dict[tuple[str, ...], Path]:
        root = tmp_path_factory.mktemp("on_two")
        folders = {overrides: root / str(number) for number, overrides in enumerate(ON_TWO)}
        runs = {folder: overrides for overrides, folder in folders.items()}
        train_several(runs, tiny_config, num_ranks=2)
        return folders

    @functools.cache
    def folder_of(num_ranks: int, *overrides: str) -> Path:
        if num_ranks == 2 and overrides in ON_TWO:
            return on_two()[overrides]
        folder = tmp_path_factory.mktemp("trained") / "run"
        program = train_program(folder, tiny_config, *overrides)
        # In a new Python: a fork of a process with all modules imports nothing.
        imports = {"PYTHONPROFILEIMPORTTIME": "1"} if (num_ranks, overrides) == (2, ()) else {}
        result = run(mpirun(num_ranks, *program), env=rank_env(**imports))
        assert result.returncode == 0, result.stderr
        folder.with_name("stderr").write_text(result.stderr, encoding="utf-8")
        return folder

    return folder_of


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Trained:
    """Return `killed(*overrides)`: a run of two ranks, one of them killed after step 10."""

    @functools.cache
    def folder_of(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("killed") / "run"
        _train_and_kill(folder, tiny_config, *overrides, after_step=10)
        return folder

    return folder_of


def test_losses_do_not_depend_on_how_many_ranks_share_the_batch(trained: Trained) -> None:
    alone = losses(trained(1))
    assert len(alone) == 20
    for ranks in (2, 4):
        assert losses(trained(ranks)) == pytest.approx(alone, rel=1e-5)
        assert summary(trained(ranks))["world_size"] == ranks
        assert summary(trained(ranks))["ranks_identical"] is True
        assert evaluations(trained(ranks)) == pytest.approx(evaluations(trained(1)), rel=1e-5)


def test_a_run_says_what_its_start_consisted_of(trained: Trained) -> None:
    start_s = summary(trained(2))["start_s"]
    assert list(start_s)[:4] == ["imports", "group", "data", "model"]
    assert min(start_s.values()) >= 0
    said = trained(2).with_name("stderr").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in said if line.startswith("ready in "))
    assert line.startswith(f"ready in {sum(start_s.values()):.1f} s: imports")


def test_a_start_counts_from_the_birth_of_its_process() -> None:
    born_unix = psutil.Process().create_time()
    least_s = time.time() - born_unix
    age_s = process_age_s()
    # The kernel's times are off by at most a second; a busy machine can pause this process.
    assert least_s - 1.5 <= age_s <= time.time() - born_unix + 1.5


def test_a_rank_that_compiles_nothing_does_not_load_the_compiler(trained: Trained) -> None:
    lines = trained(2).with_name("stderr").read_text(encoding="utf-8").splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if "import time:" in line}
    assert "torch" in imported
    assert not {"torch._dynamo", "sympy", "transformers"} & imported


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_plain_one_does(tmp_path: Path, tiny_config: Path) -> None:
    settings = ("train.steps=5", "model.n_layer=1")
    runs = {
        tmp_path / "plain": settings,
        tmp_path / "compiled": (*settings, "engine.compile=true"),
    }
    train_several(runs, tiny_config, num_ranks=1)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


@pytest.mark.slow
def test_torchrun_and_one_process_alone_give_what_mpirun_gives(
    tmp_path: Path, tiny_config: Path, trained: Trained
) -> None:
    result = run(torchrun(2, *train_program(tmp_path, tiny_config)))
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == losses(trained(2))
    assert losses(trained(1)) == pytest.approx(losses(trained(2)), rel=1e-5)


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, killed: Trained
) -> dict[str, Path]:
    """Return the killed runs of each dtype, resumed on the same number of ranks."""
    root = tmp_path_factory.mktemp("resumed")
    folders = {dtype: root / dtype for dtype in DROPOUT}
    for dtype, folder in folders.items():
        shutil.copytree(killed(*DROPOUT[dtype]), folder)
    runs = {folder: DROPOUT[dtype] for dtype, folder in folders.items()}
    train_several(runs, tiny_config, num_ranks=2)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DROPOUT)
def test_ten_steps_killed_and_resumed_end_bitwise_where_twenty_in_one_go_do(
    trained: Trained, resumed: dict[str, Path], dtype: str
) -> None:
    whole = trained(2, *DROPOUT[dtype])
    assert losses(resumed[dtype]) == losses(whole)
    _assert_same_checkpoint(resumed[dtype], whole)


@pytest.mark.slow
def test_a_micro_batch_of_auto_is_one_number_on_every_rank_and_at_a_resume(
    tmp_path: Path, tiny_config: Path, trained: Trained
) -> None:
    settings = ("batch.micro_batch_size=auto",)
    result = train(tmp_path / "auto", tiny_config, *settings, "train.steps=10", num_ranks=2)
    assert (
        'batch.micro_batch_size = "auto": a micro-batch has 4 of at most 4 sequences'
        in result.stderr
    )
    assert load_run_config(tmp_path / "auto" / "run.toml").batch.micro_batch_size == 4
    again = train(tmp_path / "auto", tiny_config, *settings, num_ranks=2)
    assert "of at most" not in again.stderr, "the run goes on with what it has settled on"
    assert losses(tmp_path / "auto") == losses(trained(2, *MICRO_BATCH_4))
    _assert_same_checkpoint(tmp_path / "auto", trained(2, *MICRO_BATCH_4))


def test_a_resume_on_another_number_of_ranks_goes_on_with_the_same_losses(
    tmp_path: Path, tiny_config: Path, trained: Trained, killed: Trained
) -> None:
    settings = DROPOUT["fp32"]
    broken = shutil.copytree(killed(*settings), tmp_path / "broken")
    train(broken, tiny_config, *settings, num_ranks=4)
    assert losses(broken) == pytest.approx(losses(trained(2, *settings)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        # Buckets determine the order of gloo's sums; a width of 256 gives several.
        (3, ("model.n_embd=256", "batch.global_batch_size=6", "batch.micro_batch_size=1")),
        (1, ("optimizer.name=muon", "schedule.kind=constant")),
        (2, ("optimizer.name=adamw8bit",)),
    ],
    ids=["three ranks with several buckets", "muon", "a state in 8 bits"],
)
def test_from_the_middle_a_run_ends_bitwise_as_it_did(
    tmp_path: Path, tiny_config: Path, trained: Trained, num_ranks: int, settings: tuple[str, ...]
) -> None:
    whole = trained(num_ranks, *settings)
    half = shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(half / "checkpoints" / "step_00000020")
    train(half, tiny_config, *settings, num_ranks=num_ranks)
    assert losses(half) == losses(whole)
    _assert_same_checkpoint(half, whole)


def test_gradients_that_travel_as_bf16_give_nearly_the_same_losses_and_one_model(
    trained: Trained,
) -> None:
    with_bf16 = trained(2, *BF16_GRADIENTS)
    assert losses(with_bf16) != losses(trained(2))
    assert losses(with_bf16) == pytest.approx(losses(trained(2)), rel=1e-2)
    assert summary(with_bf16)["ranks_identical"] is True


def test_sigterm_to_one_rank_saves_and_stops_all(tmp_path: Path, tiny_config: Path) -> None:
    process = _start(tmp_path, tiny_config, "train.steps=100000", "train.checkpoint_every=0")
    _wait_for_step(tmp_path, 5, process=process)
    progress = (tmp_path / "progress" / "rank_0001.json").read_text()
    pid = int(progress.split('"pid": ')[1].split(",")[0])
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
    assert process.wait(timeout=DEADLINE_S) == 0
    ended = summary(tmp_path)
    assert (ended["status"], ended["ranks_identical"]) == ("stopped", True)
    assert (tmp_path / "checkpoints" / f"step_{ended['steps']:08d}" / "manifest.json").exists()


def test_ranks_that_differ_stop_the_run_with_exit_40_and_the_odd_rank_is_named(
    tmp_path: Path, tiny_config: Path
) -> None:
    program = tmp_path / "spoil.py"
    program.write_text(_SPOIL_RANK_2, encoding="utf-8")
    words = train_program(tmp_path / "run", tiny_config)[2:]
    result = run(mpirun(3, str(program), *words, "--set", "batch.global_batch_size=6"))
    assert result.returncode == 40, result.stderr
    record = json.loads((tmp_path / "run" / "exits" / "rank_0000.json").read_text())
    assert "rank 2 differs from the others" in record["error"]
    ended = summary(tmp_path / "run")
    assert (ended["status"], ended["ranks_identical"]) == ("failed", False)
    assert not (tmp_path / "run" / "checkpoints").exists()


# A bit flips in one rank's memory after the third step, as with broken RAM.
_SPOIL_RANK_2 = """
import os, sys
import torch
from payload.train import trainer
from payload.train.__main__ import main

step = trainer.Trainer._train_step

def spoiled(self):
    stopping = step(self)
    if self._context.world.rank == 2 and self._step == 3:
        with torch.no_grad():
            self._context.model.wte.weight[5, 5] += 1e-7
    return stopping

trainer.Trainer._train_step = spoiled
sys.exit(main(sys.argv[1:], os.environ))
"""


def _start(run_dir: Path, config: Path, *overrides: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        mpirun(2, *train_program(run_dir, config, *overrides)),
        env=rank_env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _train_and_kill(run_dir: Path, config: Path, *overrides: str, after_step: int) -> None:
    """Train on two ranks, kill -9 one of them, and keep the checkpoint of `after_step`.

    The run is long, so that it cannot end before the kill; TINY_RUN's learning rate does not
    depend on its length.
    """
    process = _start(
        run_dir, config, *overrides, "train.steps=1000000", "train.keep_checkpoints=999"
    )
    _wait_for_step(run_dir, after_step + 3, process=process)
    saved = run_dir / "checkpoints" / f"step_{after_step:08d}"
    wait_until(saved.exists, what="the checkpoint")
    progress = (run_dir / "progress" / "rank_0001.json").read_text()
    pid = int(progress.split('"pid": ')[1].split(",")[0])
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(pid)], check=False)
    assert process.wait(timeout=DEADLINE_S) != 0
    for folder in (run_dir / "checkpoints").glob("step_*"):
        if folder.name != f"step_{after_step:08d}":
            shutil.rmtree(folder)
    assert summary(run_dir)["status"] != "finished"


def _wait_for_step(run_dir: Path, step: int, *, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists():
            steps = [row["step"] for row in metrics(run_dir) if "loss" in row]
            if steps and steps[-1] >= step:
                return
        assert process.poll() is None, "the run ended before the step"
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def _assert_same_checkpoint(left: Path, right: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load_file(folder / "checkpoints" / "step_00000020" / name) for folder in (left, right)
        )
        assert ours.keys() == theirs.keys()
        assert all(equal(ours[key], theirs[key]) for key in ours), name
