"""Runs `prepare --task classify`: tokenizes labelled texts, and splits each label's texts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.data.selection.content_keys import equal_groups, key_of, keys_of
from payload.data.selection.select_rows import RowSelection, select_rows
from payload.data.sources.source_flags import DEFAULT_TEXT_COLUMN
from payload.data.sources.split import Split
from payload.data.tasks.arguments import (
    DEFAULT_LABEL_COLUMN,
    prepare_settings,
    source_request,
    tokenizer_check,
)
from payload.data.tasks.label_notes import label_notes
from payload.data.tasks.row_sketches import RowSketches
from payload.data.tokenizers.special_tokens import named_tokens, tokenizer_config
from payload.formats.data_folder import (
    EXAMPLES_NAMES,
    MOST_NAME_TOKENS,
    TRAIN_NAME,
    VAL_NAME,
    ClassifyRecord,
    SplitRecord,
)

if TYPE_CHECKING:
    from payload.data.rows.rows import Row, Rows
    from payload.data.tasks.whole_folder_writer import PreparedData
    from payload.data.tokenizers.base import TextTokenizer, Tokens
    from payload.data.writing.plan import PrepareSettings
    from payload.data.writing.tokenizer_check import TokenizerCheck

_VAL_FRACTION = 0.1
_BATCH_SIZE = 4096
"""Number of texts that are tokenized together."""
_SHOWN = 8
_NAME_PREFIX = "label:"
"""Text that precedes a label's name when the name's tokens are determined."""


def classify_job(args: argparse.Namespace) -> _ClassifyJob:
    """Return the job that the command line describes. Raises UsageError, DataError."""
    from payload.data.rows.column_choice import choice_lines, first_row_columns, labelled_columns
    from payload.data.rows.open_rows import open_rows
    from payload.data.tokenizers import load_tokenizer
    from payload.data.writing.progress import Reporter

    request = source_request(args)
    text_column, label_column = args.text_column, args.label_column
    if text_column is None or label_column is None:
        columns = first_row_columns(request)
        found = labelled_columns(columns, text=text_column, label=label_column)
        text_column, label_column = (
            found[0] or DEFAULT_TEXT_COLUMN,
            found[1] or DEFAULT_LABEL_COLUMN,
        )
    chosen = ((text_column, DEFAULT_TEXT_COLUMN), (label_column, DEFAULT_LABEL_COLUMN))
    for line in choice_lines(chosen):
        Reporter(quiet=args.quiet).log(line)
    if text_column == label_column:
        raise UsageError(
            f"--text-column and --label-column are both {text_column!r}. Use two different columns."
        )
    names = label_map(args.label_map)
    rows = open_rows(request)
    shaping = ("classify", args.source, text_column, label_column, json.dumps(names))
    settings = prepare_settings(
        args,
        load_tokenizer(args.tokenizer, args.add_special_tokens),
        val_fraction=_VAL_FRACTION,
        shaping=(*shaping, str(args.skip_bad)),
    )
    return _ClassifyJob(
        rows,
        settings,
        tokenizer_check(settings, quiet=args.quiet),
        text_column=text_column,
        label_column=label_column,
        names=names,
        has_class_weights=args.has_class_weights,
    )


def label_map(entries: Sequence[str] | None) -> dict[str, str] | None:
    """Return the label of each value in --label-map. Rows with an empty label are skipped.

    Raises UsageError.
    """
    if entries is None:
        return None
    found: dict[str, str] = {}
    for entry in map(_as_utf8, entries):
        values, equals, label = entry.rpartition("=")
        for value in values.split(","):
            if not equals or not value.strip() or value.strip() in found:
                problem = "repeated" if value.strip() in found else "not VALUES=LABEL"
                raise UsageError(
                    f"--label-map {shown(entry)}: {shown(value)} is {problem}. Write each value "
                    "once, as in 1,2=negative 4,5=positive."
                )
            found[value.strip()] = label.strip()
    return found


@dataclass(frozen=True, slots=True)
class _Text:
    """The tokens of one text, its label, and the index of its row."""

    tokens: Tokens
    label: str
    number: int


class _TextSplit:
    """A split of the texts by their indices. The class has the interface of `Split`."""

    def __init__(self, record: SplitRecord, is_val: npt.NDArray[np.bool_]) -> None:
        self.record = record
        self._is_val = is_val

    def val_mask(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return the mask of the validation texts among `numbers`."""
        return self._is_val[numbers]


class _ClassifyJob:
    """One prepare run, from rows to the arrays of the folder."""

    def __init__(
        self,
        rows: Rows,
        settings: PrepareSettings,
        check: TokenizerCheck,
        *,
        text_column: str,
        label_column: str,
        names: dict[str, str] | None,
        has_class_weights: bool,
    ) -> None:
        self.rows = rows
        self.settings = settings
        self._check = check
        self._text_column = text_column
        self._label_column = label_column
        self._names = names
        self._has_class_weights = has_class_weights
        self._text_bytes = 0
        self._sketches = RowSketches(is_needed=settings.mixing.dedup == "near")

    def make(self) -> PreparedData:
        """Read and tokenize all texts. Raises DataError."""
        from payload.data.tasks.whole_folder_writer import PreparedData

        texts = self._texts()
        labels = self._labels(texts)
        number_of = {label: number for number, label in enumerate(labels)}
        numbers = np.array([number_of[each.label] for each in texts], dtype=np.int64)
        selected = self._select(texts, numbers)
        for part, is_val in (("training", False), ("validation", True)):
            self._require_labels(numbers[selected.numbers(is_val=is_val)], labels, part=part)
        files: dict[str, npt.NDArray[Any]] = {}
        fields: dict[str, Any] = {"text_bytes": self._text_bytes, "task": "classify"}
        counts: dict[str, tuple[int, ...]] = {}
        for name, prefix, is_val in ((TRAIN_NAME, "train", False), (VAL_NAME, "val", True)):
            chosen = selected.numbers(is_val=is_val)
            mine = [texts[index].tokens for index in chosen]
            ends = np.cumsum([len(each) for each in mine], dtype=np.int64)
            files[name] = np.concatenate(mine).astype(self.settings.dtype())
            files[EXAMPLES_NAMES[name]] = np.stack((ends, numbers[chosen]), axis=1)
            fields |= {f"{prefix}_tokens": int(ends[-1]), f"{prefix}_documents": len(mine)}
            found = np.bincount(numbers[chosen], minlength=len(labels))
            counts[f"{prefix}_counts"] = tuple(found.tolist())
        fields["classify"] = ClassifyRecord(
            labels=labels,
            pad_token=pad_token(self.settings.tokenizer),
            label_tokens=label_name_tokens(self.settings.tokenizer, labels),
            **counts,
        )
        fields["selection"] = selected.record
        return PreparedData(
            files=files,
            split=selected.split,
            fields=fields,
            encoder=self.settings.tokenizer.reference_name,
            notes=(
                *selected.notes_on_both(),
                *label_notes(
                    [each.tokens.tobytes() for each in texts],
                    numbers,
                    selected.is_val,
                    selected.copies,
                    labels=labels,
                    is_split_by_files=selected.split.record.method == "files",
                    is_deduplicated=self.settings.mixing.dedup in ("exact", "near"),
                    has_class_weights=self._has_class_weights,
                    val_fraction=selected.split.record.val_fraction,
                ),
            ),
        )

    def _select(self, texts: Sequence[_Text], labels: npt.NDArray[np.int64]) -> RowSelection:
        """Return how often each text is trained on. Texts with the same tokens count as equal."""
        rows = np.array([each.number for each in texts], dtype=np.int64)
        groups = equal_groups(keys_of(key_of(each.tokens.data) for each in texts))

        def split_texts(chosen: npt.NDArray[np.int64]) -> tuple[Split, npt.NDArray[np.bool_]]:
            some = [texts[index] for index in chosen]
            split = self._split(some, labels[chosen])
            return split, split.val_mask(np.arange(len(some)))

        return select_rows(
            self._sketches.join(groups, rows),
            self.rows.inputs_of(rows),
            split_texts,
            self.settings.mixing,
            classes=labels,
        )

    def _require_labels(
        self, numbers: npt.NDArray[np.int64], labels: Sequence[str], *, part: str
    ) -> None:
        """Raise DataError if a label has no text in `part`, for example after --dedup."""
        missing = set(range(len(labels))) - set(numbers.tolist())
        if missing:
            raise DataError(
                f"{self.rows.label}: no {part} text with the label {labels[min(missing)]!r} is "
                "left. Merge labels with --label-map, leave out --dedup, or raise the weights."
            )

    def _split(self, texts: Sequence[_Text], labels: npt.NDArray[np.int64]) -> _TextSplit:
        """Return the split that file names define, or otherwise a split of each label's texts.

        Raises DataError for a label that the training files or the validation files lack.
        """
        settings = self.settings
        survey = self.rows.survey()
        if survey.split is None:
            fraction = settings.val_fraction or _VAL_FRACTION
            record = SplitRecord(method="stratified", val_fraction=fraction, seed=settings.seed)
            is_val = stratified(labels, val_fraction=fraction, seed=settings.seed)
            return _TextSplit(record, is_val)
        is_default = settings.val_fraction == _VAL_FRACTION
        chosen = replace(settings, val_fraction=None if is_default else settings.val_fraction)
        split = chosen.split(survey)
        is_val = split.val_mask(np.array([each.number for each in texts], dtype=np.int64))
        for part, mask in (("training", ~is_val), ("validation", is_val)):
            missing = set(labels.tolist()) - set(labels[mask].tolist())
            if missing:
                label = texts[int(np.flatnonzero(labels == min(missing))[0])].label
                raise DataError(
                    f"{self.rows.label}: no text of the {part} files has the label {label!r}. "
                    "Add texts, merge labels with --label-map, or pass only the training files."
                )
        return _TextSplit(split.record, is_val)

    def _texts(self) -> list[_Text]:
        """Return all labelled texts."""
        from payload.data.rows.rows import in_batches

        rows = islice(self.rows.read(), self.settings.max_documents)
        found: list[_Text] = []
        labelled = map(self._labelled, rows)
        for pairs in in_batches(labelled, count=_BATCH_SIZE, chars=lambda pair: len(pair[0])):
            self._text_bytes += sum(len(text) for text, _, _ in pairs)
            encoded = self._tokenize([text for text, _, _ in pairs])
            for text, _, number in pairs:
                self._sketches.add(number, iter([text.decode()]))
            found += [
                _Text(tokens, label, number)
                for tokens, (_, label, number) in zip(encoded, pairs, strict=True)
            ]
        self._check.finish()
        if not found:
            self.rows.require_some()
            raise DataError(
                f"no labelled text in {self.rows.label}: {self.rows.num_rows:,} rows, "
                f"{len(self.rows.skipped):,} of them bad. Check --text-column and --label-column."
            )
        return found

    def _tokenize(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Tokenize texts, check the tokens, and return the tokens of each text."""
        tokenizer = self.settings.tokenizer
        rows = tokenizer.encode_texts(texts) if texts else []
        self._check.add_rows(texts, rows)
        return [with_special_tokens(tokenizer, row) for row in rows]

    def _labelled(self, row: Row) -> tuple[bytes, str, int] | None:
        """Return the text, label and index of a row; None for a skipped row."""
        for column, flag in (
            (self._text_column, "--text-column"),
            (self._label_column, "--label-column"),
        ):
            if column not in row.values:
                keys = ", ".join(shown(key) for key in list(row.values)[:_SHOWN]) or "none"
                raise DataError(
                    f"{row.where}: no column {column!r}; its columns: {keys}. Choose one with "
                    f"{flag}."
                )
        text, label = row.values[self._text_column], label_of(row.values[self._label_column])
        if not isinstance(text, str) or not text:
            what = "empty" if text in ("", None) else f"{type(text).__name__}, not text"
            self.rows.skip(row.where, f"{self._text_column!r} is {what}.")
            return None
        if label is None:
            given = shown(row.values[self._label_column])
            self.rows.skip(row.where, f"{self._label_column!r} is {given}, not a name or number.")
            return None
        if self._names is not None:
            if label not in self._names:
                self.rows.skip(row.where, f"label {label!r} is not in --label-map.")
                return None
            label = self._names[label]
            if not label:
                return None
        return text.encode("utf-8", "replace"), label, row.number

    def _labels(self, texts: Sequence[_Text]) -> tuple[str, ...]:
        """Return the labels in order. Raises DataError if a label has too few texts."""
        counts: dict[str, int] = {}
        for text in texts:
            counts[text.label] = counts.get(text.label, 0) + 1
        if len(counts) < 2:
            raise DataError(
                f"{self.rows.label}: every text has the label {next(iter(counts))!r}. A classifier "
                "needs two or more labels. Check --label-column and --label-map."
            )
        alone = [label for label, count in counts.items() if count < 2]
        if alone:
            others = f" and {len(alone) - 1:,} more have" if len(alone) > 1 else " has"
            raise DataError(
                f"{self.rows.label}: label {alone[0]!r}{others} only one text, which leaves none "
                "for validation. Add texts, or merge labels with --label-map."
            )
        if self._names is not None:
            return tuple(label for label in dict.fromkeys(self._names.values()) if label in counts)
        return tuple(sorted(counts, key=_label_order))


def tokenize(tokenizer: TextTokenizer, texts: Sequence[bytes]) -> list[Tokens]:
    """Return the tokens of each text, as the tokenizer in transformers would."""
    return (
        [with_special_tokens(tokenizer, row) for row in tokenizer.encode_texts(texts)]
        if texts
        else []
    )


def with_special_tokens(tokenizer: TextTokenizer, tokens: Tokens) -> Tokens:
    """Add the tokenizer's special tokens before and after a text's tokens.

    If the result is empty, return the end token.
    """
    before, after = (np.array(each, dtype=np.uint32) for each in (tokenizer.begin, tokenizer.after))
    whole = np.concatenate((before, tokens, after))
    return whole if len(whole) else np.array(tokenizer.end[-1:], dtype=np.uint32)


def label_name_tokens(
    tokenizer: TextTokenizer, labels: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each label's name; () if a name has no tokens.

    A name is encoded after a prefix, and cut to `MOST_NAME_TOKENS` tokens.
    """
    # Llama 2's tokenizer puts a space before a text, so " name" without a prefix would begin with
    # two spaces.
    word = tokenizer.encode_one(_NAME_PREFIX.encode())
    prefixed, alone = (
        tokenizer.encode_texts([f"{before} {label}".encode() for label in labels])
        for before in (_NAME_PREFIX, "")
    )
    # If a tokenizer merges the end of the prefix with the space, the name is encoded without the
    # prefix.
    found = [
        long[len(word) :] if np.array_equal(long[: len(word)], word) else short
        for long, short in zip(prefixed, alone, strict=True)
    ]
    if not all(map(len, found)):
        return ()
    return tuple(tuple(each[:MOST_NAME_TOKENS].tolist()) for each in found)


def pad_token(tokenizer: TextTokenizer) -> int:
    """Return the padding token of the tokenizer, or its end-of-document token."""
    from payload.data.tokenizers.hf import HfTokenizer

    if isinstance(tokenizer, HfTokenizer):
        config = tokenizer_config(tokenizer.files, folder=Path(tokenizer.name))
        named = named_tokens(config).get("pad_token")
        found = None if named is None else tokenizer.backend.token_to_id(named)
        if found is not None:
            return found
    return tokenizer.end[-1]


def stratified(
    labels: npt.NDArray[np.int64], *, val_fraction: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Return the mask of the validation texts: a fraction of each label, at least one text."""
    is_val = np.zeros(len(labels), dtype=np.bool_)
    for label in range(int(labels.max()) + 1):
        mine = np.flatnonzero(labels == label)
        count = min(len(mine) - 1, max(1, round(val_fraction * len(mine))))
        chosen = np.random.default_rng([seed, label]).permutation(len(mine))[:count]
        is_val[mine[chosen]] = True
    return is_val


def label_of(value: object) -> str | None:
    """Return the label name of a column's value, or None for a value that cannot be a label."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value.strip():
        return _as_utf8(value.strip())
    return None


def _as_utf8(text: str) -> str:
    """Replace lone surrogates by question marks, because meta.json is UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _label_order(label: str) -> tuple[float, str]:
    """Return a sort key: labels that are numbers come first, by value, then the other labels."""
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label
