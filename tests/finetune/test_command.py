"""`python -m payload.finetune` from a file to a checkpoint, as a user runs it."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.architecture_cases import make_folder
from payload.config.run_config import load_run_config
from payload.core.errors import ConfigError, ExitCode
from payload.data.__main__ import main as data
from payload.data.reading.packed_blocks import open_packed
from payload.finetune.__main__ import main
from payload.formats.data_folder import load_meta
from payload.orchestrate.__main__ import main as orchestrate
from payload.run_record.report_and_samples_process import add_samples
from payload.run_record.run_files import RunPaths
from payload.run_record.run_samples import read_samples
from payload.train.models.loading import load
from tests.model_classes.cases import CASES as CLASSES
from tests.support.chat_data import conversations, make_model, make_tokenizer, write_rows
from tests.support.launching import REPO, rank_env
from tests.support.machine_speed import plant_speed
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and data for it, which tests must not change."""
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
    base = [sys.executable, "-m", "payload.finetune", "--model", f"{place}/model"]
    return [*base, "--inventory", "local", *map(str, words)]


def environment() -> dict[str, str]:
    return {key: value for key, value in rank_env().items() if not key.startswith("MASTER_")}


def run_here(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m payload.data` or `payload.orchestrate` in this process, which has imported
    torch.
    """
    python, *flags, name = words[:4]
    rest = words[4:]
    assert (python, *flags) == (sys.executable, "-P", "-m")
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = data(rest) if name == "payload.data" else orchestrate(rest, environment())
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` runs the other programs in this process; the current folder is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    programs = SimpleNamespace(run=run_here, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("payload.finetune.__main__.subprocess", programs)


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_a_dry_run_prints_everything_and_writes_nothing(
    place: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_speed(tmp_path_factory.mktemp("speed"), monkeypatch)
    assert main(command(place, "--data", place / "chats.jsonl", "--dry-run")[3:]) == 0
    out, err = capsys.readouterr()
    assert " tokens/s, measured on this machine on 20" in out and "measuring" not in err
    assert "task chat, because its rows have the column 'messages'" in out
    assert "method  full fine-tuning, as it fits into" in out
    assert 'micro_batch_size = "auto"' in out
    assert "payload.data prepare --task chat" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_a_model_whose_layers_mix_conversations_gets_one_in_each_block(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_speed(tmp_path_factory.mktemp("speed"), monkeypatch)
    raw = {**CLASSES["DeepseekV4"].config(), "vocab_size": 304, "pad_token_id": None}
    base = make_tokenizer(tmp_path / "model")
    make_folder(raw | {"max_position_embeddings": 512}, base)
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": each} for each in conversations(60)])
    words = command(tmp_path, "--data", rows, "--dry-run")[3:]
    assert main(words) == 0
    out = capsys.readouterr().out
    reason = "transformers' layers of model_type 'deepseek_v4' may mix the conversations of a block"
    assert f"        one conversation a block, because {reason}\n" in out
    line = next(each for each in out.splitlines() if " -m payload.data prepare " in each)
    prepare = shlex.split(line.partition(" -m payload.data ")[2])
    assert prepare[prepare.index("--packing") + 1] == "none"
    packed = ["best-fit" if each == "none" else each for each in prepare]
    model = load(base)
    for name, arguments in (("none", prepare), ("packed", packed)):
        folder = tmp_path / name
        assert data([*arguments, "--quiet", "--out", str(folder)]) == 0
        record = load_meta(folder).chat
        assert record is not None
        length = record.sequence_length
        blocks = open_packed(folder, split="train", sequence_length=length)
        refused = nullcontext() if name == "none" else pytest.raises(ConfigError)
        with refused as error:
            model.token_losses(*blocks.gather(np.arange(2)))
        assert error is None or "Prepare the data with --packing none" in str(error.value)
    # A packing on the command line is kept.
    assert main([*words, "--packing", "best-fit"]) == 0
    out = capsys.readouterr().out
    assert "--packing best-fit" in out and "one conversation a block" not in out


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_prepare_only_writes_data_and_config_and_starts_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "payload.finetune.__main__._run_to_end", lambda words: data(list(words[1:]))
    )
    words = command(place, "--data", place / "chats.jsonl", "--prepare-only")[3:]
    assert main(words) == 0
    out = capsys.readouterr().out
    config = tmp_path / "finetuned" / "chats" / "run.toml"
    assert load_run_config(config).data.dir == "finetuned/chats/data"
    assert (tmp_path / "finetuned" / "chats" / "data" / "train.bin").exists()
    assert not (tmp_path / "runs").exists()
    start, submit, note = out.splitlines()[-3:]
    assert start.startswith("nothing was started. To start the run: ")
    assert start.endswith("orchestrate run --config finetuned/chats/run.toml --inventory local")
    assert submit.endswith("orchestrate run --config finetuned/chats/run.toml --site slurm")
    assert "memory of this machine" in note


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_class_weights_are_suggested_only_to_a_run_without_them(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    weights: str,
) -> None:
    monkeypatch.setattr(
        "payload.finetune.__main__._run_to_end", lambda words: data(list(words[1:]))
    )
    rows = "".join(f"text {number},{'b' if number % 5 else 'a'}\n" for number in range(100))
    (tmp_path / "unequal.csv").write_text("text,label\n" + rows, encoding="utf-8")
    words = ("--data", "unequal.csv", "--prepare-only", "--set", f"task.class_weights={weights}")
    assert main(command(place, *words)[3:]) == 0
    printed = capsys.readouterr()
    assert ("task.class_weights=balanced" in printed.err) == (weights == "none")
    assert "--has-class-weights" not in printed.out


@pytest.mark.slow
@pytest.mark.processes
def test_the_decisions_fit_a_terminal_of_80_columns(place: Path, tmp_path: Path) -> None:
    words = command(place, "--data", place / "chats.jsonl", "--dry-run")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(words[0], words, {**environment(), "COLUMNS": "80", "PYTHONPATH": str(REPO)})
    printed = b""
    with contextlib.suppress(OSError):  # the end of a terminal's output
        while part := os.read(terminal, 4096):
            printed += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    lines = printed.decode().split("\r\n")
    decisions = lines[: next(i for i, line in enumerate(lines) if "prepare --task" in line)]
    labels = {line.split()[0] for line in decisions if line[:1].strip()}
    assert {"data", "model", "method", "memory", "time", "disk"} <= labels
    # A path or another word longer than a line stays whole.
    long = [line for line in decisions if len(line) > 80 and str(place) not in line]
    assert long == []


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "link", ["finetuned", "finetuned/chats", "finetuned/chats/data", "own/data"]
)
def test_a_link_in_the_output_folder_that_leads_elsewhere_is_refused(
    place: Path,
    tmp_path: Path,
    link: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    here = tmp_path / "project"
    (here / link).parent.mkdir(parents=True)
    (here / link).symlink_to(other)
    monkeypatch.chdir(here)
    words = ["--out", "own"] if link.startswith("own") else []
    assert main([*command(place, "--data", place / "chats.jsonl", *words)[3:]]) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a link that leads out of its folder, to {other}" in line and "--out" in line
    assert list(other.iterdir()) == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_where_nothing_fits_the_smallest_method_is_named_and_in_fp32_the_smaller_dtype(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = json.loads((REPO / "payload/configs/llama70b_machines.json").read_text())
    nodes = [{**each, "memory_gib": 0.5} for each in machines["nodes"]]
    small = tmp_path / "small.json"
    small.write_text(json.dumps({**machines, "nodes": nodes}))
    words = ("--data", place / "chats.jsonl", "--inventory", small, "--dry-run")
    for dtype in ("fp32", "bf16"):
        assert main(command(place, *words, "--set", f"precision.dtype={dtype}")[3:]) == 0
        out = capsys.readouterr().out
        assert "with a 4-bit base, although the estimate exceeds the memory: " in out
        is_named = "--set precision.dtype=bf16 needs less memory" in out
        assert is_named is (dtype == "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuned:
    """The output files of one complete command."""

    cwd: Path
    first: Path
    """Folder of the command's own run."""
    words: tuple[object, ...]
    stdout: str
    stderr: str
    prepare: str
    again: str
    """The two printed commands, parsed as by a shell."""

    def newest(self) -> RunPaths:
        """Return the newest run."""
        return RunPaths((self.cwd / "runs" / "latest").resolve())


@pytest.fixture(scope="module")
def finetuned(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    """Fine-tune on conversations, with samples."""
    cwd = tmp_path_factory.mktemp("whole")
    settings = ("--set", "adapter.kind=lora", "--set", "optimizer.lr=0.1")
    shutil.copytree(place, cwd, dirs_exist_ok=True)
    words = ("--data", "chats.jsonl", "--steps", 3, *settings)
    done = finetune(Path(), *words, "--out", "out", cwd=cwd)
    assert done.returncode == 0, done.stderr
    prepare, again = (line for line in done.stdout.splitlines() if line.startswith("PYTHONPATH="))
    first = (cwd / "runs" / "latest").resolve()
    return Finetuned(
        cwd=cwd,
        first=first,
        words=words,
        stdout=done.stdout,
        stderr=done.stderr,
        prepare=prepare,
        again=again,
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("in_process")
def test_one_command_goes_from_conversations_to_a_checkpoint_and_keeps_an_edited_config(
    finetuned: Finetuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finetuned.cwd)
    out = finetuned.cwd / "out" / "run.toml"
    config = load_run_config(out)
    assert (config.task.kind, config.adapter.kind, config.train.steps) == ("chat", "lora", 3)
    assert config.batch.micro_batch_size == "auto"
    run = finetuned.newest()
    assert isinstance(load_run_config(run.config).batch.micro_batch_size, int)
    newest = run.newest_checkpoint()
    assert newest is not None and (newest / "adapter_model.safetensors").exists()
    assert "no samples" not in finetuned.stderr
    written = out.read_text()
    out.write_text(written.replace("steps = 3", "steps = 2"))
    refused = main(command(Path(), *finetuned.words, "--out", "out")[3:])
    out.write_text(written)
    assert refused == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "exists with other settings, and may have been edited. Run this file with: " in said


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_prints_its_samples_and_the_next_commands(finetuned: Finetuned) -> None:
    printed = finetuned.stderr
    assert "before the run: 2 prompts" in printed and "after the run" in printed
    assert "\nbefore    " in finetuned.stdout and "\nafter     " in finetuned.stdout
    assert f"evaluate --model {finetuned.first.name} --data" in printed


@pytest.mark.slow
@pytest.mark.ranks
def test_the_parts_of_the_command_can_be_run_again(finetuned: Finetuned) -> None:
    out = finetuned.cwd / "out" / "run.toml"
    out.write_text(out.read_text().replace("steps = 3", "steps = 2"))
    for line in (finetuned.prepare, finetuned.again):
        typed = subprocess.run(
            shlex.split(line)[1:],
            cwd=finetuned.cwd,
            env={**environment(), "PYTHONPATH": str(REPO)},
            check=False,
        )
        assert typed.returncode == 0
    assert json.loads(finetuned.newest().summary.read_text())["steps"] == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("data", "task"), [("labelled.csv", "classify"), ("plain.txt", "text")])
def test_labelled_texts_and_plain_text_are_trained_on_as_well(
    place: Path, tmp_path: Path, data: str, task: str
) -> None:
    words = () if task == "text" else ("--no-samples",)
    done = finetune(place, "--data", place / data, "--steps", 2, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"task {task}, because " in done.stdout
    assert "status           finished" in done.stdout
    assert "no samples" not in done.stderr
    made = [read_samples(path) for path in tmp_path.glob("runs/*-*/samples.json")]
    assert [len(each) for each in made] == ([2] if task == "text" else [])


@pytest.mark.slow
@pytest.mark.ranks
def test_the_report_shows_what_the_model_wrote_before_and_after(
    finetuned: Finetuned, tmp_path: Path
) -> None:
    shutil.copytree(finetuned.cwd, tmp_path, symlinks=True, dirs_exist_ok=True)
    run = RunPaths(tmp_path / finetuned.first.relative_to(finetuned.cwd))
    samples = read_samples(run.samples)
    assert len(samples) == 2
    for each in samples:
        assert each.prompt.startswith("<|im_start|>user\n")
        assert each.prompt.endswith("<|im_start|>assistant\n")
        assert each.before and each.before != each.after
        assert html.escape(each.before.split()[0]) in run.report.read_text(encoding="utf-8")
    run.samples.unlink()
    (tmp_path / "out" / "data" / "val.bin").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        problem = add_samples(run)
    assert problem is not None and "val.bin" in problem
    assert not run.samples.exists()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_signal_reaches_the_run_and_its_exit_code_is_the_command_s(
    place: Path, tmp_path: Path
) -> None:
    words = command(place, "--data", place / "labelled.csv", "--steps", 100_000, "--no-samples")
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as it:
        wait_until(lambda: any(tmp_path.glob("runs/*/metrics.jsonl")), what="a step")
        os.kill(it.pid, signal.SIGINT)
        _, err = it.communicate(timeout=DEADLINE_S)
    assert it.returncode == 130, err


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--data", "nowhere.jsonl"), "--data nowhere.jsonl: file or folder not found"),
        (
            ("--data", "chats.jsonl", "--set", "data.dir=x"),
            "data.dir=x': data.dir has its own option. Use --out.",
        ),
        (("--data", "chats.jsonl", "--set", "train.stepz=3"), "Did you mean train.steps?"),
        (
            ("--data", "chats.jsonl", "--steps", "5", "--set", "train . steps=3"),
            "--steps 5 and --set train . steps=3: both set train.steps. Leave one out.",
        ),
        (
            ("--data", "chats.jsonl", "--sequence-length", "8", "--set", "data.sequence_length=9"),
            "both set data.sequence_length. Leave one out.",
        ),
        (
            ("--data", "chats.jsonl", "--text-column", "x"),
            "--text-column x: --task chat",
        ),
        (("--data", "chats.jsonl", "--set", "adapter.rank=4096"), "above the width"),
        (("--data", "chats.jsonl", "--set", "data.sequence_length=9999"), "positions of"),
        (("--data", "chats.jsonl", "--set", "batch.global_batch_size=0"), "must be at least 1"),
        (
            ("--data", "chats.jsonl", "--set", "batch.global_batch_size=abc"),
            "must be a whole number",
        ),
        (
            ("--data", "chats.jsonl", "--set", "optimizer.lr=abc"),
            "optimizer.lr = 'abc': must be a number",
        ),
        (("--data", "pairs.jsonl"), "line 2: no rejected in the columns 'prompt', 'chosen'"),
        (("--data", "chats.jsonl", "--task", "classify"), "no label column found"),
        (("--data", "chats.jsonl", "--model", "nowhere/"), "nowhere"),
        (("--data", "chats.jsonl", "--model", "scratch"), "fine-tuning needs weights"),
    ],
)
def test_a_mistake_is_one_line_and_exit_10(
    place: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = [str(place / word) if (place / word).is_file() else word for word in words]
    assert main([*command(place, *real, "--dry-run")[3:]]) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and problem in line
    assert list(tmp_path.iterdir()) == []
