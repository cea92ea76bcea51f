"""Runs `prepare --task chat`: turns rows into packed blocks, with a mark for each token."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.data.rows.conversations import (
    BadConversationError,
    UntrainedRowError,
    columns_of,
    conversation_of,
    unread_columns,
)
from payload.data.rows.open_rows import open_rows
from payload.data.rows.packing import Blocks, best_fit, one_each
from payload.data.rows.rows import EARLY_ROWS, Row, Rows, in_batches
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
from payload.data.tasks.groups import Groups
from payload.data.tasks.sample_files import Document, SampleFiles
from payload.data.tasks.trained_tokens import SampleTokenizer
from payload.data.tasks.whole_folder_writer import Chunks, PreparedData
from payload.data.templates.chat_template import (
    ChatTemplate,
    load_chat_template,
    read_chat_template,
)
from payload.data.templates.template_files import TEMPLATE_FILE
from payload.data.templates.turns import RenderedSample, RowRendering, SampleOptions
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.writing.plan import PrepareSettings
from payload.data.writing.progress import Reporter
from payload.data.writing.resumable_token_files import (
    GROUPS_NAME,
    INDEX_NAME,
    SAMPLES_NAME,
    ResumableTokenFiles,
    WriteFailedError,
    remove_unfinished,
)
from payload.data.writing.write import EXAMPLES_KEPT
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
_BATCH_CHARS = 2**22
"""Limit of the requests that are sent together."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A row that was read, and its rendering or what is wrong with the row."""

    row: Row
    rendering: RowRendering | None = None
    request: str = ""
    """Request that the rendering sends first."""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A rendered text of a row."""

    row: Row
    group: int
    """Key of the split: the group's number, or the row's number without groups."""
    rendered: RenderedSample
    is_added: bool
    """False for one sample of each row, True for its other samples."""


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
    batch_size: int = 256
    """Number of conversations that are rendered together, and of samples that are tokenized
    together."""
    report: Callable[[], None] = field(default=lambda: None)
    """Shows the progress."""
    _num_read: int = 0
    """Rows so far, without bad rows of the source."""
    _fault: Exception | None = None
    """Fault of the source after the rows that were read."""
    _is_early_checked: bool = False

    def make(self, store: ResumableTokenFiles | None = None) -> PreparedData:
        """Read, render, tokenize and pack all rows. Raises DataError.

        The samples are written to `store`, and a store that was resumed is continued. Without
        `store` the result has the sizes of the files, but no contents.
        """
        samples = SampleFiles(store)
        self._read_all(samples, store)
        index = samples.index()
        split = self.settings.split(self.groups.survey(self.rows))
        is_val = split.val_mask(index["group"])
        files: dict[str, Chunks] = {}
        counts: dict[str, int] = {}
        record: dict[str, int] = {}
        for name, prefix, chosen in ((TRAIN_NAME, "train", ~is_val), (VAL_NAME, "val", is_val)):
            if not chosen.any():
                raise DataError(
                    f"the split leaves no conversation for "
                    f"{'training' if prefix == 'train' else 'validation'} (conversations in all: "
                    f"{len(index):,}). Change --val-fraction."
                )
            tokens, marks = samples.packed(
                chosen,
                self._pack,
                length=self.length,
                dtype=self.settings.dtype(),
                padding=self.tokenizer.tokenizer.end[-1],
            )
            files[name], files[_MARKS_NAMES[name]] = tokens, marks
            num_tokens, num_trained = (
                int(index[key][chosen].sum(dtype=np.int64)) for key in ("length", "trained")
            )
            counts |= {
                f"{prefix}_tokens": marks.nbytes,
                f"{prefix}_documents": int(chosen.sum()),
            }
            record |= {
                f"{prefix}_trained_tokens": num_trained,
                f"{prefix}_padding_tokens": marks.nbytes - num_tokens,
            }
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

    def resumable(self, fingerprint: str, reporter: Reporter) -> PreparedData:
        """Return the result of `make`, with the samples in files of the output folder.

        Continues an interrupted run with this fingerprint. Raises DataError.
        """
        encoder = self.tokenizer.tokenizer.reference_name
        names = (SAMPLES_NAME, INDEX_NAME, GROUPS_NAME)
        store = ResumableTokenFiles(
            self.settings.out, fingerprint=fingerprint, encoder=encoder, names=names
        )
        try:
            if not store.resume() or store.encoder != encoder:
                store.encoder = encoder
                store.start()
            elif not store.is_complete:
                done = store.totals
                reporter.log(
                    f"resuming after {done.documents:,} samples and {done.tokens:,} tokens of an "
                    "earlier run"
                )
            self.report = lambda: reporter.update(store.totals)
            reporter.start(Survey(documents=None, text_bytes=None), store.totals)
            return self.make(store)
        except WriteFailedError:
            raise
        except DataError:
            # The next run would find the same fault, unless the rows or the options change.
            store.discard()
            raise
        finally:
            reporter.stop()
            store.close()
            if not store.has_shards:
                remove_unfinished(self.settings.out)

    def _read_all(self, samples: SampleFiles, store: ResumableTokenFiles | None) -> None:
        """Add every sample with trained tokens, in pieces of at most the block length.

        The worker renders a batch of rows while the batch before is tokenized and the next one is
        read.
        """
        self.template.require_stop(self.options.variables)
        is_read = self._restore(store)
        rows = islice(self.rows.stream(), self._left())
        waiting: list[_Read] = []
        while not is_read or waiting:
            is_due = store is not None and store.is_due(shard_bytes=self.settings.shard_bytes)
            batch = [] if is_due or is_read else self._read_batch(rows)
            is_read = is_read or not (batch or is_due)
            self._render(waiting, next_batch=batch)
            self._add(waiting, samples, store)
            waiting = batch
            if is_due and not batch and store is not None:
                # No row is between the reader and the files.
                store.commit(self._cursor(is_read=False))
        if self._fault is not None:
            raise self._fault
        self.rows.require_read()
        self.tokenizer.check.finish()
        if not len(samples.index()):
            self.rows.require_some()
            raise DataError(
                f"no conversation with trained tokens in {self.rows.label}: {self.rows.num_rows:,} "
                f"rows, {self.rows.num_skipped:,} bad, {self.counts['dropped_conversations']:,} "
                "with empty answers or answers beyond --sequence-length. Check the columns, or "
                "raise --sequence-length."
            )
        if store is not None:
            store.commit(self._cursor(is_read=True))

    def _left(self) -> int | None:
        """Return how many rows may still be read."""
        limit = self.settings.max_documents
        return None if limit is None else max(0, limit - self._num_read)

    def _cursor(self, *, is_read: bool) -> dict[str, Any]:
        """Return the state with which `_restore` continues."""
        return {
            "is_read": is_read,
            "num_read": self._num_read,
            "counts": self.counts,
            "rows": self.rows.state(),
            "tokenizer": self.tokenizer.state(),
        }

    def _restore(self, store: ResumableTokenFiles | None) -> bool:
        """Continue after the rows of an interrupted run; return True if all rows were read."""
        if store is None or not store.has_shards:
            self.groups.keep_in(store)
            return False
        cursor = store.cursor
        self._num_read = cursor["num_read"]
        self.counts = Counter(cursor["counts"])
        self.rows.restore(cursor["rows"])
        self.tokenizer.restore(cursor["tokenizer"])
        self.groups.keep_in(store)
        return bool(cursor["is_read"])

    def _read_batch(self, rows: Iterator[Row]) -> list[_Read]:
        """Return the next rows; empty at the end of the source, or before a fault of it."""
        found: list[_Read] = []
        size = 0
        while len(found) < self.batch_size and size < _BATCH_CHARS:
            try:
                row = next(rows, None)
            except Exception as error:
                # Rows before this one may be faulty, too, and come first.
                self._fault = error
                row = None
            if row is None:
                break
            self._num_read += 1
            try:
                conversation = conversation_of(row.values)
                rendering = RowRendering(self.template, conversation, self.options)
                request = rendering.request()
            except UntrainedRowError as error:
                self.rows.leave_out(str(error))
            except (BadConversationError, DataError) as error:
                found.append(_Read(row=row, fault=str(error)))
            else:
                found.append(_Read(row=row, rendering=rendering, request=request))
                size += len(request)
        return found

    def _render(self, batch: list[_Read], *, next_batch: list[_Read]) -> None:
        """Give each row of a batch its rendered texts, then let the worker render the next one."""
        process = self.template.process
        renderings = [each.rendering for each in batch if each.rendering is not None]
        if renderings:
            for rendering, answer in zip(renderings, process.receive(), strict=True):
                rendering.take(answer)
        if requests := [each.request for each in next_batch if each.rendering is not None]:
            process.send(requests)

    def _add(
        self, batch: list[_Read], samples: SampleFiles, store: ResumableTokenFiles | None
    ) -> None:
        """Tokenize the samples of a batch and add them."""
        rendered = chain.from_iterable(map(self._samples, batch))
        for some in in_batches(
            rendered, count=self.batch_size, chars=lambda each: len(each.rendered.text)
        ):
            found = self._tokenize(some)
            samples.add(found)
            if store is not None:
                totals = store.totals
                totals.train_documents += len(found)
                totals.train_tokens += sum(len(each.tokens) for each in found)
                totals.text_bytes = self.tokenizer.text_bytes
                self.report()
        self.rows.keep_skipped(EXAMPLES_KEPT)

    def _samples(self, read: _Read) -> list[_Sample]:
        """Return the samples of a row, whose first request was answered."""
        row = read.row
        if row.place >= EARLY_ROWS and not self._is_early_checked:
            self._is_early_checked = True
            self.rows.require_read(row.place)
        try:
            if read.rendering is None:
                raise BadConversationError(read.fault)
            rendered = read.rendering.samples()
        except (BadConversationError, DataError) as error:
            self.rows.skip(row.where, str(error), place=row.place)
            return []
        self.rows.note_unread(
            unread_columns(row.values, [*columns_of(row.values), *self.groups.columns()])
        )
        group = self.groups.number_of(row)
        last = len(rendered) - 1
        return [
            _Sample(row, group, each, is_added=number < last)
            for number, each in enumerate(rendered)
        ]

    def _tokenize(self, samples: list[_Sample]) -> list[Document]:
        found: list[Document] = []
        tokenized = self.tokenizer.tokens([each.rendered for each in samples])
        for sample, (tokens, trained) in zip(samples, tokenized, strict=True):
            if sample.is_added:
                self.counts["added_samples"] += 1
                self.counts["added_tokens"] += len(tokens)
            pieces = [(tokens, trained)]
            if len(tokens) > self.length:
                pieces = self._shortened(sample.row, tokens, trained)
            kept = [Document(sample.group, *each) for each in pieces if each[1].any()]
            self.counts["dropped_conversations"] += bool(pieces) and not kept
            found += kept
        return found

    def _shortened(
        self, row: Row, tokens: npt.NDArray[np.uint32], trained: npt.NDArray[np.bool_]
    ) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """Return the pieces of a sample that is longer than a block, as --on-long selects."""
        length = self.length
        if self.on_long == "refuse":
            self.rows.skip(
                row.where,
                f"the conversation has {len(tokens):,} tokens, more than --sequence-length "
                f"{length}. Raise --sequence-length, or choose another --on-long.",
                place=row.place,
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

    def _pack(self, lengths: npt.NDArray[np.int64]) -> Blocks:
        if self.packing == "none":
            return one_each(len(lengths))
        return best_fit(lengths, capacity=self.length)
