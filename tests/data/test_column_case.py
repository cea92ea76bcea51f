"""`prepare` finds columns by their known names in any case, as `finetune` does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.core.tasks import TaskKind
from payload.data.detect import DataOptions, detect_data
from tests.data.running import contents, run_here
from tests.support.chat_data import make_tokenizer
from tests.support.sampled import sampled

Row = Mapping[str, str]
TASKS: dict[TaskKind, list[dict[str, str]]] = {
    "text": [{"text": f"a text {number}"} for number in range(30)],
    "classify": [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(40)],
    "chat": [{"question": f"ask {number}", "answer": f"yes {number}"} for number in range(30)],
    "preference": [
        {"prompt": f"ask {number}", "chosen": f"yes {number}", "rejected": f"no {number}"}
        for number in range(30)
    ],
}
OTHER_NAMES = {
    "text": {"text": "Body"},
    "classify": {"text": "REVIEW", "label": "Category"},
    "chat": {"question": "QUESTION", "answer": "Answer"},
    "preference": {"prompt": "Prompt", "chosen": "CHOSEN", "rejected": "Rejected"},
}


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Write the rows as CSV, JSON Lines or parquet, by the suffix."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        lines = [",".join(row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Every task, and every format of files, which are read in the same way for every task.
_SAMPLE = (("text", ".csv"), ("classify", ".csv"), ("chat", ".parquet"), ("preference", ".jsonl"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "suffix"),
    sampled(itertools.product(TASKS, (".csv", ".jsonl", ".parquet")), sample=_SAMPLE),
)
def test_columns_in_another_case_give_the_same_tokens_as_the_known_names(
    task: TaskKind, suffix: str, tmp_path: Path
) -> None:
    rows = TASKS[task]
    names = OTHER_NAMES[task]
    other = [{names[key]: value for key, value in row.items()} for row in rows]
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    made = {}
    for name, given in (("known", rows), ("other", other)):
        source, out = write(tmp_path / f"{name}{suffix}", given), tmp_path / name
        words = ("--task", task, "--input", source, "--out", out, "--tokenizer", tokenizer)
        done = run_here("prepare", *words, "--val-fraction", "0.2")
        assert done.returncode == ExitCode.OK, done.stderr
        made[name] = contents(out)
        said = f"columns read: '{next(iter(names.values()))}' as '{next(iter(names))}'"
        assert (said in done.stderr) == (name == "other")
    for path in made["known"].keys() - {"meta.json"}:
        assert made["known"][path] == made["other"][path], path
    # finetune chooses the same columns.
    found = detect_data([str(tmp_path / f"other{suffix}")], DataOptions(task=task))
    out = tmp_path / "detected"
    more = ("--tokenizer", tokenizer, "--val-fraction", "0.2", "--out", out)
    assert run_here("prepare", *found.arguments(), *more).returncode == ExitCode.OK
    assert contents(out).keys() == made["known"].keys()
    assert all(contents(out)[path] == made["known"][path] for path in ("train.bin", "val.bin"))


@pytest.mark.processes
def test_a_chosen_column_and_exact_names_come_first(tmp_path: Path) -> None:
    rows = [{"Text": f"upper {n}", "text": f"lower {n}", "Body": f"body {n}"} for n in range(30)]
    source = write(tmp_path / "rows.jsonl", rows)

    def tokens(name: str, *words: str) -> bytes:
        done = run_here("prepare", "--input", source, "--out", tmp_path / name, *words)
        assert done.returncode == ExitCode.OK, done.stderr
        return (tmp_path / name / "train.bin").read_bytes()

    assert tokens("default") == tokens("exact", "--text-column", "text")
    assert tokens("default") != tokens("chosen", "--text-column", "Body")
    words = ("--out", tmp_path / "missing", "--text-column", "BODY")
    done = run_here("prepare", "--input", source, *words)
    assert done.returncode == ExitCode.CONFIG and "no key 'BODY'" in done.stderr


@pytest.mark.processes
def test_a_task_that_the_user_chooses_reads_conversations_beside_labelled_texts(
    tmp_path: Path,
) -> None:
    rows = [
        {"Question": f"ask {n}", "Answer": f"yes {n}", "topic": "x", "content": f"ask {n}"}
        for n in range(30)
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    found = detect_data([str(source)], DataOptions(task="chat"))
    assert found.forwarded == ("--columns", "Question=question,Answer=answer")
    words = ("--task", "chat", "--input", source, "--out", tmp_path / "out")
    done = run_here("prepare", *words, "--tokenizer", make_tokenizer(tmp_path / "tokenizer"))
    assert done.returncode == ExitCode.OK, done.stderr
