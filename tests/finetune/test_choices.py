"""The choices of payload.finetune, made from numbers."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ConfigError, DataError
from payload.data.detect import DataOptions, detect_data
from payload.finetune.setting_rules import (
    Choice,
    DataSize,
    batch,
    data_size,
    method_choices,
    rate,
    render,
    schedule,
    sequence_length,
    steps,
)
from payload.models.registry import spec_of
from tests.support.chat_data import write_rows


def test_the_sequence_holds_almost_all_texts_whole_and_stays_within_the_model() -> None:
    lengths = [60] * 995 + [900] * 5
    assert sequence_length("classify", lengths, tokens=0, context=8192)[0] == 64
    assert sequence_length("chat", lengths, tokens=0, context=8192)[0] == 256
    assert sequence_length("chat", [3000] * 9, tokens=0, context=8192)[0] == 4096
    assert sequence_length("chat", [3000] * 9, tokens=0, context=2048)[0] == 2048
    assert sequence_length("chat", [99_999], tokens=0, context=131_072)[0] == 8192
    _, why = sequence_length("classify", lengths, tokens=0, context=8192)
    assert "99.5% of the first 1,000 texts fit whole (median 60 tokens, longest 900)" in why


def test_little_plain_text_gets_shorter_sequences() -> None:
    assert sequence_length("text", [], tokens=10**7, context=8192)[0] == 1024
    assert sequence_length("text", [], tokens=20_000, context=8192)[0] == 256
    assert sequence_length("text", [], tokens=10, context=8192)[0] == 64


CHAT_ROW = json.dumps(
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "text": "a",
        "label": "x",
    }
)


@pytest.mark.parametrize("sequences", [1, 5, 40, 400, 8000, 10**6])
@pytest.mark.parametrize("ranks", [1, 3])
def test_batch_and_steps_go_through_the_data_one_to_three_times(sequences: int, ranks: int) -> None:
    data = DataSize(sequences=sequences, tokens=sequences * 512)
    size = batch("chat", data, length=512, ranks=ranks).value
    assert size % ranks == 0 and size * 512 <= max(16384, ranks * 512)
    number = steps("chat", data, batch_size=size, requested=None).value
    epochs = number * size / sequences
    assert epochs <= 3 or number == 3, "no text is read more often"
    assert number >= 100 or epochs > 2 or sequences < 3 * size


def test_labelled_texts_are_read_twice_and_the_rate_falls_to_zero() -> None:
    data = data_size("classify", tokens=80_000, documents=8889, length=64)
    assert steps("classify", data, batch_size=64, requested=None).value == 250
    assert steps("chat", data, batch_size=64, requested=None).value == 125
    found = {each.key: each.value for each in schedule("classify", 250, method="full", lr=1e-4)}
    assert found["optimizer.min_lr"] == 0


def test_steps_can_be_given_and_the_epochs_are_shown() -> None:
    data = data_size("chat", tokens=51_200, documents=None, length=512)
    chosen = steps("chat", data, batch_size=10, requested=25)
    assert chosen.value == 25 and chosen.reason == "--steps; 2.5 epochs"


def test_an_adapter_takes_a_higher_rate_and_a_large_model_a_lower_one() -> None:
    for task in ("text", "chat", "classify"):
        small, large = (rate(task, "full", params=size).value for size in (10**8, 10**9))
        assert small > large
        assert rate(task, "lora", params=10**8).value > small
    assert rate("chat", "nf4", params=70 * 10**9).value == 1e-4


def test_the_rank_is_no_larger_than_the_model_s_width() -> None:
    raw = {
        **{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"vocab_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 64},
    }
    found = {each.key: each.value for each in method_choices("nf4", spec_of(raw, where="test"))}
    assert found["adapter.rank"] == 8 and found["adapter.alpha"] == 16.0
    assert found["model.quantize"] == "nf4"


def test_the_run_toml_has_every_choice_and_its_reason() -> None:
    choices = [
        Choice(key="train.steps", value=7, reason="seven"),
        Choice(key="model.init", value='a "folder"\\here', reason="--model"),
        Choice(key="optimizer.lr", value=5e-5, reason="low"),
        Choice(key="train.eval_every", value=2, reason="often"),
    ]
    text = render(choices, head=("Hello", ""))
    assert text.startswith(
        "# Hello\n#\n\n[train]\nsteps = 7       # seven\neval_every = 2  # often\n"
    )
    assert tomllib.loads(text)["model"]["init"] == 'a "folder"\\here'
    assert parse_run_config(text, where="test").optimizer.lr == 5e-5


def test_a_name_with_a_line_break_adds_no_settings_to_run_toml() -> None:
    name = "chats\n[storage]\nresults = 'gs://other'\n#.jsonl"
    with pytest.raises(ConfigError, match="has a control character, such as a line break"):
        render([Choice(key="train.steps", value=7, reason="seven")], head=(f"On {name}",))


def test_values_are_written_with_all_their_digits() -> None:
    given: dict[str, object] = {"optimizer.beta1": 0.912345678, "optimizer.lr": 1.23456789e-05}
    given |= {"slurm.nodes": 3, "track.to": ["csv", "tensorboard"]}
    text = render([Choice(key=key, value=given[key], reason="--set") for key in given], head=())
    config = parse_run_config(text, where="test")
    assert (config.optimizer.beta1, config.optimizer.lr) == (0.912345678, 1.23456789e-05)
    assert config.slurm.nodes == 3 and config.track.to == ("csv", "tensorboard")


def test_a_tenth_of_the_rate_has_no_more_digits_than_the_rate() -> None:
    found = {each.key: each.value for each in schedule("chat", 100, method="full", lr=3e-4)}
    assert found["optimizer.min_lr"] == 3e-5


@pytest.mark.parametrize(
    ("row", "task", "columns"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "chat", (None, None)),
        ({"conversations": []}, "chat", (None, None)),
        ({"prompt": "a", "completion": "b", "label": 1}, "chat", (None, None)),
        ({"instruction": "a", "input": "", "output": "b"}, "chat", (None, None)),
        ({"text": "a", "label": 1}, "classify", ("text", "label")),
        ({"review": "a", "category": "x", "id": 3}, "classify", ("review", "category")),
        ({"headline": "a", "topic": "x"}, "classify", ("headline", "topic")),
        ({"text": "a", "source": "x"}, "text", ("text", None)),
    ],
)
def test_a_jsonl_file_is_recognised_by_its_columns(
    tmp_path: Path, row: dict[str, object], task: str, columns: tuple[str | None, str | None]
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [row])
    found = detect_data([str(path)], DataOptions())
    assert (found.task, found.source) == (task, "auto")
    assert (found.text_column, found.label_column) == columns


def test_the_command_line_overrides_detection(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": "a", "label": 1, "body": "b", "stars": 3}])
    asked = DataOptions(task="classify", text_column="body", label_column="stars")
    found = detect_data([str(path)], asked)
    assert (found.text_column, found.label_column) == ("body", "stars")
    assert detect_data([str(path)], DataOptions(task="text")).arguments()[:4] == [
        *("--task", "text", "--source", "auto")
    ]


@pytest.mark.parametrize(
    ("header", "task", "read"),
    [
        ("Ticket-ID;Text;Queue", "classify", ["--text-column", "Text", "--label-column", "Queue"]),
        ("Ticket-ID;TEXT;Stars", "text", ["--text-column", "TEXT"]),
        ("Nr;Question;Answer", "chat", ["--columns", "Question=question,Answer=answer"]),
        ("Prompt;Chosen;Rejected", "preference",
         ["--columns", "Prompt=prompt,Chosen=chosen,Rejected=rejected"]),
    ],
)  # fmt: skip
def test_the_names_of_columns_are_recognised_in_any_case(
    tmp_path: Path, header: str, task: str, read: list[str]
) -> None:
    path = tmp_path / "excel.csv"
    path.write_text(f"{header}\n1;two;three\n1;four;five\n")
    found = detect_data([str(path)], DataOptions())
    assert found.task == task
    assert found.arguments()[6:] == read
    names = [word.split("=")[1] for word in read[-1].split(",")] if "=" in read[-1] else read[1::2]
    assert all(name in found.rows[0].values for name in names)


@pytest.mark.parametrize(
    ("header", "asked", "columns"),
    [
        (
            "Question,Answer,Category",
            DataOptions(text_column="Question", label_column="Category"),
            ("Question", "Category"),
        ),
        ("Input,Output,text,label", DataOptions(), ("text", "label")),
        ("Text,text,Label,label", DataOptions(), ("text", "label")),
    ],
)
def test_labels_that_are_chosen_or_written_exactly_come_before_other_cases(
    tmp_path: Path, header: str, asked: DataOptions, columns: tuple[str, str]
) -> None:
    """A classifier became a chat model, or was trained on another column."""
    path = tmp_path / "x.csv"
    path.write_text(f"{header}\n" + "a,b,c,d\n"[: 2 * header.count(",") + 1] + "\n")
    found = detect_data([str(path)], asked)
    assert (found.task, found.text_column, found.label_column) == ("classify", *columns)


def test_likely_columns_are_named_where_none_is_recognised(tmp_path: Path) -> None:
    texts = [(f"T{n}", f"the long text {n}", ("mail", "login")[n % 2]) for n in range(10)]
    path = tmp_path / "odd.csv"
    path.write_text("nr,what,kind\n" + "".join(f"{','.join(row)}\n" for row in texts))
    with pytest.raises(DataError) as caught:
        detect_data([str(path)], DataOptions())
    assert "labelled texts: --label-column 'kind' and --text-column 'what'." in str(caught.value)
    with pytest.raises(DataError, match="--label-column 'kind'"):
        detect_data([str(path)], DataOptions(task="classify", text_column="what"))


def test_files_and_folders_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("text,label\na,1\n")
    assert detect_data([str(tmp_path / "table.csv")], DataOptions()).task == "classify"
    assert detect_data([str(tmp_path)], DataOptions()).task == "classify"
    (tmp_path / "notes.md").write_text("words")
    assert detect_data([str(tmp_path / "notes.md")], DataOptions()).arguments() == [
        *("--task", "text", "--source", "text", "--input", str(tmp_path / "notes.md"))
    ]


@pytest.mark.parametrize(
    ("name", "content", "asked", "problem"),
    [
        (
            "x.jsonl",
            '{"a": 1, "b": 2}',
            DataOptions(),
            "no known column found in the columns 'a', 'b'. Map the columns to known names",
        ),
        ("x.jsonl", "", DataOptions(), "no rows. Use a file with data"),
        ("x.jsonl", "{broken", DataOptions(), "x.jsonl line 1"),
        ("x.json", "[]", DataOptions(), "no rows. Use a file with data"),
        ("x.xlsx", "PK\x03\x04", DataOptions(), "Save a table as CSV, or unpack the file"),
        (
            "x.txt",
            "words",
            DataOptions(task="chat"),
            "plain text has no columns for --task chat",
        ),
        (
            "x.csv",
            "text,label\na,1",
            DataOptions(label_column="stars"),
            "no column 'stars' found in the columns 'text', 'label'. Choose another one",
        ),
        (
            "x.csv",
            "text,n\na,1",
            DataOptions(task="classify"),
            "no label column found in the columns 'text', 'n'. Choose one with --label-column",
        ),
        (
            "x.csv",
            "a,b,label\na,1,2",
            DataOptions(),
            "no text column found in the columns 'a', 'b', 'label'. Choose one with --text-column",
        ),
        (
            "x.jsonl",
            CHAT_ROW,
            DataOptions(text_column="nope"),
            "--text-column nope: --task chat (chosen because its rows have the column 'messages') "
            "does not read this column. Leave --text-column out, or choose another --task.",
        ),
        (
            "x.jsonl",
            CHAT_ROW,
            DataOptions(task="chat", label_column="label"),
            "--label-column label: --task chat does not read this column. Leave --label-column out",
        ),
        (
            "x.csv",
            "text,label\na,1",
            DataOptions(task="text", label_column="label"),
            "--label-column label: --task text does not read this column. Leave --label-column out",
        ),
        ("x.txt", "words", DataOptions(text_column="a"), "--text-column a: plain text has no"),
        ("x.txt", "words", DataOptions(label_column="a"), "--label-column a: plain text has no"),
    ],
)
def test_unsupported_data_is_one_line_with_a_fix(
    tmp_path: Path, name: str, content: str, asked: DataOptions, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        detect_data([str(tmp_path / name)], asked)
    assert problem in str(caught.value)


def test_a_table_beside_plain_text_is_refused_unless_a_folder_has_both(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "a.csv").write_text("text,label\na,1")
    (folder / "b.txt").write_text("words")
    files = [str(folder / name) for name in ("a.csv", "b.txt")]
    with pytest.raises(DataError, match=r"b.txt is plain text, but .*a.csv has rows \(csv\)"):
        detect_data(files, DataOptions())
    assert detect_data([str(folder)], DataOptions()).reason == "it is plain text"


def test_a_label_column_selects_the_task_of_labelled_texts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(CHAT_ROW)
    found = detect_data([str(path)], DataOptions(text_column="text", label_column="label"))
    assert (found.task, found.reason) == ("classify", "--label-column selects it")
    assert (found.text_column, found.label_column) == ("text", "label")


def test_a_path_that_is_not_there_is_no_name_on_the_hub() -> None:
    for given in ("nowhere.jsonl", "./nowhere", "nowhere"):
        with pytest.raises(DataError, match="file or folder not found"):
            detect_data([given], DataOptions())
