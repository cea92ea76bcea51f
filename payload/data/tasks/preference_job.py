"""The work of `prepare --task preference`: rows in, pairs of conversations and marks out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.data.reading.packed_blocks import TRAINED
from payload.data.rows.conversations import BadConversationError, Messages, unread_columns
from payload.data.rows.preferences import ANSWERS, COLUMNS, preference_of
from payload.data.rows.rows import Row, Rows, in_batches, open_rows
from payload.data.sources.documents import Survey
from payload.data.tasks.arguments import (
    SEQUENCE_LENGTH,
    prepare_settings,
    source_request,
    tokenizer_check,
)
from payload.data.tasks.chat_job import (
    Groups,
    load_tokenizer_and_template,
    token_starts,
    within,
)
from payload.data.tasks.classify_job import pad_token
from payload.data.tasks.whole_folder_writer import Made
from payload.data.templates.chat_template import ChatTemplate, Span
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.writing.plan import PrepareSettings
from payload.data.writing.tokenizer_check import TokenizerCheck
from payload.formats.data_folder import (
    PAIRS_NAMES,
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    PreferenceRecord,
)

_MARKS_NAMES = {TRAIN_NAME: TRAIN_MARKS_NAME, VAL_NAME: VAL_MARKS_NAME}
_AT_ONCE = 128
"""Pairs that are tokenized together."""


def preference_job(args: argparse.Namespace) -> PreferenceJob:
    """Return what the command line asks for. Raises DataError, UsageError."""
    request = source_request(args)
    if request.text_column is not None:
        raise UsageError(
            "--text-column is for --task text and classify; pairs are found by their columns' "
            "names (prompt, chosen, rejected)."
        )
    rows = open_rows(request)
    tokenizer, template = load_tokenizer_and_template(args)
    length = args.sequence_length or SEQUENCE_LENGTH
    group = args.group_column
    shaping = [args.source, str(length), template.sha256(), str(args.skip_bad)]
    shaping += [group] if group is not None else []
    settings = prepare_settings(
        args, tokenizer, val_fraction=None, shaping=("preference", *shaping)
    )
    check = tokenizer_check(settings, quiet=args.quiet)
    return PreferenceJob(
        rows, settings, tokenizer, template, check, length=length, groups=Groups(group)
    )


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A row's two conversations as text, and which of it are the answers."""

    row: Row
    group: int
    texts: tuple[str, ...]
    spans: tuple[list[Span], ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two conversations, the better one first, and which of their tokens are the answers'."""

    group: int
    """The split's key: the row's number, or that of its group."""
    tokens: tuple[npt.NDArray[np.uint32], ...]
    trained: tuple[npt.NDArray[np.bool_], ...]


@dataclass(slots=True)
class PreferenceJob:
    """One prepare: from rows to the folder's arrays."""

    rows: Rows
    settings: PrepareSettings
    tokenizer: HfTokenizer
    template: ChatTemplate
    check: TokenizerCheck
    length: int = field(kw_only=True)
    groups: Groups = field(kw_only=True)
    truncated: int = 0
    truncated_tokens: int = 0
    text_bytes: int = 0

    def make(self) -> Made:
        """Read, render and tokenize everything. Raises DataError."""
        pairs = self._pairs()
        count = self.groups.count(self.rows)
        split = self.settings.split(Survey(documents=count, text_bytes=None))
        is_val = split.val_mask(np.array([each.group for each in pairs], dtype=np.int64))
        files: dict[str, npt.NDArray[Any]] = {}
        fields: dict[str, Any] = {"text_bytes": self.text_bytes, "task": "preference"}
        trained: dict[str, int] = {}
        for name, prefix, chosen in ((TRAIN_NAME, "train", ~is_val), (VAL_NAME, "val", is_val)):
            mine = [pairs[place] for place in np.flatnonzero(chosen)]
            if not mine:
                raise DataError(
                    f"of {len(pairs):,} pairs none is left to "
                    f"{'train on' if prefix == 'train' else 'validate on'}; change --val-fraction."
                )
            tokens = [each for pair in mine for each in pair.tokens]
            marks = np.concatenate([each for pair in mine for each in pair.trained])
            ends = np.cumsum([len(each) for each in tokens], dtype=np.int64)
            files[name] = np.concatenate(tokens).astype(self.settings.dtype())
            files[_MARKS_NAMES[name]] = marks * np.uint8(TRAINED)
            files[PAIRS_NAMES[name]] = ends.reshape(-1, 2)
            fields |= {f"{prefix}_tokens": len(marks), f"{prefix}_documents": len(mine)}
            trained[f"{prefix}_trained_tokens"] = int(marks.sum())
        fields["preference"] = PreferenceRecord(
            sequence_length=self.length,
            template_sha256=self.template.sha256(),
            truncated_answers=self.truncated,
            truncated_tokens=self.truncated_tokens,
            pad_token=pad_token(self.tokenizer),
            **trained,
        )
        return Made(files=files, split=split, fields=fields, encoder=self.tokenizer.reference_name)

    def _pairs(self) -> list[_Pair]:
        """Return every pair, cut to the length of a conversation."""
        rows = islice(self.rows.read(), self.settings.max_documents)
        found: list[_Pair] = []
        rendered = map(self._rendered, rows)
        for some in in_batches(
            rendered, count=_AT_ONCE, chars=lambda each: sum(map(len, each.texts))
        ):
            found += self._tokenized(some)
        self.check.finish()
        if not found:
            self.rows.require_some()
            raise DataError(
                f"no pair of answers in {self.rows.label}: {self.rows.num_rows:,} rows, "
                f"{len(self.rows.skipped):,} of them bad. Check the columns prompt, chosen and "
                "rejected."
            )
        return found

    def _rendered(self, row: Row) -> _Rendered | None:
        try:
            pair = preference_of(row.values)
            before = len(self.template.render_for_training(pair.prompt)[1])
            both = [
                self._answer(pair.prompt, each, before) for each in (pair.chosen, pair.rejected)
            ]
        except (BadConversationError, DataError) as error:
            self.rows.skip(row.where, str(error))
            return None
        self.rows.note_unread(unread_columns(row.values, [*COLUMNS, *self.groups.columns()]))
        texts, spans = zip(*both, strict=True)
        return _Rendered(row, self.groups.number_of(row), texts, spans)

    def _answer(self, prompt: Messages, answer: Messages, before: int) -> tuple[str, list[Span]]:
        """Return a whole conversation, and what the assistant wrote behind the prompt.

        `before` counts what the assistant wrote in the prompt.
        """
        text, spans = self.template.render_for_training([*prompt, *answer])
        return text, spans[before:]

    def _tokenized(self, rendered: list[_Rendered]) -> list[_Pair]:
        texts = [text for each in rendered for text in each.texts]
        encoded = self.tokenizer.encodings(texts)
        rows = [np.array(each.ids, dtype=np.uint32) for each in encoded]
        self.check.add_rows([text.encode() for text in texts], rows)
        encodings = iter(encoded)
        found = []
        for each in rendered:
            tokens, trained = [], []
            for spans in each.spans:
                encoding = next(encodings)
                tokens.append(np.array(encoding.ids, dtype=np.uint32))
                trained.append(within(token_starts(encoding.offsets), spans))
                # Nothing comes before the first token that could predict it.
                trained[-1][:1] = False
            pair = _Pair(each.group, tuple(tokens), tuple(trained))
            if self._is_sound(pair, each.row):
                self.text_bytes += sum(len(text.encode()) for text in each.texts)
                found.append(self._cut(pair))
        return found

    def _is_sound(self, pair: _Pair, row: Row) -> bool:
        """Say whether both answers have tokens to compare; else the row is left out, or raises."""
        length = self.length
        for name, trained in zip(ANSWERS, pair.trained, strict=True):
            if not trained.any():
                self.rows.skip(
                    row.where,
                    f"{name} has no token of the assistant in the template's text: all tokens "
                    "are masked. Write an answer, or check the template.",
                )
                return False
            prompt = int(trained.argmax())
            if prompt >= length:
                self.rows.skip(
                    row.where,
                    f"the prompt has {prompt:,} tokens, which leaves none of --sequence-length "
                    f"{length} for the answer. Raise it.",
                )
                return False
        one, other = (tokens[:length] for tokens in pair.tokens)
        if np.array_equal(one, other):
            self.rows.skip(
                row.where,
                f"chosen and rejected have the same first {len(one):,} tokens. Raise "
                f"--sequence-length {length}, or correct one.",
            )
            return False
        return True

    def _cut(self, pair: _Pair) -> _Pair:
        beyond = [max(0, len(tokens) - self.length) for tokens in pair.tokens]
        self.truncated += sum(each > 0 for each in beyond)
        self.truncated_tokens += sum(beyond)
        return _Pair(
            pair.group,
            tuple(each[: self.length] for each in pair.tokens),
            tuple(each[: self.length] for each in pair.trained),
        )
