"""The plan of a prepare run: its settings, limits, estimates and folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from payload.core.errors import DataError, UsageError
from payload.core.files import free_bytes
from payload.core.printable_text import shown
from payload.data.selection.select_rows import Mixing
from payload.data.sources.documents import MIB, Batch, Source, Survey, limit
from payload.data.sources.split import (
    NANOGPT_VAL_FRACTION,
    Split,
    choose_split,
    default_val_fraction,
)
from payload.data.tokenizers.base import TextTokenizer
from payload.data.tokenizers.special_tokens import (
    read_tokenizer_config,
    special_tokens,
    tokenizer_config,
)
from payload.data.writing.document_selection import select_documents
from payload.data.writing.encoder_choice import Encoded, choose_encoder
from payload.data.writing.meta import check_tokenizer_files
from payload.data.writing.resumable_token_files import (
    JOURNAL_NAME,
    remove_unfinished,
    unfinished_fingerprint,
)
from payload.formats.data_folder import (
    META_NAME,
    TRAIN_NAME,
    VAL_NAME,
    DataMeta,
    TokenDtype,
    load_meta,
    token_dtype,
)

SHARD_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """All settings of a prepare run except the source."""

    out: Path
    tokenizer: TextTokenizer
    val_fraction: float | None
    """Fraction of the documents for validation; None means `default_val_fraction`."""
    seed: int
    max_documents: int | None = None
    """Limit on the number of documents, counted from the start of the source."""
    force: bool = False
    """Replace the output that an earlier run left in the folder."""
    wait: bool = False
    """Wait if another run is writing to the folder, instead of failing."""
    shard_bytes: int = SHARD_BYTES
    """Number of bytes of output after which the progress is saved."""
    mixing: Mixing
    """Weights of the inputs, and the removal of duplicates."""
    allow_odd_tokenizer: bool = False
    """Continue if the tokens do not seem to represent the text."""
    shaping: tuple[str, ...] = ()
    """Further values on which the output depends. The fingerprint also covers these values."""

    def dtype(self) -> TokenDtype:
        """Return the dtype of the tokens in the files."""
        return token_dtype(self.tokenizer.vocab_size)

    def token_bytes(self) -> int:
        """Return the size of a token in the files, in bytes."""
        return int(np.dtype(self.dtype()).itemsize)

    def split(self, survey: Survey) -> Split:
        """Return the split of the documents into training and validation. Raises DataError."""
        if survey.split is not None:
            if self.val_fraction is not None:
                raise UsageError(survey.split.conflict("--val-fraction"))
            return survey.split
        fraction = self.val_fraction
        if fraction is None:
            fraction = default_val_fraction(survey.documents)
        return choose_split(documents=survey.documents, val_fraction=fraction, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated sizes of a run, from the size of the source and its first batch."""

    documents: int | None
    text_bytes: int | None
    tokens: int | None
    need_bytes: int | None
    free_bytes: int
    note: str | None


def estimate(source: Source, settings: PrepareSettings) -> Estimate:
    """Estimate the output from the source's size and first batch. Nothing is written.

    Raises DataError.
    """
    source.identity()
    survey = limited(source.survey(), settings.max_documents)
    selected = select_documents(
        source,
        survey,
        settings.mixing,
        choose_split=settings.split,
        max_documents=settings.max_documents,
    )
    if selected is None:
        settings.split(survey)
    else:
        survey = selected.survey(survey)
    batches = limit(source.batches({}), settings.max_documents)
    first = next(batches, Batch())
    tokenizer = settings.tokenizer
    encoder = choose_encoder(tokenizer, seed=settings.seed, log=lambda note: None)
    tokens = expected_tokens(survey, first, encoder.encode(first.pieces), tokenizer)
    return Estimate(
        documents=survey.documents,
        text_bytes=survey.text_bytes,
        tokens=tokens,
        need_bytes=None if tokens is None else tokens * settings.token_bytes(),
        free_bytes=free_bytes(settings.out),
        note="; ".join(
            [
                *([] if survey.note is None else [survey.note]),
                *([] if selected is None else selected.rows.lines()),
            ]
        )
        or None,
    )


def limited(survey: Survey, max_documents: int | None) -> Survey:
    """Return the survey of a source limited to `max_documents`."""
    if max_documents is None or (survey.documents or max_documents) <= max_documents:
        if survey.documents is not None or max_documents is None:
            return survey
        return Survey(documents=None, text_bytes=None, note=survey.note)
    assert survey.documents is not None
    share = max_documents / survey.documents
    text_bytes = None if survey.text_bytes is None else int(survey.text_bytes * share)
    return replace(survey, documents=max_documents, text_bytes=text_bytes)


def expected_tokens(
    survey: Survey, batch: Batch, encoded: Encoded, tokenizer: TextTokenizer
) -> int | None:
    """Estimate the source's tokens from its first batch; None if the source's size is unknown."""
    num_around = len(tokenizer.begin) + len(tokenizer.end)
    in_batch = len(encoded.tokens) + sum(batch.ends) * num_around
    if survey.text_bytes is not None and batch.text_bytes:
        return int(survey.text_bytes * in_batch / batch.text_bytes)
    if survey.documents is not None and any(batch.ends):
        return int(survey.documents * in_batch / sum(batch.ends))
    return None


def fingerprint_of(identity: Sequence[Any], settings: PrepareSettings) -> str:
    """Return the SHA-256 of the source's identity and of all settings that change the output."""
    shaping: list[Any] = [
        identity,
        settings.val_fraction,
        settings.seed,
        settings.max_documents,
        list(settings.shaping),
        settings.tokenizer.fingerprint,
    ]
    return hashlib.sha256(json.dumps(shaping).encode()).hexdigest()


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Make `out` and its parents. On exit, remove `out` if it is new and still empty.

    Raises DataError.
    """
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DataError(
            f"--out {out}: the path or a parent folder is a file. Choose another folder."
        ) from None
    except OSError as error:
        raise DataError(f"--out {out}: {error.strerror}. Choose another folder.") from None
    try:
        yield
    finally:
        if not existed and not any(out.iterdir()):
            out.rmdir()


def check_folder(settings: PrepareSettings, identity: Sequence[Any]) -> DataMeta | None:
    """Return the meta.json of a folder that already has this output, or None if the output must be
    made.

    Raises DataError.
    """
    out = settings.out
    check_tokenizer_files(out, settings.tokenizer.files)
    if settings.force:
        remove_unfinished(out)
        return None
    unfinished = unfinished_fingerprint(out)
    if unfinished == fingerprint_of(identity, settings):
        return None
    if unfinished is not None:
        raise DataError(
            f"{out}: holds an unfinished run with another source or other settings. Choose another "
            "--out, finish that run with the command that started it, without --force, or replace "
            "the output with --force."
        )
    if (out / META_NAME).exists():
        meta = load_meta(out)
        if meta.fingerprint in _fingerprints_of_same(meta, settings, identity):
            _require_same_special_tokens(meta, settings)
            return meta
        raise DataError(
            f"{out}: holds data made from another source or with other settings. Made from "
            f"{meta.source} with tokenizer {meta.tokenizer}, "
            f"{meta.train_documents + meta.val_documents:,} documents, "
            f"--val-fraction {meta.split.val_fraction:g}, --seed {meta.split.seed}"
            f"{', --skip-bad' if meta.skipped_documents else ''}. Choose another --out, or "
            "replace the data with --force."
        )
    for name in (TRAIN_NAME, VAL_NAME):
        if (out / name).exists():
            raise DataError(
                f"{out / name}: exists without {META_NAME} and {JOURNAL_NAME}, so this command did "
                "not write it. Choose another --out, or replace the file with --force."
            )
    return None


def _require_same_special_tokens(meta: DataMeta, settings: PrepareSettings) -> None:
    """Raise DataError if the folder's special tokens differ from the special tokens of the
    tokenizer.

    The special tokens matter because a chat template writes them into the text, and because padding
    is one of them.
    """
    if not meta.tokenizer_files:
        return
    config = tokenizer_config(settings.tokenizer.files, folder=Path(settings.tokenizer.name))
    now, was = special_tokens(config), special_tokens(read_tokenizer_config(settings.out))
    name = next((each for each in {**was, **now} if was.get(each) != now.get(each)), None)
    if name is not None:
        raise DataError(
            f"{settings.out}: holds data made with {name} = {shown(was.get(name))}, but the "
            f"tokenizer {settings.tokenizer.name} now has {shown(now.get(name))}. Choose another "
            "--out, or replace the data with --force."
        )


def _fingerprints_of_same(
    meta: DataMeta, settings: PrepareSettings, identity: Sequence[Any]
) -> set[str]:
    """Return the fingerprints of `settings` with each val_fraction that gives the folder's
    split."""
    requested, used = settings.val_fraction, meta.split.val_fraction
    shares = {requested}
    if requested == used:
        shares.add(None)
    if requested is None and used == NANOGPT_VAL_FRACTION:
        # This share was the default for every source before `default_val_fraction`.
        shares.add(used)
    return {fingerprint_of(identity, replace(settings, val_fraction=share)) for share in shares}
