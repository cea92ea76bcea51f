"""Writes a data folder with files that are made after all rows were read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from payload.core.errors import DataError
from payload.core.files import free_bytes, fsync_folder
from payload.data.rows.rows import Rows
from payload.data.selection.select_rows import describe_selection
from payload.data.sources.split import Split
from payload.data.writing.meta import write_meta, write_tokenizer
from payload.data.writing.plan import (
    Estimate,
    PrepareSettings,
    check_folder,
    fingerprint_of,
    new_folder,
)
from payload.data.writing.prepare_text import PrepareResult, warn_if_few
from payload.data.writing.progress import Reporter
from payload.data.writing.resumable_token_files import (
    GrowingFile,
    locked,
    partial_path,
    remove_unfinished,
    writing_to,
)
from payload.data.writing.write import EXAMPLES_KEPT
from payload.formats.data_folder import META_NAME, DataFile, DataMeta


@dataclass(frozen=True, slots=True)
class Chunks:
    """An array that may not fit into memory, and is therefore made in parts."""

    nbytes: int
    make: Callable[[], Iterator[npt.NDArray[Any]]]
    """Yields the parts in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Contents of a data folder: the arrays and counts that a task made from the rows."""

    files: Mapping[str, npt.NDArray[Any] | Chunks]
    """The array of each file by the file's name, in the dtype of the file."""
    split: Split
    fields: Mapping[str, Any]
    """Values of DataMeta: the counts of tokens, documents and bytes, the task and its record."""
    encoder: str
    """Name and version of the package that encoded the tokens."""
    notes: tuple[str, ...] = ()
    """Messages about the data, such as duplicates."""
    temporary_bytes: int = 0
    """Size of temporary files, which the run removes when it is complete."""
    tokenizer_files: Mapping[str, bytes] | None = None
    """Tokenizer files that replace the tokenizer's own files, if the task changes them."""


class WholeJob(Protocol):
    """A prepare run that makes the arrays after all rows were read."""

    @property
    def rows(self) -> Rows:
        """The rows to read."""

    @property
    def settings(self) -> PrepareSettings:
        """The settings of the command line."""

    def make(self) -> PreparedData:
        """Return the arrays of the data folder, and values for meta.json. Raises DataError."""


def estimate_whole(job: WholeJob) -> tuple[str, Estimate]:
    """Return the source's label and exact sizes. This does all the work except writing."""
    job.rows.identity()
    made = job.make()
    job.rows.require_read()
    selection = made.fields.get("selection")
    counts = [] if selection is None else describe_selection(selection)
    return job.rows.label, Estimate(
        documents=made.fields["train_documents"] + made.fields["val_documents"],
        text_bytes=made.fields["text_bytes"],
        tokens=made.fields["train_tokens"] + made.fields["val_tokens"],
        need_bytes=made.temporary_bytes + sum(each.nbytes for each in made.files.values()),
        free_bytes=free_bytes(job.settings.out),
        note="; ".join(
            each.removeprefix("note: ").removesuffix(".")
            for each in (*job.rows.notes(), *counts, *made.notes)
        )
        or None,
    )


def prepare_whole(
    rows: Rows, settings: PrepareSettings, reporter: Reporter, make: Callable[[str], PreparedData]
) -> PrepareResult:
    """Make the data folder from rows, if it does not hold this data yet. Raises DataError.

    `make` receives the fingerprint of the source and the settings, and uses it to find the files of
    an interrupted run to resume.
    """
    reporter.log(f"source: {rows.label}")
    started_s = time.monotonic()
    try:
        identity = rows.identity()
        for line in rows.recognised():
            reporter.log(line)
        with new_folder(settings.out), locked(settings.out, wait=settings.wait):
            ready = check_folder(settings, identity)
            if ready is None:
                fingerprint = fingerprint_of(identity, settings)
                made = make(fingerprint)
                rows.require_read()
                meta = _write_all(rows, settings, fingerprint, made)
                for note in (*rows.notes(), *made.notes):
                    reporter.log(note)
                warn_if_few(meta, reporter)
                worked_s = time.monotonic() - started_s
                return PrepareResult(meta=meta, was_ready=False, worked_s=worked_s)
    except OSError as error:
        raise DataError(f"{error.filename or rows.label}: {error.strerror or error}.") from None
    reporter.log(
        f"{settings.out} already holds this data; nothing to do (--force prepares the data again)"
    )
    return PrepareResult(meta=ready, was_ready=True)


def _write_all(
    rows: Rows, settings: PrepareSettings, fingerprint: str, made: PreparedData
) -> DataMeta:
    """Write the files, then meta.json."""
    out, tokenizer = settings.out, settings.tokenizer
    files = tokenizer.files if made.tokenizer_files is None else made.tokenizer_files
    with writing_to(out):
        (out / META_NAME).unlink(missing_ok=True)
        meta = DataMeta(
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            tokenizer_pipeline_sha256=tokenizer.pipeline_sha256,
            tokenizer_files=write_tokenizer(out, files),
            vocab_size=tokenizer.vocab_size,
            added_tokens=tokenizer.added,
            end_of_text=tokenizer.end[-1],
            dtype=settings.dtype(),
            source=rows.label,
            revision=rows.revision,
            fingerprint=fingerprint,
            split=made.split.record,
            encoder=made.encoder,
            skipped_documents=rows.num_skipped,
            skipped_examples=rows.skipped[:EXAMPLES_KEPT],
            files={name: _write(out, name, values) for name, values in made.files.items()},
            **made.fields,
        )
        write_meta(out, meta)
    remove_unfinished(out)
    return meta


def _write(folder: Path, name: str, values: npt.NDArray[Any] | Chunks) -> DataFile:
    """Write a file atomically. Return its size and hashes."""
    file = GrowingFile(folder, name, keep_bytes=0)
    partial = partial_path(folder, name)
    try:
        for part in values.make() if isinstance(values, Chunks) else (values,):
            file.append(part.astype(part.dtype.newbyteorder("<"), copy=False))
        file.sync()
        partial.replace(folder / name)
    finally:
        file.close()
        partial.unlink(missing_ok=True)
    fsync_folder(folder)
    return file.describe(with_ranges=True)
