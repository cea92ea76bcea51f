"""Output of `finetune` for data that it cannot read, and after a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ExitCode
from payload.core.suggested_commands import CONSOLE
from payload.estimates.disk_room import disk_words
from payload.finetune.__main__ import _skipped_rows, main
from payload.orchestrate.follow.end_of_run import next_lines, sample_lines
from payload.run_record.run_files import RunPaths
from payload.run_record.run_samples import Sample
from tests.finetune.test_command import in_process, place
from tests.support.chat_data import conversations, prepare, write_rows

__all__ = ["in_process", "place"]  # fixtures


def dry_run(place: Path, *words: object) -> int:
    arguments = ["--model", str(place / "model"), "--inventory", "local", *map(str, words)]
    return main([*arguments, "--dry-run"])


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_where_no_column_is_recognised_the_commands_and_the_fix_are_printed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "odd.jsonl"
    write_rows(source, [{"alpha": "one", "--allow-odd-tokenizer": "it's two"}] * 20)
    assert dry_run(place, "--data", source) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert "no known column found" in err
    fix, command = out.splitlines()[out.splitlines().index("to fix the error, for example:") :][:2]
    assert command.endswith(f"--data {source} --columns QUESTION=user,ANSWER=assistant"), fix
    assert f"data show {source} --model" in out
    assert "data prepare --task TASK --source auto" in out and "run --config" in out


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_where_the_template_fails_the_detected_task_and_its_commands_are_printed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{{ raise_exception('no') }}", encoding="utf-8")
    words = ("--data", place / "chats.jsonl", "--chat-template", template)
    assert dry_run(place, *words) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert "task chat, because its rows have the column 'messages'" in out
    assert "data prepare --task chat --source auto" in out and str(template) in out


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_data_prepared_with_skip_bad_is_used_again(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": each} for each in conversations(40)]
    source = tmp_path / "bad.jsonl"
    write_rows(source, [*rows, {"messages": []}])
    words = ("--skip-bad", "--sequence-length", 128)
    prepare(place / "model", source, tmp_path / "out" / "data", *words)
    assert _skipped_rows(tmp_path / "out" / "data")
    assert dry_run(place, "--data", source, "--out", "out") == ExitCode.OK
    out, err = capsys.readouterr()
    assert "was prepared with --skip-bad, so bad rows are skipped again" in err
    assert "--skip-bad" in next(line for line in out.splitlines() if "payload.data prepare" in line)


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_a_dry_run_names_all_parts_of_the_time_and_the_disk_space(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(place, "--data", place / "chats.jsonl") == ExitCode.OK
    out = capsys.readouterr().out
    time = next(line for line in out.splitlines() if line.startswith("time "))
    assert "training, " in time and " in all (start " in time
    assert all(part in time for part in ("evaluations", "checkpointing", "samples"))
    disk = next(line for line in out.splitlines() if line.startswith("disk "))
    assert "train.keep_checkpoints" in disk and "optimizer state" in disk
    assert dry_run(place, "--data", place / "chats.jsonl", "--no-samples") == ExitCode.OK
    assert "samples" not in capsys.readouterr().out.partition("time ")[2].partition("disk ")[0]


def test_the_disk_space_names_what_it_consists_of() -> None:
    words = disk_words(
        checkpoints=3, checkpoint_bytes=1_600_000_000, state_bytes=10**9, free_bytes=None
    )
    assert words.startswith("about 4.80 GB: up to 3 checkpoints of 1.60 GB ")
    assert "1.00 GB are optimizer state" in words


def test_samples_are_printed_before_and_after_within_the_width() -> None:
    samples = [
        Sample(prompt="<|im_start|>user\nHello?\x1b[2J", before="no\nanswer", after="word " * 400)
    ]
    lines = sample_lines(samples, width=80)
    assert lines[0].startswith("prompt 1  <|im_start|>user") and "\x1b" not in "".join(lines)
    assert any(line.startswith("before    no") for line in lines)
    assert any(line.startswith("after     word") for line in lines)
    assert max(map(len, lines)) <= 80 and len(lines) < 12


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("task.kind=chat",), ("tileforge chat one", "--format gguf")),
        (("task.kind=text",), ("tileforge generate one --prompt", "--format gguf")),
        (("task.kind=classify",), ("tileforge generate one --classify --input", "--format hf")),
        (("task.kind=chat", "adapter.kind=lora"), ("tileforge chat one", "--format gguf --merge")),
    ],
)
def test_the_next_commands_name_the_run_and_fit_its_task(
    settings: tuple[str, ...],
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "tileforge").write_text("#!/bin/sh\n")
    (bin_dir / "tileforge").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_dir))
    monkeypatch.setenv(CONSOLE, str(bin_dir / "tileforge"))
    monkeypatch.chdir(tmp_path)
    config = parse_run_config(
        "", overrides=["data.dir=my/data", "model.init=x", *settings], where="test"
    )
    text = "\n".join(next_lines(RunPaths(tmp_path / "runs" / "one"), config))
    assert all(each in text for each in expected)
    assert "tileforge evaluate --model one --data my/data" in text
    assert "tileforge export --model one " in text
    elsewhere = "\n".join(next_lines(RunPaths(tmp_path / "others" / "one"), config))
    assert f"--model {tmp_path / 'others' / 'one'} " in elsewhere


def test_a_large_run_ends_with_its_size_and_the_command_that_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = RunPaths(tmp_path / "runs" / "one")
    paths.checkpoints.mkdir(parents=True)
    config = parse_run_config("", where="test")
    assert not any(line.startswith("disk: ") for line in next_lines(paths, config))
    with (paths.checkpoints / "weights").open("wb") as file:
        file.truncate(3 * 10**8)
    *_, size, remove = next_lines(paths, config)
    assert size.startswith("disk: the run has 0.30 GB") and remove.endswith(" remove one --now")
