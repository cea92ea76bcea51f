"""Runs `python -m payload.data prepare` for the task `text`."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from payload.core.errors import DataError
from payload.core.files import free_bytes
from payload.data.sources.documents import Batch, Source, Survey, limit, prefetch
from payload.data.sources.split import Split, more_validation
from payload.data.writing.document_selection import DocumentSelection, select_documents
from payload.data.writing.encoder_choice import (
    Encoded,
    Encoder,
    EncoderMismatchError,
    ReferenceEncoder,
    choose_encoder,
)
from payload.data.writing.meta import write_meta, write_tokenizer
from payload.data.writing.plan import (
    PrepareSettings,
    check_folder,
    expected_tokens,
    fingerprint_of,
    limited,
    new_folder,
)
from payload.data.writing.progress import Reporter, format_bytes
from payload.data.writing.resumable_token_files import (
    ResumableTokenFiles,
    locked,
    remove_unfinished,
    writing_to,
)
from payload.data.writing.tokenizer_check import TokenizerCheck
from payload.data.writing.write import write_batch
from payload.formats.data_folder import DataMeta

_FEW_VAL_DOCUMENTS = 20
_MOST_VAL_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """The result of a run."""

    meta: DataMeta
    was_ready: bool
    """True if the folder already held the output."""
    worked_s: float = 0.0
    """Seconds spent on tokenizing, writing and hashing.

    The time includes reading, except if all texts were read earlier, to count the documents.
    """


def prepare(source: Source, settings: PrepareSettings, reporter: Reporter) -> PrepareResult:
    """Make the data folder, or resume making it. Raises DataError."""
    reporter.log(f"source: {source.label}")
    if settings.tokenizer.end_note is not None:
        reporter.log(f"tokenizer: {settings.tokenizer.name}; {settings.tokenizer.end_note}")
    try:
        identity = source.identity()
        with new_folder(settings.out), locked(settings.out, wait=settings.wait):
            ready = check_folder(settings, identity)
            if ready is None:
                fingerprint = fingerprint_of(identity, settings)
                meta = _Run(source, settings, reporter, fingerprint).run()
                warn_if_few(meta, reporter)
                return PrepareResult(meta=meta, was_ready=False, worked_s=reporter.worked_s)
    except OSError as error:
        place = error.filename or source.label
        raise DataError(f"{place}: {error.strerror or error}.") from None
    reporter.log(
        f"{settings.out} already holds this data; nothing to do (--force prepares the data again)"
    )
    warn_if_few(ready, reporter)
    return PrepareResult(meta=ready, was_ready=True)


def warn_if_few(meta: DataMeta, reporter: Reporter) -> None:
    """Warn if the validation set is too small."""
    few, total = meta.val_documents, meta.train_documents + meta.val_documents
    if few < _FEW_VAL_DOCUMENTS:
        if meta.split.method == "files":
            fix = "Add documents to the validation file."
        else:
            share = more_validation(
                wanted=_FEW_VAL_DOCUMENTS,
                documents=_split_documents(meta),
                most=_MOST_VAL_SHARE,
                current=meta.split.val_fraction,
            )
            fix = share or "Add documents."
        reporter.log(
            f"note: {few} of {total:,} documents are for validation, too few for a reliable loss. "
            f"{fix}"
        )


def _split_documents(meta: DataMeta) -> int:
    """Return how many documents were split. A document counts once, whatever its weight."""
    if meta.selection is None:
        return meta.train_documents + meta.val_documents
    return sum(
        each.train_rows + each.val_rows + each.also_in_validation for each in meta.selection.inputs
    )


class _Run:
    """A run that has to make the output."""

    def __init__(
        self, source: Source, settings: PrepareSettings, reporter: Reporter, fingerprint: str
    ) -> None:
        self._source = source
        self._settings = settings
        self._reporter = reporter
        self._fingerprint = fingerprint
        self._selection: DocumentSelection | None = None
        self._encoder, survey = self._load_and_survey()
        self._survey = limited(survey, settings.max_documents)
        self._check = self._new_check()
        self._store = ResumableTokenFiles(
            settings.out, fingerprint=fingerprint, encoder=self._encoder.name
        )

    def _load_and_survey(self) -> tuple[Encoder, Survey]:
        """Load the encoder and survey the source, at the same time.

        The first needs the CPU, the second mostly reads files.
        """
        settings = self._settings
        notes: list[str] = []
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as pool:
            loading = pool.submit(
                choose_encoder, settings.tokenizer, seed=settings.seed, log=notes.append
            )
            survey = self._source.survey()
            encoder = loading.result()
        for note in notes:
            self._reporter.log(note)
        return encoder, survey

    def run(self) -> DataMeta:
        """Tokenize the remaining documents, rename the files, then write meta.json."""
        survey, settings = self._survey, self._settings
        self._selection = select_documents(
            self._source,
            survey,
            settings.mixing,
            choose_split=settings.split,
            max_documents=settings.max_documents,
        )
        split: Split
        if self._selection is None:
            split = settings.split(survey)
        else:
            split, survey = self._selection, self._selection.survey(survey)
        self._log_survey(survey, split)
        try:
            self._open_store()
            if not self._store.is_complete:
                self._tokenize(survey, split)
                self._check_result(survey)
                self._store.commit(self._store.cursor, is_complete=True)
            meta = self._describe(split)
            with writing_to(self._settings.out):
                write_meta(self._settings.out, meta)
        finally:
            self._store.close()
            if not self._store.has_shards:
                remove_unfinished(self._settings.out)
        remove_unfinished(self._settings.out)
        return meta

    def _log_survey(self, survey: Survey, split: Split) -> None:
        size = "" if survey.text_bytes is None else f", {format_bytes(survey.text_bytes)}"
        count = "not counted" if survey.documents is None else f"{survey.documents:,}"
        if survey.note is not None:
            self._reporter.log(f"note: {survey.note}")
        for note in () if self._selection is None else self._selection.rows.notes():
            self._reporter.log(note)
        chosen = split.record
        how = {
            "permutation": f"as chosen by datasets' train_test_split (seed {chosen.seed})",
            "files": "by the names of the files",
        }.get(chosen.method, f"by a hash of each document's number (seed {chosen.seed})")
        self._reporter.log(
            f"documents: {count}{size}; {chosen.val_fraction:g} of them for validation, {how}"
        )

    def _open_store(self) -> None:
        if not self._store.resume():
            self._store.start()
            return
        done = self._store.totals
        self._reporter.log(
            f"resuming after {done.documents:,} documents and {done.tokens:,} tokens of an "
            "earlier run"
        )
        if self._store.encoder.startswith(self._settings.tokenizer.reference_package):
            self._encoder = ReferenceEncoder(self._settings.tokenizer)

    def _tokenize(self, survey: Survey, split: Split) -> None:
        try:
            self._tokenize_with_encoder(survey, split)
        except EncoderMismatchError as error:
            package = self._settings.tokenizer.reference_package
            self._reporter.log(
                f"tokenizer: gigatoken differs from {package} ({error}); restarting with "
                f"{package} alone"
            )
            self._encoder = ReferenceEncoder(self._settings.tokenizer)
            self._store.encoder = self._encoder.name
            self._check = self._new_check()
            self._store.start()
            self._tokenize_with_encoder(survey, split)

    def _tokenize_with_encoder(self, survey: Survey, split: Split) -> None:
        """Read, encode and write in a pipeline, with three consecutive batches in progress."""
        cursor, most = self._store.cursor, self._settings.max_documents
        if self._selection is None:
            batches = limit(self._source.batches(cursor), most)
        else:
            batches = self._selection.batches(self._source, cursor, max_documents=most)
        is_first = True
        self._reporter.start(survey, self._store.totals)
        try:
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="write") as writer:
                written: Future[None] | None = None
                for batch in prefetch(batches):
                    encoded = self._encoder.encode(batch.pieces)
                    if is_first:
                        self._check_space(survey, batch, encoded)
                        is_first = False
                    if written is not None:
                        written.result()
                    written = writer.submit(self._write, batch, encoded, split)
                if written is not None:
                    written.result()
        finally:
            self._reporter.stop()

    def _write(self, batch: Batch, encoded: Encoded, split: Split) -> None:
        store = self._store
        self._encoder.check_sample(batch.pieces, encoded)
        self._check.add(batch.pieces, encoded.tokens, encoded.offsets)
        write_batch(store, batch, encoded, split, self._settings.tokenizer)
        if store.is_due(shard_bytes=self._settings.shard_bytes):
            store.commit(batch.cursor)
        store.cursor = batch.cursor
        self._reporter.update(store.totals)

    def _check_space(self, survey: Survey, batch: Batch, encoded: Encoded) -> None:
        tokens = expected_tokens(survey, batch, encoded, self._settings.tokenizer)
        free = free_bytes(self._settings.out)
        if tokens is None:
            self._reporter.log(
                f"disk: {format_bytes(free)} free; the size of the output is unknown"
            )
            return
        need = max(0, tokens - self._store.totals.tokens) * self._settings.token_bytes()
        if need > free:
            raise DataError(
                f"{self._settings.out}: {tokens:,} tokens need about {format_bytes(need)}, but "
                f"{format_bytes(free)} are free. Free disk space, choose another --out, or limit "
                "the documents with --max-documents."
            )
        self._reporter.log(f"disk: about {format_bytes(need)} needed, {format_bytes(free)} free")

    def _check_result(self, survey: Survey) -> None:
        totals = self._store.totals
        problem = None
        if not totals.documents:
            problem = f"no documents in {self._source.label}"
            if totals.skipped_documents:
                problem += f": all {totals.skipped_documents:,} were bad"
            problem += "."
        elif totals.tokens == totals.documents * self._tokens_around():
            problem = f"all {totals.documents:,} documents of {self._source.label} are empty."
        elif not totals.val_documents or not totals.train_documents:
            purpose = "train on" if totals.val_documents else "validate on"
            problem = (
                f"no document of {totals.documents:,} is left to {purpose}. "
                f"{'Lower' if totals.val_documents else 'Raise'} --val-fraction."
            )
        if problem:
            self._store.discard()
            raise DataError(problem)
        self._check_tokens()
        num_read = totals.documents + totals.skipped_documents
        is_counted = survey.documents is not None and self._selection is None
        if is_counted and num_read != survey.documents:
            self._reporter.log(
                f"note: {num_read:,} documents were read, {survey.documents:,} were expected"
            )

    def _check_tokens(self) -> None:
        """Check the tokens per byte, for the texts of this process and for the whole corpus."""
        totals = self._store.totals
        num_around = totals.documents * self._tokens_around()
        try:
            self._check.finish()
            self._check.check_rate(text_bytes=totals.text_bytes, tokens=totals.tokens - num_around)
        except DataError:
            # All text is tokenized, so the next run would accept the output as complete.
            self._store.discard()
            raise

    def _new_check(self) -> TokenizerCheck:
        return TokenizerCheck(
            self._settings.tokenizer,
            allow_odd=self._settings.allow_odd_tokenizer,
            log=self._reporter.log,
        )

    def _tokens_around(self) -> int:
        tokenizer = self._settings.tokenizer
        return len(tokenizer.begin) + len(tokenizer.end)

    def _describe(self, split: Split) -> DataMeta:
        totals = asdict(self._store.totals)
        tokenizer = self._settings.tokenizer
        return DataMeta(
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            tokenizer_pipeline_sha256=tokenizer.pipeline_sha256,
            tokenizer_files=write_tokenizer(self._settings.out, tokenizer.files),
            vocab_size=tokenizer.vocab_size,
            added_tokens=tokenizer.added,
            end_of_text=tokenizer.end[-1],
            dtype=self._settings.dtype(),
            source=self._source.label,
            revision=self._source.revision,
            fingerprint=self._fingerprint,
            split=split.record,
            encoder=self._store.encoder,
            selection=None if self._selection is None else self._selection.rows.record,
            files=self._store.publish(),
            **totals,
        )
