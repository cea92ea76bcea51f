"""The choice of prompts for a run's samples from the validation data."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.core.errors import ConfigError, ExitCode
from payload.data.__main__ import main as data
from payload.finetune.samples_before_and_after import find_prompts
from tests.support.chat_data import conversations, make_tokenizer, prepare, write_rows


def prepared(tmp_path: Path, task: str, rows: list[dict[str, str]], *flags: str) -> Path:
    """Return a data folder of these rows."""
    source = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    words = ["prepare", "--task", task, "--source", "jsonl", "--input", str(source), *flags]
    words += ["--quiet", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "data")]
    assert data(words) == ExitCode.OK
    return tmp_path / "data"


def test_a_document_s_prompt_is_at_most_its_first_half(tmp_path: Path) -> None:
    texts = [f"{number} red blue add word list " * 2 for number in range(40)]
    folder = prepared(tmp_path, "text", [{"text": text} for text in texts])
    found = find_prompts(folder)
    assert len(found) == 2 and found[0] != found[1]
    for prompt in found:
        (text,) = (text for text in texts if text.startswith(prompt))
        assert 0 < len(prompt) <= len(text) * 0.6


@pytest.mark.processes
def test_a_conversation_s_prompt_ends_where_the_answer_begins(tmp_path: Path) -> None:
    chats = conversations(40)
    source = write_rows(tmp_path / "rows.jsonl", [{"messages": each} for each in chats])
    folder = prepare(make_tokenizer(tmp_path / "tokenizer"), source, tmp_path / "data")
    questions = {
        f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n"
        for user, _ in chats
    }
    found = find_prompts(folder)
    assert len(found) == 2 and questions.issuperset(found)


def test_labelled_texts_have_no_prompts(tmp_path: Path) -> None:
    rows = [{"text": f"red {number}", "label": "ab"[number % 2]} for number in range(40)]
    folder = prepared(tmp_path, "classify", rows, "--label-column", "label")
    with pytest.raises(ConfigError, match="samples need --task text or chat, not classify"):
        find_prompts(folder)
