"""Runs `prepare --task preference`: tokenizes pairs of conversations, and marks the answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.data.reading.packed_blocks import TRAINED
from payload.data.rows.conversation import Conversation, Message
from payload.data.rows.conversations import BadConversationError, UntrainedRowError, unread_columns
from payload.data.rows.open_rows import open_rows
from payload.data.rows.preferences import ANSWERS, COLUMNS, Preference, preference_of
from payload.data.rows.rows import Row, Rows, in_batches
from payload.data.rows.tool_faults import tool_faults
from payload.data.selection.content_keys import equal_groups, key_of, keys_of
from payload.data.selection.select_rows import RowSelection, select_rows, split_by_units
from payload.data.tasks.arguments import (
    SEQUENCE_LENGTH,
    prepare_settings,
    sample_options,
    source_request,
    tokenizer_check,
    with_known_names,
)
from payload.data.tasks.chat_job import load_tokenizer_and_template
from payload.data.tasks.classify_job import pad_token
from payload.data.tasks.groups import Groups
from payload.data.tasks.row_sketches import RowSketches, message_texts
from payload.data.tasks.trained_tokens import SampleTokenizer
from payload.data.tasks.whole_folder_writer import PreparedData
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.empty_answers import empty_answers
from payload.data.templates.turns import RenderedSample, SampleOptions, render_samples
from payload.data.writing.plan import PrepareSettings
from payload.formats.data_folder import (
    PAIRS_NAMES,
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    PreferenceRecord,
)

_MARKS_NAMES = {TRAIN_NAME: TRAIN_MARKS_NAME, VAL_NAME: VAL_MARKS_NAME}
_BATCH_SIZE = 128
"""Number of pairs that are tokenized together."""


def preference_job(args: argparse.Namespace) -> PreferenceJob:
    """Return the job that the command line describes. Raises DataError, UsageError."""
    request = source_request(args)
    if request.text_column is not None:
        raise UsageError(
            "--text-column is not used by --task preference. Use the column names prompt, chosen "
            "and rejected."
        )
    request = with_known_names(request, quiet=args.quiet)
    rows = open_rows(request)
    tokenizer, template = load_tokenizer_and_template(args)
    if tokenizer.added is not None:
        raise UsageError(
            "--add-special-tokens is not supported with --task preference. Train the tokens with "
            "--task chat first. Then prepare the pairs with that run as --model."
        )
    length = args.sequence_length or SEQUENCE_LENGTH
    group = args.group_column
    options = sample_options(args)
    shaping = [args.source, str(length), template.sha256(), str(args.skip_bad)]
    shaping += options.shaping()
    shaping += [group] if group is not None else []
    settings = prepare_settings(
        args, tokenizer, val_fraction=None, shaping=("preference", *shaping)
    )
    tokens = SampleTokenizer(tokenizer, tokenizer_check(settings, quiet=args.quiet))
    return PreferenceJob(
        rows,
        settings,
        template,
        tokens,
        options,
        length=length,
        groups=Groups(group),
        sketches=RowSketches(is_needed=args.dedup == "near"),
    )


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The two conversations of a row as text, and the character ranges of the answers."""

    row: Row
    group: int
    both: tuple[RenderedSample, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The tokens of the chosen and the rejected conversation. `trained` marks the answer tokens."""

    row: int
    """Index of the row."""
    group: int
    """Number of the pair's group, or of its row if there are no groups. The number decides whether
    the pair is for validation."""
    tokens: tuple[npt.NDArray[np.uint32], ...]
    trained: tuple[npt.NDArray[np.bool_], ...]


@dataclass(slots=True)
class PreferenceJob:
    """One prepare run, from rows to the arrays of the folder."""

    rows: Rows
    settings: PrepareSettings
    template: ChatTemplate
    tokenizer: SampleTokenizer
    options: SampleOptions
    length: int = field(kw_only=True)
    groups: Groups = field(kw_only=True)
    sketches: RowSketches = field(kw_only=True)
    truncated: int = 0
    truncated_tokens: int = 0

    def make(self) -> PreparedData:
        """Read, render and tokenize all rows. Raises DataError."""
        pairs = self._pairs()
        selected = self._select(pairs)
        files: dict[str, npt.NDArray[Any]] = {}
        fields: dict[str, Any] = {"text_bytes": self.tokenizer.text_bytes, "task": "preference"}
        trained: dict[str, int] = {}
        for name, prefix, is_val in ((TRAIN_NAME, "train", False), (VAL_NAME, "val", True)):
            mine = [pairs[index] for index in selected.numbers(is_val=is_val)]
            if not mine:
                raise DataError(
                    f"the split leaves no pair for "
                    f"{'training' if prefix == 'train' else 'validation'} (pairs in all: "
                    f"{len(pairs):,}). Change --val-fraction."
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
            pad_token=pad_token(self.tokenizer.tokenizer),
            thoughts=self.options.thoughts,
            literal_samples=self.tokenizer.literal_samples,
            unescaped_samples=self.tokenizer.unescaped_samples,
            **trained,
        )
        fields["selection"] = selected.record
        return PreparedData(
            files=files,
            split=selected.split,
            fields=fields,
            encoder=self.tokenizer.tokenizer.reference_name,
            notes=selected.notes(),
        )

    def _select(self, pairs: Sequence[_Pair]) -> RowSelection:
        """Return how often each pair is trained on. Equal pairs have the same tokens and marks."""
        keys = keys_of(
            key_of(*(key_of(part.data) for part in (*pair.tokens, *pair.trained))) for pair in pairs
        )
        rows, units = (
            np.array([getattr(pair, name) for pair in pairs], dtype=np.int64)
            for name in ("row", "group")
        )
        return select_rows(
            self.sketches.join(equal_groups(keys), rows),
            self.rows.inputs_of(rows),
            split_by_units(self.settings.split, self.groups.survey(self.rows), units),
            self.settings.mixing,
        )

    def _pairs(self) -> list[_Pair]:
        """Return every pair, truncated to the sequence length."""
        self.template.require_stop(self.options.variables)
        rows = islice(self.rows.read(), self.settings.max_documents)
        found: list[_Pair] = []
        rendered = map(self._render, rows)
        for batch in in_batches(
            rendered, count=_BATCH_SIZE, chars=lambda each: sum(len(one.text) for one in each.both)
        ):
            found += self._tokenize(batch)
        self.tokenizer.check.finish()
        if not found:
            self.rows.require_some()
            raise DataError(
                f"no pair of answers in {self.rows.label}: {self.rows.num_rows:,} rows, "
                f"{len(self.rows.skipped):,} of them bad. Check the columns prompt, chosen and "
                "rejected."
            )
        return found

    def _render(self, row: Row) -> _Rendered | None:
        try:
            pair = preference_of(row.values)
            both = tuple(
                self._answer(pair, each, name)
                for name, each in zip(ANSWERS, (pair.chosen, pair.rejected), strict=True)
            )
        except UntrainedRowError as error:
            self.rows.leave_out(str(error))
            return None
        except (BadConversationError, DataError) as error:
            self.rows.skip(row.where, str(error))
            return None
        unread = unread_columns(row.values, [*COLUMNS, *self.groups.columns()])
        self.rows.note_unread(unread, row.values)
        faults = list[str]()
        for answer in (pair.chosen, pair.rejected):
            faults += tool_faults([*pair.prompt, *answer], pair.tools)
            trained = [each["role"] == "assistant" for each in answer]
            faults += empty_answers(answer, trained, self.options)
        self.rows.note_faults(dict.fromkeys(faults), row.where)
        self.sketches.add(row.number, message_texts([*pair.prompt, *pair.chosen, *pair.rejected]))
        return _Rendered(row, self.groups.number_of(row), both)

    def _answer(self, pair: Preference, answer: Sequence[Message], name: str) -> RenderedSample:
        """Return the rendered conversation. Its spans are the assistant's texts in the answer."""
        trained = [each["role"] == "assistant" for each in answer]
        conversation = Conversation(
            messages=(*pair.prompt, *answer),
            trained=(*[False] * len(pair.prompt), *trained),
            tools=pair.tools,
            documents=pair.documents,
            variables=pair.variables,
        )
        samples = render_samples(self.template, conversation, self.options)
        if len(samples) > 1:
            raise DataError(
                f"{name} has {len(samples)} turns that the template renders differently when later "
                "turns follow. A pair can hold only one of them. Train only the last turn: "
                "--train-on last."
            )
        return samples[0]

    def _tokenize(self, rendered: list[_Rendered]) -> list[_Pair]:
        samples = [each for row in rendered for each in row.both]
        tokenized = iter(self.tokenizer.tokens(samples))
        found = []
        for each in rendered:
            both = next(tokenized), next(tokenized)
            pair = _Pair(
                each.row.number,
                each.group,
                tuple(tokens for tokens, _ in both),
                tuple(marks for _, marks in both),
            )
            if self._is_comparable(pair, each.row):
                found.append(self._truncate(pair))
        return found

    def _is_comparable(self, pair: _Pair, row: Row) -> bool:
        """Return True if both answers have trained tokens and differ. Otherwise, skip the row.

        Raises DataError if the user did not allow skipping.
        """
        length = self.length
        for name, trained in zip(ANSWERS, pair.trained, strict=True):
            if not trained.any():
                self.rows.skip(
                    row.where,
                    f"{name} has no trained token: the template renders no text of the assistant. "
                    "Write an answer, or check the template.",
                )
                return False
            prompt = int(trained.argmax())
            if prompt >= length:
                self.rows.skip(
                    row.where,
                    f"the prompt has {prompt:,} tokens, which leaves no room for the answer in "
                    f"--sequence-length {length}. Raise --sequence-length.",
                )
                return False
        one, other = (tokens[:length] for tokens in pair.tokens)
        if np.array_equal(one, other):
            self.rows.skip(
                row.where,
                f"chosen and rejected have the same first {len(one):,} tokens. Raise "
                f"--sequence-length {length}, or correct an answer.",
            )
            return False
        return True

    def _truncate(self, pair: _Pair) -> _Pair:
        beyond = [max(0, len(tokens) - self.length) for tokens in pair.tokens]
        self.truncated += sum(each > 0 for each in beyond)
        self.truncated_tokens += sum(beyond)
        return _Pair(
            pair.row,
            pair.group,
            tuple(each[: self.length] for each in pair.tokens),
            tuple(each[: self.length] for each in pair.trained),
        )
