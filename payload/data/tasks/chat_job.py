"""The work of `prepare --task chat`: rows in, packed blocks and marks out."""

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
from payload.data.tasks.whole_folder_writer import Made
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
_AT_ONCE = 256
"""Conversations that are tokenized together."""


def chat_job(args: argparse.Namespace) -> ChatJob:
    """Return what the command line asks for. Raises DataError, UsageError."""
    request = source_request(args)
    if request.text_column is not None:
        raise UsageError(
            "--text-column is for --task text; conversations are found by their columns' names "
            "(messages, conversations, prompt and completion, instruction and output)."
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
    """Return what --tokenizer and --chat-template name. Raises DataError."""
    tokenizer, folder = load_hf_tokenizer(args.tokenizer)
    if args.chat_template is None:
        template = read_chat_template(folder)
    else:
        template = load_chat_template(args.chat_template, tokenizer=folder)
    # Also one of tokenizer_config.json: a checkpoint gets this file, whatever its model's has.
    own = {TEMPLATE_FILE: template.source.encode()}
    return replace(tokenizer, files={**tokenizer.files, **own}), template


class Groups:
    """Numbers the rows by the value of a column, for a split that keeps equal ones together."""

    def __init__(self, column: str | None) -> None:
        self._column = column
        self._numbers: dict[str, int] = {}

    def number_of(self, row: Row) -> int:
        """Return the number of the row's group, or its own. Raises DataError."""
        if self._column is None:
            return row.number
        if self._column not in row.values:
            keys = ", ".join(shown(key) for key in list(row.values)[:6])
            raise DataError(
                f"{row.where}: no column {self._column!r}; columns there: {keys}. Choose one with "
                "--group-column."
            )
        name = str(row.values[self._column])
        return self._numbers.setdefault(name, len(self._numbers))

    def columns(self) -> tuple[str, ...]:
        """Return the columns that it reads."""
        return () if self._column is None else (self._column,)

    def count(self, rows: Rows) -> int:
        """Return the number of groups, or of all rows that were read."""
        return rows.num_rows if self._column is None else len(self._numbers)


@dataclass(frozen=True, slots=True)
class _Document:
    """A conversation's tokens, and which of them are trained; never the first."""

    group: int
    """The split's key: the row's number, or that of its group."""
    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]


@dataclass(slots=True)
class ChatJob:
    """One prepare: from rows to the folder's arrays."""

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

    def make(self) -> Made:
        """Read, render, tokenize and pack everything. Raises DataError."""
        documents = self._documents()
        count = self.groups.count(self.rows)
        split = self.settings.split(Survey(documents=count, text_bytes=None))
        is_val = split.val_mask(np.array([each.group for each in documents], dtype=np.int64))
        files: dict[str, npt.NDArray[Any]] = {}
        counts: dict[str, int] = {}
        record: dict[str, int] = {}
        for name, prefix, chosen in ((TRAIN_NAME, "train", ~is_val), (VAL_NAME, "val", is_val)):
            mine = [documents[place] for place in np.flatnonzero(chosen)]
            if not mine:
                raise DataError(
                    f"of {len(documents):,} conversations none is left to "
                    f"{'train on' if prefix == 'train' else 'validate on'}; change --val-fraction."
                )
            tokens, marks = self._packed(mine)
            files[name], files[_MARKS_NAMES[name]] = tokens.flatten(), marks.flatten()
            counts |= {f"{prefix}_tokens": tokens.size, f"{prefix}_documents": len(mine)}
            record |= _counted(marks, prefix)
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
        return Made(files=files, split=split, fields=fields, encoder=self.tokenizer.reference_name)

    def _documents(self) -> list[_Document]:
        """Return every conversation with something to train on, cut to a block's length."""
        rows = islice(self.rows.read(), self.settings.max_documents)
        found: list[_Document] = []
        rendered = map(self._rendered, rows)
        for some in in_batches(rendered, count=_AT_ONCE, chars=lambda each: len(each[1])):
            found += self._tokenized(some)
        self.check.finish()
        if not found:
            self.rows.require_some()
            raise DataError(
                f"no conversation with a token to train on in {self.rows.label}: "
                f"{self.rows.num_rows:,} rows, {len(self.rows.skipped):,} bad, {self.dropped:,} "
                "whose answers are empty or lie beyond --sequence-length. Check the columns, or "
                "raise it."
            )
        return found

    def _rendered(self, row: Row) -> tuple[int, str, list[Span]] | None:
        try:
            text, spans = self.template.render_for_training(conversation_of(row.values))
        except (BadConversationError, DataError) as error:
            self.rows.skip(row.where, str(error))
            return None
        self.rows.note_unread(
            unread_columns(row.values, [*columns_of(row.values), *self.groups.columns()])
        )
        return self.groups.number_of(row), text, spans

    def _tokenized(self, rendered: list[tuple[int, str, list[Span]]]) -> list[_Document]:
        texts = [text for _, text, _ in rendered]
        found = []
        encoded = self.tokenizer.encodings(texts)
        rows = [np.array(each.ids, dtype=np.uint32) for each in encoded]
        self.check.add_rows([text.encode() for text in texts], rows)
        for (group, text, spans), each in zip(rendered, encoded, strict=True):
            self.text_bytes += len(text.encode())
            tokens = np.array(each.ids, dtype=np.uint32)
            trained = within(token_starts(each.offsets), spans)
            if len(tokens) > self.length:
                self.truncated += 1
                self.truncated_tokens += len(tokens) - self.length
                tokens, trained = tokens[: self.length], trained[: self.length]
            # Nothing comes before the first token that could predict it.
            trained[:1] = False
            if trained.any():
                found.append(_Document(group, tokens, trained))
            else:
                self.dropped += 1
        return found

    def _packed(self, documents: list[_Document]) -> tuple[npt.NDArray[Any], Marks]:
        """Return the blocks' tokens and marks, (number of blocks, length) each."""
        if self.packing == "none":
            blocks = [[number] for number in range(len(documents))]
        else:
            blocks = best_fit([len(each.tokens) for each in documents], capacity=self.length)
        size = (len(blocks), self.length)
        tokens = np.full(size, self.tokenizer.end[-1], dtype=self.settings.dtype())
        # A padding token is a document of its own: it costs attention nothing.
        marks = np.full(size, PADDING | FIRST, dtype=np.uint8)
        for row, block in enumerate(blocks):
            place = 0
            for document in (documents[number] for number in block):
                end = place + len(document.tokens)
                tokens[row, place:end] = document.tokens
                marks[row, place:end] = document.trained * np.uint8(TRAINED)
                marks[row, place] |= FIRST
                place = end
        return tokens, marks


def token_starts(offsets: list[Span]) -> npt.NDArray[np.int64]:
    """Return the first character of each token.

    A byte-level tokenizer trims white space from its offsets, and so leaves a token of white space
    alone empty at its end: it begins where the token before it ends.
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.concatenate(([0], ends[:-1]))
    return np.where(ends > starts, starts, before)


def within(starts: npt.NDArray[np.int64], spans: list[Span]) -> npt.NDArray[np.bool_]:
    """Say for each token, by its first character, whether it lies in one of the spans."""
    found = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        found |= (starts >= start) & (starts < end)
    return found


def _counted(marks: Marks, prefix: str) -> dict[str, int]:
    return {
        f"{prefix}_trained_tokens": int(((marks & TRAINED) != 0).sum()),
        f"{prefix}_padding_tokens": int(((marks & PADDING) != 0).sum()),
    }
