"""Reads a stream of conversations; renders, tokenizes and counts their samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError
from payload.data.rows.conversations import (
    BadConversationError,
    UntrainedRowError,
    columns_of,
    conversation_of,
    unread_columns,
)
from payload.data.rows.rows import EARLY_ROWS, Row, Rows, in_batches
from payload.data.rows.tool_faults import tool_faults
from payload.data.tasks.groups import Groups
from payload.data.tasks.row_sketches import RowSketches, message_texts
from payload.data.tasks.sample_files import Documents, SampleFiles, split_sample
from payload.data.tasks.trained_tokens import SampleTokenizer
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.empty_answers import empty_answers
from payload.data.templates.turns import RenderedSample, RowRendering, SampleOptions
from payload.data.writing.plan import PrepareSettings
from payload.data.writing.resumable_token_files import ResumableTokenFiles
from payload.data.writing.write import EXAMPLES_KEPT
from payload.formats.data_folder import OnLong

_Tokens = npt.NDArray[np.uint32]
_Trained = npt.NDArray[np.bool_]
_Piece = tuple[_Tokens, _Trained]

_BATCH_SIZE = 256
"""Number of rows that are rendered together, and of samples that are tokenized together."""
_BATCH_CHARS = 2**22
"""Limit on the total length of the requests that are sent together, in characters."""


@dataclass(slots=True, kw_only=True)
class _Read:
    """A row of the source, with its rendering or with the fault for which it is skipped."""

    row: Row
    rendering: RowRendering | None = None
    request: str = ""
    """The first request that rendering the row sends to the template process."""
    fault: str = ""
    faults: Sequence[str] = ()
    """Faults of a row that is trained nevertheless."""


@dataclass(slots=True)
class _Sample:
    """A rendered text of a row."""

    row: Row
    group: int
    """Number of the sample's group, or of its row if there are no groups. The number decides
    whether the sample is for validation."""
    rendered: RenderedSample
    is_added: bool
    """False for the last sample of each row, True for the other samples of the row."""


@dataclass(slots=True)
class ChatReader:
    """The rows of one prepare run, and the counts of its samples so far."""

    rows: Rows
    settings: PrepareSettings
    template: ChatTemplate
    tokenizer: SampleTokenizer
    options: SampleOptions
    length: int = field(kw_only=True)
    """Number of tokens in a block."""
    on_long: OnLong = field(kw_only=True)
    groups: Groups = field(kw_only=True)
    sketches: RowSketches = field(kw_only=True)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts for the fields of ChatRecord, by field name."""
    report: Callable[[], None] = field(default=lambda: None)
    """Shows the progress."""
    _num_read: int = 0
    """Number of rows read so far, not counting bad rows of the source."""
    _fault: Exception | None = None
    """Error that the source raised after the last row that was read; None without an error."""
    _is_early_checked: bool = False
    _start: dict[str, Any] = field(default_factory=dict)
    """State before the first row."""

    def read(self, samples: SampleFiles, store: ResumableTokenFiles | None) -> None:
        """Add to `samples` every sample with trained tokens, in pieces that fit into a block.

        While the template process renders a batch of rows, this process tokenizes the previous
        batch and then reads the next batch. After each shard, `store` records the state. Raises
        DataError.
        """
        self.template.require_stop(self.options.variables)
        self._start = self._cursor(is_read=False)
        is_read = self._restore(store)
        limit = self.settings.max_documents
        left = None if limit is None else max(0, limit - self._num_read)
        rows = islice(self.rows.stream(), left)
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

    def restart(self) -> None:
        """Forget what `read` has read, so that a second call reads all rows."""
        self.template.process.drop_batch()
        self._fault, self._is_early_checked = None, False
        self._continue(self._start)
        self.groups.forget()
        self.sketches.forget()

    def _cursor(self, *, is_read: bool) -> dict[str, Any]:
        """Return the state with which `_restore` continues."""
        return {
            "is_read": is_read,
            "num_read": self._num_read,
            "counts": dict(self.counts),
            "rows": self.rows.state(),
            "tokenizer": self.tokenizer.state(),
            "tokens": self.template.tokens_sha256(),
        }

    def _restore(self, store: ResumableTokenFiles | None) -> bool:
        """Continue after the rows of an interrupted run; return True if all rows were read."""
        if store is None or not store.has_shards:
            self._keep_in(store)
            return False
        cursor = store.cursor
        if cursor["tokens"] != self.template.tokens_sha256():
            raise DataError(
                f"{self.settings.out}: the special tokens of {self.settings.tokenizer.name} have "
                "changed since the interrupted run. Its tokens were removed. Run the same "
                "command again."
            )
        self._continue(cursor)
        self._keep_in(store)
        return bool(cursor["is_read"])

    def _keep_in(self, store: ResumableTokenFiles | None) -> None:
        self.groups.keep_in(store)
        self.sketches.keep_in(store)

    def _continue(self, cursor: Mapping[str, Any]) -> None:
        self._num_read = cursor["num_read"]
        self.counts = Counter(cursor["counts"])
        self.rows.restore(cursor["rows"])
        self.tokenizer.restore(cursor["tokenizer"])

    def _read_batch(self, rows: Iterator[Row]) -> list[_Read]:
        """Return the next rows; empty at the end of the source, or before a fault in it."""
        found, size = list[_Read](), 0
        while len(found) < _BATCH_SIZE and size < _BATCH_CHARS:
            try:
                row = next(rows, None)
            except Exception as error:
                # An earlier row may be faulty, too, and is reported first.
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
                faults = [
                    *tool_faults(conversation.messages, conversation.tools),
                    *empty_answers(conversation.messages, conversation.trained, self.options),
                ]
                found.append(_Read(row=row, rendering=rendering, request=request, faults=faults))
                size += len(request)
        return found

    def _render(self, batch: list[_Read], *, next_batch: list[_Read]) -> None:
        """Store the rendered texts of a batch, then send the next batch to the template process."""
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
            rendered, count=_BATCH_SIZE, chars=lambda each: len(each.rendered.text)
        ):
            found = self._tokenize(some)
            samples.add(found)
            if store is not None:
                totals = store.totals
                totals.train_documents += len(found)
                totals.train_tokens += len(found.tokens)
                totals.text_bytes = self.tokenizer.text_bytes
                self.report()
        self.sketches.flush()
        self.rows.keep_skipped(EXAMPLES_KEPT)

    def _samples(self, read: _Read) -> list[_Sample]:
        """Return the samples of a row. The row's first request must have been answered."""
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
        self.rows.note_faults(read.faults, row.where)
        if len(row.values) > 1:  # the only column has the messages
            columns = [*columns_of(row.values), *self.groups.columns()]
            self.rows.note_unread(unread_columns(row.values, columns), row.values)
        group = self.groups.number_of(row)
        if self.sketches.is_needed:
            self.sketches.add(row.number, message_texts(conversation_of(row.values).messages))
        last = len(rendered) - 1
        return [
            _Sample(row, group, each, is_added=number < last)
            for number, each in enumerate(rendered)
        ]

    def _tokenize(self, samples: list[_Sample]) -> Documents:
        found = self.tokenizer.tokenize([each.rendered for each in samples])
        lengths = np.diff(found.offsets)
        is_added = np.fromiter((each.is_added for each in samples), np.bool_, len(samples))
        if is_added.any():
            self.counts["added_samples"] += int(is_added.sum())
            self.counts["added_tokens"] += int(lengths[is_added].sum())
        groups = np.fromiter((each.group for each in samples), np.int64, len(samples))
        rows = np.fromiter((each.row.number for each in samples), np.int64, len(samples))
        documents = Documents(rows, groups, lengths, found.tokens, found.trained)
        if not (lengths > self.length).any():
            is_trained = documents.num_trained() > 0
            self.counts["dropped_conversations"] += int((~is_trained).sum())
            return documents.only(is_trained)
        return self._all_shortened(samples, documents)

    def _all_shortened(self, samples: list[_Sample], documents: Documents) -> Documents:
        """Return the samples with trained tokens, in pieces that fit into a block."""
        kept: list[tuple[_Sample, _Tokens, _Trained]] = []
        ends = np.cumsum(documents.lengths)[:-1]
        split = np.split(documents.tokens, ends), np.split(documents.trained, ends)
        for sample, tokens, trained in zip(samples, *split, strict=True):
            pieces = [(tokens, trained)]
            if len(tokens) > self.length:
                pieces = self._shortened(sample.row, tokens, trained)
            found = [(sample, *each) for each in pieces if each[1].any()]
            self.counts["dropped_conversations"] += bool(pieces) and not found
            kept += found
        return Documents(
            np.array([sample.row.number for sample, _, _ in kept], dtype=np.int64),
            np.array([sample.group for sample, _, _ in kept], dtype=np.int64),
            np.array([len(tokens) for _, tokens, _ in kept], dtype=np.int64),
            np.concatenate([np.empty(0, np.uint32), *(tokens for _, tokens, _ in kept)]),
            np.concatenate([np.empty(0, np.bool_), *(trained for _, _, trained in kept)]),
        )

    def _shortened(self, row: Row, tokens: _Tokens, trained: _Trained) -> list[_Piece]:
        """Apply --on-long to a sample that is longer than a block, and return the pieces."""
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
        return split_sample(tokens, trained, length=length)
