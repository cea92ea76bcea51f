"""Runs `prepare --task chat`: turns rows into packed blocks, with a mark for each token."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.data.reading.packed_blocks import FIRST, PADDING, TRAINED, Marks
from payload.data.rows.conversations import (
    BadConversationError,
    UntrainedRowError,
    columns_of,
    conversation_of,
    unread_columns,
)
from payload.data.rows.open_rows import open_rows
from payload.data.rows.packing import best_fit
from payload.data.rows.rows import Row, Rows, in_batches
from payload.data.sources.documents import Survey
from payload.data.tasks.arguments import (
    ON_LONG,
    PACKINGS,
    SEQUENCE_LENGTH,
    prepare_settings,
    sample_options,
    source_request,
    tokenizer_check,
)
from payload.data.tasks.trained_tokens import SampleTokenizer
from payload.data.tasks.whole_folder_writer import PreparedData
from payload.data.templates.chat_template import (
    ChatTemplate,
    load_chat_template,
    read_chat_template,
)
from payload.data.templates.template_files import TEMPLATE_FILE
from payload.data.templates.turns import RenderedSample, SampleOptions
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.writing.plan import PrepareSettings
from payload.formats.data_folder import (
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    ChatRecord,
    OnLong,
)

_MARKS_NAMES = {TRAIN_NAME: TRAIN_MARKS_NAME, VAL_NAME: VAL_MARKS_NAME}
_COUNTED = (
    *("truncated_conversations", "truncated_tokens", "long_dropped_conversations"),
    *("split_conversations", "dropped_conversations", "added_samples", "added_tokens"),
)
"""Fields of the record that this job counts."""
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
    options = sample_options(args)
    on_long: OnLong = args.on_long or ON_LONG[0]
    shaping: tuple[str, ...] = (
        "chat",
        args.source,
        str(length),
        packing,
        template.sha256(),
        str(args.skip_bad),
        on_long,
        *options.shaping(),
    )
    shaping += (args.group_column,) if args.group_column is not None else ()
    settings = prepare_settings(args, tokenizer, val_fraction=None, shaping=shaping)
    return ChatJob(
        rows,
        settings,
        template,
        SampleTokenizer(tokenizer, tokenizer_check(settings, quiet=args.quiet)),
        options,
        length=length,
        packing=packing,
        on_long=on_long,
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

    def survey(self, rows: Rows) -> Survey:
        """Return the number of groups, or of rows without groups, after all rows were read.

        Raises UsageError for groups in files that are named for training and validation.
        """
        if self._column is None:
            return rows.survey()
        if rows.first_val is not None:
            raise UsageError(
                "--group-column cannot be used: the names of the files declare the validation "
                "data. Leave it out, or pass only the training files."
            )
        return Survey(documents=len(self._numbers), text_bytes=None)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A rendered text of a row."""

    where: str
    """File and line of the row."""
    group: int
    """Key of the split: the group's number, or the row's number without groups."""
    rendered: RenderedSample
    is_added: bool
    """True except for one sample of a row."""


@dataclass(frozen=True, slots=True)
class _Document:
    """The tokens of a sample, each with True if it is trained; the first token never is."""

    group: int
    """Key of the split: the group's number, or the row's number without groups."""
    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]


@dataclass(slots=True)
class ChatJob:
    """One prepare run, from rows to the arrays of the folder."""

    rows: Rows
    settings: PrepareSettings
    template: ChatTemplate
    tokenizer: SampleTokenizer
    options: SampleOptions
    length: int = field(kw_only=True)
    packing: Any = field(kw_only=True)
    on_long: OnLong = field(kw_only=True)
    groups: Groups = field(kw_only=True)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of the record, by the name of its field."""

    def make(self) -> PreparedData:
        """Read, render, tokenize and pack all rows. Raises DataError."""
        documents = self._documents()
        split = self.settings.split(self.groups.survey(self.rows))
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
            thoughts=self.options.thoughts,
            on_long=self.on_long,
            **{name: self.counts[name] for name in _COUNTED},
            literal_samples=self.tokenizer.literal_samples,
            unescaped_samples=self.tokenizer.unescaped_samples,
            **record,
        )
        fields = {**counts, "text_bytes": self.tokenizer.text_bytes, "task": "chat", "chat": chat}
        encoder = self.tokenizer.tokenizer.reference_name
        return PreparedData(files=files, split=split, fields=fields, encoder=encoder)

    def _documents(self) -> list[_Document]:
        """Return every sample with trained tokens, in pieces of at most the block length."""
        self.template.require_stop(self.options.variables)
        rows = islice(self.rows.read(), self.settings.max_documents)
        found: list[_Document] = []
        samples = chain.from_iterable(map(self._render, rows))
        for batch in in_batches(
            samples, count=_BATCH_SIZE, chars=lambda each: len(each.rendered.text)
        ):
            found += self._tokenize(batch)
        self.tokenizer.check.finish()
        if not found:
            self.rows.require_some()
            raise DataError(
                f"no conversation with trained tokens in {self.rows.label}: {self.rows.num_rows:,} "
                f"rows, {len(self.rows.skipped):,} bad, {self.counts['dropped_conversations']:,} "
                "with empty answers or answers beyond --sequence-length. Check the columns, or "
                "raise --sequence-length."
            )
        return found

    def _render(self, row: Row) -> list[_Sample]:
        try:
            conversation = conversation_of(row.values)
            samples = self.template.samples(conversation, self.options)
        except UntrainedRowError as error:
            self.rows.leave_out(str(error))
            return []
        except (BadConversationError, DataError) as error:
            self.rows.skip(row.where, str(error))
            return []
        self.rows.note_unread(
            unread_columns(row.values, [*columns_of(row.values), *self.groups.columns()])
        )
        group = self.groups.number_of(row)
        last = len(samples) - 1
        return [
            _Sample(row.where, group, each, is_added=number < last)
            for number, each in enumerate(samples)
        ]

    def _tokenize(self, samples: list[_Sample]) -> list[_Document]:
        found: list[_Document] = []
        tokenized = self.tokenizer.tokens([each.rendered for each in samples])
        for sample, (tokens, trained) in zip(samples, tokenized, strict=True):
            if sample.is_added:
                self.counts["added_samples"] += 1
                self.counts["added_tokens"] += len(tokens)
            pieces = [(tokens, trained)]
            if len(tokens) > self.length:
                pieces = self._shortened(sample.where, tokens, trained)
            kept = [_Document(sample.group, *each) for each in pieces if each[1].any()]
            self.counts["dropped_conversations"] += bool(pieces) and not kept
            found += kept
        return found

    def _shortened(
        self, where: str, tokens: npt.NDArray[np.uint32], trained: npt.NDArray[np.bool_]
    ) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Return the pieces of a sample that is longer than a block, as --on-long says."""
        length = self.length
        if self.on_long == "refuse":
            self.rows.skip(
                where,
                f"the conversation has {len(tokens):,} tokens, more than --sequence-length "
                f"{length}. Raise it, or choose another --on-long.",
            )
            return []
        if self.on_long == "drop":
            self.counts["long_dropped_conversations"] += 1
            return []
        if self.on_long == "truncate":
            self.counts["truncated_conversations"] += 1
            self.counts["truncated_tokens"] += len(tokens) - length
            return [(tokens[:length], trained[:length])]
        self.counts["split_conversations"] += 1
        pieces = []
        # A piece begins with the last token of the piece before, which predicts the next token.
        for start in range(0, len(tokens) - 1, length - 1):
            marks = trained[start : start + length].copy()
            marks[0] = False
            pieces.append((tokens[start : start + length], marks))
        return pieces

    def _pack(self, documents: list[_Document]) -> tuple[npt.NDArray[Any], Marks]:
        """Return the tokens and marks of the blocks, (number of blocks, length) each."""
        if self.packing == "none":
            blocks = [[number] for number in range(len(documents))]
        else:
            blocks = best_fit([len(each.tokens) for each in documents], capacity=self.length)
        size = (len(blocks), self.length)
        end = self.tokenizer.tokenizer.end[-1]
        tokens = np.full(size, end, dtype=self.settings.dtype())
        # Each padding token is a separate document, so attention does no work for it.
        marks = np.full(size, PADDING | FIRST, dtype=np.uint8)
        for row, block in enumerate(blocks):
            index = 0
            for document in (documents[number] for number in block):
                after = index + len(document.tokens)
                tokens[row, index:after] = document.tokens
                marks[row, index:after] = document.trained * np.uint8(TRAINED)
                marks[row, index] |= FIRST
                index = after
        return tokens, marks


def _count_marks(marks: Marks, prefix: str) -> dict[str, int]:
    return {
        f"{prefix}_trained_tokens": int(((marks & TRAINED) != 0).sum()),
        f"{prefix}_padding_tokens": int(((marks & PADDING) != 0).sum()),
    }
