"""A small chat model with random weights, and packed conversations for it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.models import small_llama, write_small
from benchmarks.gpu.runs import Runs
from tests.support.chat_data import conversations, make_tokenizer, prepare_words, write_rows

_VOCAB_SIZE = 304
"""Size that fits the tokenizer of `make_tokenizer`."""


def chat_inputs(runs: Runs) -> tuple[Path, Path]:
    """Return the folders of the model and of the data; a sequence has several conversations.

    Raises ProgramError.
    """
    model, data = runs.folder / "model-chat", runs.folder / "data-chat"
    write_small(model, small_llama(_VOCAB_SIZE))
    make_tokenizer(model)
    # 40 tokens for each conversation, for 20 steps of 8 sequences.
    count = 500 if runs.rehearsal else 2_000
    rows = [{"messages": each} for each in conversations(count)]
    source = write_rows(runs.folder / "conversations.jsonl", rows)
    length = ("--sequence-length", runs.sequence_length())
    words = prepare_words(model, source, data, *length)
    runs.programs.run("prepare-chat", "payload.data", *words)
    return model, data
