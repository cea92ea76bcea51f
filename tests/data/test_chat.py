"""`prepare --task chat`: formats, trained tokens, packing, and rejected input."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from payload.core.errors import ConfigError, ExitCode
from payload.data.__main__ import main
from payload.data.reading.packed_blocks import PADDING, PackedBlocks, Split, open_packed
from payload.data.rows.packing import best_fit
from payload.data.rows.rows import in_batches
from payload.data.show import read_samples
from payload.formats.data_folder import IGNORED_TARGET, load_meta
from tests.support.chat_data import (
    END,
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    conversations,
    make_tokenizer,
    prepare,
    prepare_words,
    turn,
    write_rows,
)

pytestmark = pytest.mark.processes  # a process renders the template

LENGTH = 128
ROWS = [{"messages": each} for each in conversations(60, turns=2)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("source") / "in.jsonl", ROWS)


@pytest.fixture(scope="module")
def folder(tokenizer: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "out"
    return prepare(tokenizer, source, out, "--sequence-length", LENGTH, "--val-fraction", 0.2)


def opened(folder: Path, split: Split = "train") -> PackedBlocks:
    chat = load_meta(folder).chat
    assert chat is not None
    return open_packed(folder, split=split, sequence_length=chat.sequence_length)


def all_blocks(blocks: PackedBlocks) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(blocks.num_blocks(), dtype=np.int64)


def samples(folder: Path) -> list[list[tuple[str, bool]]]:
    """Return every training conversation as pieces of text, with whether each is trained."""
    meta = load_meta(folder)
    count = meta.train_documents
    return [read_samples(folder, meta, split="train", number=n)[0].parts for n in range(count)]


def expected(messages: Sequence[dict[str, str]]) -> list[tuple[str, bool]]:
    """Return the expected `samples` of one conversation."""
    parts: list[tuple[str, bool]] = []
    held = ""
    for message in messages:
        held += f"<|im_start|>{message['role']}\n"
        said = f"{message['content']}{END}"
        if message["role"] == "assistant":
            parts += [(held, False), (said, True)]
            held = "\n"
        else:
            held += f"{said}\n"
    return [*parts, (held, False)] if held else parts


SHAPES = {
    "messages": {"messages": turn("what is one", "a word")},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "what is one"},
            {"from": "gpt", "value": "a word"},
        ]
    },
    "prompt": {"prompt": "what is one", "completion": "a word"},
    "prompt of messages": {
        "prompt": turn("what is one", "a word")[:1],
        "completion": turn("what is one", "a word")[1:],
    },
    "alpaca": {"instruction": "what is one", "input": "", "output": "a word"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_gives_the_same_tokens(tokenizer: Path, tmp_path: Path, shape: str) -> None:
    rows: list[Any] = [SHAPES[shape]] * 4
    out = prepare(tokenizer, write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert samples(out) == [expected(turn("what is one", "a word"))] * 3


def test_a_system_message_and_alpacas_input_are_part_of_the_prompt(
    tokenizer: Path, tmp_path: Path
) -> None:
    rows: list[Any] = [
        {"instruction": "add", "input": "one two", "output": "three", "system": "be brief"},
        {
            "system": "be brief",
            "conversations": [
                {"from": "human", "value": "add\n\none two"},
                {"from": "gpt", "value": "three"},
            ],
        },
    ]
    out = prepare(tokenizer, write_rows(tmp_path / "a.jsonl", rows * 3), tmp_path / "out")
    messages = [{"role": "system", "content": "be brief"}, *turn("add\n\none two", "three")]
    assert samples(out) == [expected(messages)] * 5


def to_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "in.parquet")
    return folder / "in.parquet"


def to_csv(folder: Path) -> Path:
    with (folder / "in.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion"])
        writer.writerows([f'a "b", {n}\n', "c"] for n in range(9))
    return folder / "in.csv"


def to_dataset(folder: Path) -> Path:
    (folder / "set").mkdir()
    write_rows(folder / "set" / "train.jsonl", ROWS)
    return folder / "set"


@pytest.mark.parametrize(
    "write", [pytest.param(to_parquet, marks=pytest.mark.processes), to_csv, to_dataset]
)
def test_other_sources_have_the_same_conversations(
    tokenizer: Path, source: Path, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    prepare(tokenizer, write(tmp_path), tmp_path / "out")
    if write is to_csv:
        assert samples(tmp_path / "out")[0][0][0].startswith('<|im_start|>user\na "b", ')
        return
    wanted = prepare(tokenizer, source, tmp_path / "wanted")
    for name in ("train.bin", "train.marks.bin", "val.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (wanted / name).read_bytes()


def test_the_loss_covers_the_answers_of_every_turn(folder: Path) -> None:
    found = samples(folder)
    assert len(found) == 48
    wanted = [expected(row["messages"]) for row in ROWS]
    assert all(parts in wanted for parts in found)
    assert len({str(parts) for parts in found}) == len({str(parts) for parts in found})


def test_a_template_with_generation_blocks_trains_the_same_tokens(
    folder: Path, source: Path, tmp_path: Path
) -> None:
    marked = make_tokenizer(tmp_path / "marked", template=MARKED_TEMPLATE)
    flags = ("--sequence-length", LENGTH, "--val-fraction", 0.2)
    out = prepare(marked, source, tmp_path / "out", *flags)
    for name in ("train.bin", "train.marks.bin", "val.bin", "val.marks.bin"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_another_template_goes_with_the_data(
    tokenizer: Path, source: Path, folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(
        PLAIN_TEMPLATE.replace("<|im_start|>' + message", "<|im_start|>as ' + message").replace(
            "<|im_start|>assistant", "<|im_start|>as assistant"
        )
    )
    out = prepare(tokenizer, source, tmp_path / "out", "--chat-template", own)
    assert samples(out)[0][0][0].startswith("<|im_start|>as user\n")
    assert (out / "chat_template.jinja").read_text() == own.read_text()
    ours, theirs = load_meta(out).chat, load_meta(folder).chat
    assert ours is not None and theirs is not None
    assert ours.template_sha256 != theirs.template_sha256


def test_batches_hold_whole_conversations_and_targets_stay_within_them(folder: Path) -> None:
    blocks = opened(folder)
    tokens, targets, starts = blocks.gather(all_blocks(blocks))
    places = torch.arange(LENGTH).expand_as(tokens)
    is_target = targets != IGNORED_TARGET
    assert int(is_target.sum()) == blocks.num_targets(all_blocks(blocks))
    next_tokens, next_starts = tokens.roll(-1, dims=1), starts.roll(-1, dims=1)
    assert torch.equal(targets[is_target], next_tokens[is_target])
    assert torch.equal(starts[is_target], next_starts[is_target])
    assert not is_target[:, -1].any()
    assert bool((starts <= places).all()) and bool((starts.diff(dim=1) >= 0).all())
    # Every block begins with a conversation, so the first start is 0.
    first = tokens.gather(1, starts)
    is_padding = torch.from_numpy(blocks.marks_of(all_blocks(blocks)) & PADDING != 0)
    assert set(first[~is_padding].tolist()) == {0}, "token 0 is <|im_start|>"
    assert torch.equal(starts[is_padding], places[is_padding])


def test_the_counts_of_meta_json_are_those_of_the_files(folder: Path) -> None:
    meta = load_meta(folder)
    assert meta.chat is not None
    chat = meta.chat
    splits: list[tuple[Split, int, int, int]] = [
        ("train", chat.train_trained_tokens, chat.train_padding_tokens, meta.train_tokens),
        ("val", chat.val_trained_tokens, chat.val_padding_tokens, meta.val_tokens),
    ]
    for split, trained, padding, tokens in splits:
        blocks = opened(folder, split)
        chosen = all_blocks(blocks)
        assert blocks.num_targets(chosen) == trained
        assert blocks.num_tokens(chosen) == tokens - padding
        assert tokens == len(chosen) * LENGTH
    assert meta.train_documents + meta.val_documents == len(ROWS)
    assert meta.chat.train_padding_tokens < 0.2 * meta.train_tokens


def test_without_packing_each_conversation_has_a_block(
    tokenizer: Path, source: Path, tmp_path: Path
) -> None:
    flags = ("--packing", "none", "--sequence-length", LENGTH)
    out = prepare(tokenizer, source, tmp_path / "out", *flags)
    meta = load_meta(out)
    assert meta.train_tokens == meta.train_documents * LENGTH
    starts = opened(out).gather(all_blocks(opened(out)))[2]
    assert bool(((starts == 0) | (starts == torch.arange(LENGTH))).all())


def test_a_group_is_all_for_training_or_all_for_validation(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": turn(f"word {n % 7}", "a"), "module": f"m{n % 7}"} for n in range(70)]
    source = write_rows(tmp_path / "a.jsonl", rows)
    flags = ("--group-column", "module", "--val-fraction", 0.3)
    out = prepare(tokenizer, source, tmp_path / "out", *flags)
    meta = load_meta(out)
    assert (meta.train_documents, meta.val_documents) == (40, 30)
    sides: list[set[str]] = []
    for split, count in (("train", 40), ("val", 30)):
        side: Split = "train" if split == "train" else "val"
        found = [read_samples(out, meta, split=side, number=n)[0].parts[0][0] for n in range(count)]
        sides.append(set(found))
    assert len(sides[0]) == 4 and len(sides[1]) == 3 and not sides[0] & sides[1]


def test_a_long_conversation_is_cut_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": turn(f"one {count}", "two " * count)} for count in (2, 3, 400, 500)]
    rows.append({"messages": turn("word " * 400, "never reached")})
    out = prepare(
        tokenizer,
        write_rows(tmp_path / "a.jsonl", rows),
        tmp_path / "out",
        *("--sequence-length", 64, "--val-fraction", 0.3),
    )
    meta = load_meta(out)
    assert meta.chat is not None
    assert meta.chat.truncated_conversations == 3 and meta.chat.dropped_conversations == 1
    assert meta.train_documents + meta.val_documents == 4
    assert meta.chat.truncated_tokens > 2 * 300


def test_the_same_command_again_has_nothing_to_do(
    tokenizer: Path, source: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = prepare_words(tokenizer, source, folder, "--json", "--val-fraction", 0.2)
    assert main([*common, "--sequence-length", str(LENGTH)]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["was_ready"]
    assert main([*common, "--sequence-length", "64"]) == ExitCode.CONFIG
    assert "made from another source or with other settings" in capsys.readouterr().err


def test_preparing_text_removes_the_marks_of_conversations(
    tokenizer: Path, source: Path, tmp_path: Path
) -> None:
    out = prepare(tokenizer, source, tmp_path / "out")
    text = tmp_path / "text.jsonl"
    write_rows(text, [{"text": f"word {n}"} for n in range(9)])
    arguments = ["prepare", "--source", "jsonl", "--input", str(text), "--out", str(out), "--force"]
    assert main([*arguments, "--quiet"]) == ExitCode.OK
    assert load_meta(out).task == "text" and not (out / "train.marks.bin").exists()


@pytest.mark.parametrize("colour", ["always", "never"])
def test_show_prints_the_trained_tokens_in_colour(
    folder: Path, capsys: pytest.CaptureFixture[str], colour: str
) -> None:
    assert main(["show", str(folder), "--sample", "3", "--color", colour]) == ExitCode.OK
    before, behind = ("\x1b[32m", "\x1b[0m") if colour == "always" else "⟦⟧"
    wanted = "".join(f"{before}{t}{behind}" if trained else t for t, trained in samples(folder)[3])
    assert capsys.readouterr().out == wanted + "\n"


def test_a_message_cannot_write_to_the_terminal(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": turn("\x1b]0;title\x07a", "b\x1b[2J")}] * 3
    out = prepare(tokenizer, write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out")
    shown = read_samples(out, load_meta(out), split="train", number=0)[0].render(colour=False)
    assert "\x1b" not in shown and "⟦b" in shown


def test_long_texts_are_tokenized_a_few_together() -> None:
    sizes = [1, 1, None, 3 * 2**20, 2**20, 1, 9 * 2**20, 1, 1, 1, 1]
    found = list(in_batches(sizes, count=3, chars=lambda size: size))
    assert found == [[1, 1, 3 * 2**20], [2**20, 1, 9 * 2**20], [1, 1, 1], [1]]
    large = list(in_batches(iter([3 * 2**20] * 256), count=256, chars=lambda size: size))
    assert [len(each) for each in large] == [2] * 128


def test_best_fit_puts_every_document_into_one_block_and_wastes_little() -> None:
    lengths = np.random.default_rng(1).integers(1, 401, size=3000).tolist()
    blocks = list(best_fit(lengths, capacity=1024))
    assert sorted(number for block in blocks for number in block) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in block) <= 1024 for block in blocks)
    assert len(blocks) == -(-sum(lengths) // 1024)
    assert list(best_fit([2, 3, 2, 3], capacity=5)) == [[1, 2], [3, 0]]
    assert list(best_fit([5, 5], capacity=5)) == [[0], [1]]


def test_another_length_than_the_blocks_have_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sequence_length = 64, but .* blocks of 128"):
        open_packed(folder, split="train", sequence_length=64)


def test_show_refuses_text(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_data)]) == ExitCode.CONFIG
    assert (
        "was prepared with --task text. Use a folder that was prepared with"
        in capsys.readouterr().err
    )
