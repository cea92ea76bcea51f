"""`python -m payload.finetune` as it is typed: from a file to a checkpoint."""

from __future__ import annotations

import html
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from payload.errors import ExitCode
from payload.finetune.__main__ import main
from payload.results import RunPaths
from payload.run_config import load_run_config
from payload.run_samples import SAMPLES_NAME, read_samples
from payload.write_report import add_samples
from tests.support.chat_data import conversations, make_model, write_rows
from tests.support.launching import DEADLINE_S, REPO, rank_env
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and data for it, not to be changed."""
    folder = tmp_path_factory.mktemp("finetune")
    make_model(folder / "model")
    chats = conversations(60)
    write_rows(folder / "chats.jsonl", [{"messages": each} for each in chats])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_rows(folder / "pairs.jsonl", [pair, {"prompt": "a", "chosen": "b"}])
    lines = [f"{each[0]['content']},{'ab'[place % 2]}" for place, each in enumerate(chats)]
    (folder / "labelled.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (folder / "plain.txt").write_text("\n\n".join(each[0]["content"] * 40 for each in chats))
    return folder


def finetune(place: Path, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(place, *words),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def command(place: Path, *words: object) -> list[str]:
    base = [sys.executable, "-m", "payload.finetune", "--model", str(place / "model")]
    return [*base, "--inventory", "local", *map(str, words)]


def environment() -> dict[str, str]:
    return {key: value for key, value in rank_env().items() if not key.startswith("MASTER_")}


@pytest.mark.processes
def test_a_dry_run_prints_everything_and_writes_nothing(place: Path, tmp_path: Path) -> None:
    done = finetune(place, "--data", place / "chats.jsonl", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "task chat, because its rows have the column 'messages'" in done.stdout
    assert "method  training of all weights, as it fits into" in done.stdout
    assert 'micro_batch_size = "auto"' in done.stdout
    assert "payload.data prepare --task chat" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_where_nothing_fits_the_smallest_method_is_named_and_in_fp32_the_smaller_dtype(
    place: Path, tmp_path: Path
) -> None:
    machines = json.loads((REPO / "payload/configs/llama70b_machines.json").read_text())
    nodes = [{**each, "memory_gib": 0.5} for each in machines["nodes"]]
    small = tmp_path / "small.json"
    small.write_text(json.dumps({**machines, "nodes": nodes}))
    words = ("--data", place / "chats.jsonl", "--inventory", small, "--dry-run")
    for dtype in ("fp32", "bf16"):
        done = finetune(place, *words, "--set", f"precision.dtype={dtype}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "beside a base of 4 bits, though the estimate is above the memory: " in done.stdout
        is_named = "--set precision.dtype=bf16 takes less memory" in done.stdout
        assert is_named is (dtype == "fp32")


@pytest.mark.ranks
def test_one_command_goes_from_conversations_to_a_checkpoint_and_its_parts_can_be_run_again(
    place: Path, tmp_path: Path
) -> None:
    words = ("--data", place / "chats.jsonl", "--steps", 3, "--set", "adapter.kind=lora")
    done = finetune(place, *words, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = load_run_config(tmp_path / "out" / "run.toml")
    assert (config.task.kind, config.adapter.kind, config.train.steps) == ("chat", "lora", 3)
    assert config.batch.micro_batch_size == "auto"
    run = RunPaths((tmp_path / "runs" / "latest").resolve())
    assert isinstance(load_run_config(run.config).batch.micro_batch_size, int)
    newest = run.newest_checkpoint()
    assert newest is not None and (newest / "adapter_model.safetensors").exists()
    assert len(read_samples(run.root / SAMPLES_NAME)) == 2 and "no samples" not in done.stderr
    prepare, again = (line for line in done.stdout.splitlines() if line.startswith("PYTHONPATH="))
    edited = (tmp_path / "out" / "run.toml").read_text().replace("steps = 3", "steps = 2")
    (tmp_path / "out" / "run.toml").write_text(edited)
    for line in (prepare, again):
        words_of = shlex.split(line)
        typed = subprocess.run(
            words_of[1:], cwd=tmp_path, env={**environment(), "PYTHONPATH": str(REPO)}, check=False
        )
        assert typed.returncode == 0
    assert (
        json.loads(RunPaths((tmp_path / "runs" / "latest").resolve()).summary.read_text())["steps"]
        == 2
    )
    refused = finetune(place, *words, "--out", "out", cwd=tmp_path)
    assert refused.returncode == ExitCode.CONFIG
    assert "says something else, perhaps your own edits. Run it with: " in refused.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(("data", "task"), [("labelled.csv", "classify"), ("plain.txt", "text")])
def test_labelled_texts_and_plain_text_are_trained_on_as_well(
    place: Path, tmp_path: Path, data: str, task: str
) -> None:
    done = finetune(place, "--data", place / data, "--steps", 2, "--no-samples", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"task {task}, because " in done.stdout
    assert "status           finished" in done.stdout
    assert not list(tmp_path.glob(f"runs/*/{SAMPLES_NAME}")) and "no samples" not in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_the_report_shows_what_the_model_wrote_before_and_after(
    place: Path, tmp_path: Path
) -> None:
    words = ("--data", place / "chats.jsonl", "--steps", 2, "--set", "optimizer.lr=0.1")
    done = finetune(place, *words, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0 and "no samples" not in done.stderr, done.stderr
    run = RunPaths((tmp_path / "runs" / "latest").resolve())
    samples = read_samples(run.root / SAMPLES_NAME)
    assert len(samples) == 2
    for each in samples:
        assert each.prompt.startswith("<|im_start|>user\n")
        assert each.prompt.endswith("<|im_start|>assistant\n")
        assert each.before and each.before != each.after
        assert html.escape(each.before.split()[0]) in run.report.read_text(encoding="utf-8")
    (run.root / SAMPLES_NAME).unlink()
    (tmp_path / "out" / "data" / "val.bin").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        problem = add_samples(run)
    assert problem is not None and "val.bin" in problem
    assert not (run.root / SAMPLES_NAME).exists()


@pytest.mark.ranks
def test_a_signal_reaches_the_run_and_its_exit_code_is_the_command_s(
    place: Path, tmp_path: Path
) -> None:
    words = command(place, "--data", place / "chats.jsonl", "--steps", 100_000)
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as it:
        wait_until(lambda: any(tmp_path.glob("runs/*/metrics.jsonl")), what="a step", timeout_s=120)
        os.kill(it.pid, signal.SIGINT)
        _, err = it.communicate(timeout=DEADLINE_S)
    assert it.returncode == 130, err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--data", "nowhere.jsonl"), "--data nowhere.jsonl: there is no such file"),
        (("--data", "chats.jsonl", "--set", "data.dir=x"), "give it as --out"),
        (("--data", "chats.jsonl", "--set", "train.stepz=3"), "Did you mean train.steps?"),
        (("--data", "chats.jsonl", "--set", "adapter.rank=4096"), "above the width"),
        (("--data", "chats.jsonl", "--set", "data.sequence_length=9999"), "positions of"),
        (("--data", "chats.jsonl", "--set", "batch.global_batch_size=0"), "must be at least 1"),
        (("--data", "chats.jsonl", "--set", "batch.global_batch_size=abc"), "whole number is"),
        (("--data", "chats.jsonl", "--set", "optimizer.lr=abc"), "optimizer.lr = 'abc': a number"),
        (("--data", "pairs.jsonl"), "row 2: no rejected among the columns 'prompt', 'chosen'"),
        (("--data", "chats.jsonl", "--task", "classify"), "with its labels; name it"),
        (("--data", "chats.jsonl", "--model", "nowhere/"), "nowhere"),
        (("--data", "chats.jsonl", "--model", "scratch"), "begins with weights"),
    ],
)
def test_a_mistake_is_one_line_and_exit_10(
    place: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = [str(place / word) if (place / word).is_file() else word for word in words]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    assert main([*command(place, *real, "--dry-run")[3:]]) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and problem in line
    assert list(tmp_path.iterdir()) == []
