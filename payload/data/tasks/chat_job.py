"""Runs `prepare --task chat`: turns rows into packed blocks, with a mark for each token."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.data.reading.packed_blocks import FIRST, PADDING, TRAINED, Marks
from payload.data.rows.conversations import (
    BadConversationError,
    columns_of,
    conversation_of,
    unread_columns,
)
from payload.data.rows.packing import best_fit
from payload.data.rows.rows import Row, Rows, in_batches, open_rows
from payload.data.sources.documents import Survey
from payload.data.tasks.arguments import (
    PACKINGS,
    SEQUENCE_LENGTH,
    prepare_settings,
    source_request,
    tokenizer_check,
)
from payload.data.tasks.whole_folder_writer import PreparedData
from payload.data.templates.chat_template import (
    TEMPLATE_FILE,
    ChatTemplate,
    Span,
    load_chat_template,
    read_chat_template,
)
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.writing.plan import PrepareSettings
from payload.data.writing.tokenizer_check import TokenizerCheck
from payload.formats.data_folder import (
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    ChatRecord,
)

_MARKS_NAMES = {TRAIN_NAME: TRAIN_MARKS_NAME, VAL_NAME: VAL_MARKS_NAME}
_BATCH_SIZE = 256
"""Number of conversations that are tokenized together."""


def chat_job(args: argparse.Namespace) -> ChatJob:
    """Return the job that the command line describes. Raises DataError, UsageError."""
    request = source_request(args)
    if request.text_column is not None:
        raise UsageError(
            "--text-column is not used by --task chat. Use the column names messages, "
            "conversations, prompt and completion, or instruction and output."
        )
    rows = open_rows(request)
    tokenizer, template = load_tokenizer_and_template(args)
    length = args.sequence_length or SEQUENCE_LENGTH
    packing = args.packing or PACKINGS[0]
    shaping: tuple[str, ...] = (
        "chat",
        args.source,
        str(length),
        packing,
        template.sha256(),
        str(args.skip_bad),
    )
    shaping += (args.group_column,) if args.group_column is not None else ()
    settings = prepare_settings(args, tokenizer, val_fraction=None, shaping=shaping)
    return ChatJob(
        rows,
        settings,
        tokenizer,
        template,
        tokenizer_check(settings, quiet=args.quiet),
        length=length,
        packing=packing,
        groups=Groups(args.group_column),
    )


def load_tokenizer_and_template(args: argparse.Namespace) -> tuple[HfTokenizer, ChatTemplate]:
    """Return the tokenizer and template of --tokenizer and --chat-template. Raises DataError."""
    tokenizer, folder = load_hf_tokenizer(args.tokenizer)
    if args.chat_template is None:
        template = read_chat_template(folder)
    else:
        template = load_chat_template(args.chat_template, tokenizer=folder)
    # The template is also stored as a file if it came from tokenizer_config.json. So a checkpoint
    # gets this template, whatever template its model has.
    own = {TEMPLATE_FILE: template.source.encode()}
    return replace(tokenizer, files={**tokenizer.files, **own}), template


class Groups:
    """Numbers the rows by a column's value, so that a split does not separate equal values."""

    def __init__(self, column: str | None) -> None:
        self._column = column
        self._numbers: dict[str, int] = {}

    def number_of(self, row: Row) -> int:
        """Return the group number of a row; without groups, its row number. Raises DataError."""
        if self._column is None:
            return row.number
        if self._column not in row.values:
            keys = ", ".join(shown(key) for key in list(row.values)[:6])
            raise DataError(
                f"{row.where}: no column {self._column!r}; its columns: {keys}. Choose one with "
                "--group-column."
            )
        name = str(row.values[self._column])
        return self._numbers.setdefault(name, len(self._numbers))

    def columns(self) -> tuple[str, ...]:
        """Return the columns that define groups."""
        return () if self._column is None else (self._column,)

    def count(self, rows: Rows) -> int:
        """Return the number of groups, or the number of rows without groups."""
        return rows.num_rows if self._column is None else len(self._numbers)


@dataclass(frozen=True, slots=True)
class _Document:
    """The tokens of a conversation, each with True if it is trained; the first token never is."""

    group: int
    """Key of the split: the group's number, or the row's number without groups."""
    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]


@dataclass(slots=True)
class ChatJob:
    """One prepare run, from rows to the arrays of the folder."""

    rows: Rows
    settings: PrepareSettings
    tokenizer: HfTokenizer
    template: ChatTemplate
    check: TokenizerCheck
    length: int = field(kw_only=True)
    packing: Any = field(kw_only=True)
    groups: Groups = field(kw_only=True)
    truncated: int = 0
    truncated_tokens: int = 0
    dropped: int = 0
    text_bytes: int = 0

    def make(self) -> PreparedData:
        """Read, render, tokenize and pack all rows. Raises DataError."""
        documents = self._documents()
        count = self.groups.count(self.rows)
        split = self.settings.split(Survey(documents=count, text_bytes=None))
        is_val = split.val_mask(np.array([each.group for each in documents], dtype=np.int64))
        files: dict[str, npt.NDArray[Any]] = {}
        counts: dict[str, int] = {}
        record: dict[str, int] = {}
        for name, prefix, chosen in ((TRAIN_NAME, "train", ~is_val), (VAL_NAME, "val", is_val)):
            mine = [documents[index] for index in np.flatnonzero(chosen)]
            if not mine:
                raise DataError(
                    f"no conversation of {len(documents):,} is left to "
                    f"{'train on' if prefix == 'train' else 'validate on'}. Change --val-fraction."
                )
            tokens, marks = self._pack(mine)
            files[name], files[_MARKS_NAMES[name]] = tokens.flatten(), marks.flatten()
            counts |= {f"{prefix}_tokens": tokens.size, f"{prefix}_documents": len(mine)}
            record |= _count_marks(marks, prefix)
        chat = ChatRecord(
            sequence_length=self.length,
            packing=self.packing,
            template_sha256=self.template.sha256(),
            truncated_conversations=self.truncated,
            truncated_tokens=self.truncated_tokens,
            dropped_conversations=self.dropped,
            **record,
        )
        fields = {**counts, "text_bytes": self.text_bytes, "task": "chat", "chat": chat}
        return PreparedData(
            files=files, split=split, fields=fields, encoder=self.tokenizer.reference_name
        )

    def _documents(self) -> list[_Document]:
        """Return every conversation with trained tokens, truncated to the block length."""
        rows = islice(self.rows.read(), self.settings.max_documents)
        found: list[_Document] = []
        rendered = map(self._render, rows)
        for batch in in_batches(rendered, count=_BATCH_SIZE, chars=lambda each: len(each[1])):
            found += self._tokenize(batch)
        self.check.finish()
        if not found:
            self.rows.require_some()
            raise DataError(
                f"no conversation with trained tokens in {self.rows.label}: {self.rows.num_rows:,} "
                f"rows, {len(self.rows.skipped):,} bad, {self.dropped:,} with empty answers or "
                "answers beyond --sequence-length. Check the columns, or raise --sequence-length."
            )
        return found

    def _render(self, row: Row) -> tuple[int, str, list[Span]] | None:
        try:
            conversation = conversation_of(row.values)
            text, spans = self.template.render_for_training(conversation.messages)
        except (BadConversationError, DataError) as error:
            self.rows.skip(row.where, str(error))
            return None
        self.rows.note_unread(
            unread_columns(row.values, [*columns_of(row.values), *self.groups.columns()])
        )
        return self.groups.number_of(row), text, spans

    def _tokenize(self, rendered: list[tuple[int, str, list[Span]]]) -> list[_Document]:
        texts = [text for _, text, _ in rendered]
        found = []
        encoded = self.tokenizer.encodings(texts)
        rows = [np.array(each.ids, dtype=np.uint32) for each in encoded]
        self.check.add_rows([text.encode() for text in texts], rows)
        for (group, text, spans), each in zip(rendered, encoded, strict=True):
            self.text_bytes += len(text.encode())
            tokens = np.array(each.ids, dtype=np.uint32)
            trained = in_spans(token_starts(each.offsets), spans)
            if len(tokens) > self.length:
                self.truncated += 1
                self.truncated_tokens += len(tokens) - self.length
                tokens, trained = tokens[: self.length], trained[: self.length]
            # No earlier token predicts the first token.
            trained[:1] = False
            if trained.any():
                found.append(_Document(group, tokens, trained))
            else:
                self.dropped += 1
        return found

    def _pack(self, documents: list[_Document]) -> tuple[npt.NDArray[Any], Marks]:
        """Return the tokens and marks of the blocks, (number of blocks, length) each."""
        if self.packing == "none":
            blocks = [[number] for number in range(len(documents))]
        else:
            blocks = best_fit([len(each.tokens) for each in documents], capacity=self.length)
        size = (len(blocks), self.length)
        tokens = np.full(size, self.tokenizer.end[-1], dtype=self.settings.dtype())
        # Each padding token is a separate document, so attention does no work for it.
        marks = np.full(size, PADDING | FIRST, dtype=np.uint8)
        for row, block in enumerate(blocks):
            index = 0
            for document in (documents[number] for number in block):
                end = index + len(document.tokens)
                tokens[row, index:end] = document.tokens
                marks[row, index:end] = document.trained * np.uint8(TRAINED)
                marks[row, index] |= FIRST
                index = end
        return tokens, marks


def token_starts(offsets: list[Span]) -> npt.NDArray[np.int64]:
    """Return the index of the first character of each token.

    A byte-level tokenizer trims white space from offsets, so a token of only white space has an
    empty span. Such a token starts where the previous token ends.
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.concatenate(([0], ends[:-1]))
    return np.where(ends > starts, starts, before)


def in_spans(starts: npt.NDArray[np.int64], spans: list[Span]) -> npt.NDArray[np.bool_]:
    """Return for each token whether its first character is in one of the spans."""
    found = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        found |= (starts >= start) & (starts < end)
    return found


def _count_marks(marks: Marks, prefix: str) -> dict[str, int]:
    return {
        f"{prefix}_trained_tokens": int(((marks & TRAINED) != 0).sum()),
        f"{prefix}_padding_tokens": int(((marks & PADDING) != 0).sum()),
    }
