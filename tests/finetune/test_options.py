"""`finetune` takes the options that its messages name, and passes them to `prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import parser as data_parser
from payload.data.shared_flags import forwarded_words
from payload.finetune.__main__ import parser
from tests.cli.parsers import all_parsers, options_of
from tests.data.running import run_here
from tests.support.chat_data import make_tokenizer, turn, write_rows
from tests.support.named_options import mentions, texts_of

ROOT = Path(__file__).resolve().parents[2]
PREPARE_ONLY = {
    "--input": "the source is --data",
    "--source": "the content decides",
    "--tokenizer": "the tokenizer is the model's",
    "--packing": "of the task chat",
    "--wait": "two commands that write to one folder",
    "--seed": "in the note about other settings",
    "--shard-mib": "of the task text",
    "--max-documents": "limits a source",
    "--restart": "another name of --force",
    "--label-column": "is an option of finetune itself",
    "--add-hashes": "of data verify",
    "--sample": "of data show",
    "--json": "of data prepare",
    "--quiet": "of data prepare",
}
"""Options that messages of `payload.data` name, but that `finetune` decides or never needs."""


def modules() -> list[Path]:
    """Return the modules whose messages `finetune` can print before training."""
    data = ROOT / "payload" / "data"
    folders = ("rows", "sources", "tasks", "templates", "tokenizers")
    files = [path for name in folders for path in sorted((data / name).glob("*.py"))]
    return [*files, data / "detect.py", data / "rendered_rows.py", data / "writing" / "plan.py"]


def test_finetune_has_every_option_that_a_message_about_data_names() -> None:
    own = options_of(parser())
    named = {
        each.option
        for path in modules()
        for _, text in texts_of(path)
        if not text.startswith("--")  # the declaration of an option
        for each in mentions(text, where=str(path), commands={"generate", "export", "auth"})
        if each.command is None
    }
    prepare = options_of(all_parsers()["data prepare"])
    missing = {each for each in named & prepare if each not in own} - set(PREPARE_ONLY)
    assert missing == set()
    assert {"--skip-bad", "--ignore-key", "--columns", "--chat-template", "--thoughts"} <= named


def test_the_words_for_prepare_give_it_the_same_options() -> None:
    words = [
        *("--skip-bad", "--val-fraction", "0.2", "--group-column", "user", "--glob", "*.json"),
        *("--columns", "q=user,a=assistant", "--ignore-key", "x", "--ignore-key", "y"),
        *("--chat-template", "t.jinja", "--thoughts", "drop", "--train-on", "last"),
        *("--on-long", "split", "--template-var", "deep=true", "--template-var", 'name="a b"'),
        *("--label-map", "1=a", "2=b", "--allow-odd-tokenizer", "--dedup", "near"),
    ]
    args = parser().parse_args(["--model", "m", "--data", "d", *words])
    forwarded = forwarded_words(args)
    again = data_parser().parse_args(["prepare", "--out", "o", *forwarded])
    for name, value in vars(again).items():
        if hasattr(args, name) and name not in ("out", "task", "text_column", "label_column"):
            assert getattr(args, name) == value, name
    assert forwarded_words(parser().parse_args(["--model", "m", "--data", "d"])) == ()


@pytest.mark.processes
def test_show_prints_what_is_recognised_in_raw_data_and_one_row(tmp_path: Path) -> None:
    rows = [
        {"messages": turn(f"ask {n}", "b"), "image": "x.jpg", "id": n, "tools": []}
        for n in range(20)
    ]
    path = write_rows(tmp_path / "x.txt", rows)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    done = run_here("show", path, "--tokenizer", tokenizer, "--sample", 3)
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.splitlines() == [
        f"{path}: task chat, because its rows have the column 'messages'",
        "format: JSON Lines, UTF-8",
        "columns read: 'messages', 'tools'",
        "columns ignored as metadata: 'id' (20 of 20 rows)",
        "columns not read: 'image' (20 of 20 rows)",
        *("<|im_start|>user", "ask 3<|im_end|>", "<|im_start|>assistant", "⟦b<|im_end|>⟧", ""),
    ]
    assert "x.txt line 4, sample 1 of 1: " in done.stderr
    plain = run_here("show", path)
    assert "add --tokenizer MODEL" in plain.stderr and "im_start" not in plain.stdout
    labelled = tmp_path / "y.tsv"
    labelled.write_text("text\tlabel\na\tx\nb\ty\n")
    assert run_here("show", labelled).stdout.splitlines() == [
        f"{labelled}: task classify, because its rows have a column of labels, 'label'",
        "format: CSV, delimiter tab, UTF-8",
        "columns read: 'text', 'label'",
        "labels that only one row has: 'x', 'y'",
    ]


@pytest.mark.processes
def test_a_file_named_data_can_have_any_columns(tmp_path: Path) -> None:
    rows = [{"ask": f"a {n}", "say": "b", "context": "c"} for n in range(20)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    done = run_here("show", path)
    assert done.returncode == ExitCode.CONFIG
    assert "Map the columns to known names with --columns" in done.stderr
    named = ("--columns", "ask=question,say=answer")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    done = run_here("show", path, *named, "--tokenizer", tokenizer)
    assert "a 0\n\nc<|im_end|>" in done.stdout
