"""Runs `prepare --task chat`: turns rows into packed blocks, with a mark for each token."""

from __future__ import annotations

import argparse
import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from payload.core.errors import DataError, UsageError
from payload.data.rows.open_rows import open_rows
from payload.data.rows.packing import Blocks, best_fit, one_each
from payload.data.rows.rows import Rows
from payload.data.selection.content_keys import equal_groups
from payload.data.selection.select_rows import select_rows, split_by_units
from payload.data.sources.documents import Survey, UnreachableSourceError
from payload.data.tasks.arguments import (
    ON_LONG,
    PACKINGS,
    SEQUENCE_LENGTH,
    prepare_settings,
    sample_options,
    source_request,
    tokenizer_check,
    with_known_names,
)
from payload.data.tasks.chat_reader import ChatReader
from payload.data.tasks.groups import Groups
from payload.data.tasks.row_sketches import RowSketches
from payload.data.tasks.sample_files import SampleFiles, row_keys
from payload.data.tasks.trained_tokens import SampleTokenizer
from payload.data.tasks.whole_folder_writer import Chunks, PreparedData
from payload.data.templates.chat_template import (
    ChatTemplate,
    load_chat_template,
    read_chat_template,
)
from payload.data.templates.template_files import TEMPLATE_FILE
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.writing.encoder_choice import EncoderMismatchError
from payload.data.writing.plan import PrepareSettings
from payload.data.writing.progress import Reporter
from payload.data.writing.resumable_token_files import (
    SAMPLE_NAMES,
    ResumableTokenFiles,
    WriteFailedError,
    remove_unfinished,
)
from payload.formats.data_folder import (
    TRAIN_MARKS_NAME,
    TRAIN_NAME,
    VAL_MARKS_NAME,
    VAL_NAME,
    ChatRecord,
    OnLong,
)

_RENDERING = ("rows", "selection", "sources", "tasks", "templates", "tokenizers")
"""Folders with the modules that make samples from rows."""
_OBJECTS_A_COLLECTION = 100_000
"""Number of new objects after which Python's garbage collector runs; the default is 700 to
2,000."""
_MARKS_NAMES = {TRAIN_NAME: TRAIN_MARKS_NAME, VAL_NAME: VAL_MARKS_NAME}
_COUNTED = (
    *("truncated_conversations", "truncated_tokens", "long_dropped_conversations"),
    *("split_conversations", "dropped_conversations", "added_samples", "added_tokens"),
)
"""Fields of ChatRecord for which this job counts the values."""


def chat_job(args: argparse.Namespace) -> ChatJob:
    """Return the job that the command line describes. Raises DataError, UsageError."""
    request = source_request(args)
    if request.text_column is not None:
        raise UsageError(
            "--text-column is not used by --task chat. Use the column names messages, "
            "conversations, prompt and completion, or instruction and output."
        )
    request = with_known_names(request, quiet=args.quiet)
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
    reader = ChatReader(
        rows,
        settings,
        template,
        SampleTokenizer(tokenizer, tokenizer_check(settings, quiet=args.quiet)),
        options,
        length=length,
        on_long=on_long,
        groups=Groups(args.group_column),
        sketches=RowSketches(is_needed=args.dedup == "near"),
    )
    return ChatJob(reader, packing=packing)


def load_tokenizer_and_template(args: argparse.Namespace) -> tuple[HfTokenizer, ChatTemplate]:
    """Return the tokenizer and the template that the command line names. Raises DataError."""
    # Only `prepare` and `finetune` have the option.
    added = getattr(args, "add_special_tokens", ())
    tokenizer, folder = load_hf_tokenizer(args.tokenizer, added)
    if args.chat_template is None:
        template = read_chat_template(folder)
    else:
        template = load_chat_template(args.chat_template, tokenizer=folder)
    # The template is also stored as a file if it came from tokenizer_config.json. So a checkpoint
    # gets this template, whatever template its model has.
    own = {TEMPLATE_FILE: template.source.encode()}
    return replace(tokenizer, files={**tokenizer.files, **own}), template


@dataclass(slots=True)
class ChatJob:
    """One prepare run, from rows to the arrays of the folder."""

    reader: ChatReader
    packing: Any = field(kw_only=True)
    log: Callable[[str], None] = field(default=lambda line: None, kw_only=True)
    """Prints a line for the user."""

    @property
    def rows(self) -> Rows:
        """The rows to read."""
        return self.reader.rows

    @property
    def settings(self) -> PrepareSettings:
        """The settings of the command line."""
        return self.reader.settings

    def make(self, store: ResumableTokenFiles | None = None) -> PreparedData:
        """Read, render, tokenize and pack all rows. Raises DataError.

        The samples are written to `store`, after the samples that a resumed store already has.
        Without `store`, the result has the sizes of the files, but no contents.
        """
        reader, tokenizer = self.reader, self.reader.tokenizer
        if store is None:
            self._choose_encoder()
        samples = self._read(store)
        index = samples.index()
        first, keys = row_keys(index)
        selected = select_rows(
            reader.sketches.join(equal_groups(keys), index["row"][first]),
            self.rows.inputs_of(index["row"][first]),
            split_by_units(
                self.settings.split, reader.groups.survey(self.rows), index["group"][first]
            ),
            self.settings.mixing,
        )
        row_of = np.repeat(np.arange(len(first)), np.diff(first, append=len(index)))
        copies, is_val = selected.copies[row_of], selected.is_val[row_of]
        files: dict[str, Chunks] = {}
        counts: dict[str, int] = {}
        record: dict[str, int] = {}
        for name, prefix, mask in ((TRAIN_NAME, "train", ~is_val), (VAL_NAME, "val", is_val)):
            chosen = np.repeat(np.flatnonzero(mask), copies[mask])
            if not len(chosen):
                raise DataError(
                    f"the split leaves no conversation for "
                    f"{'training' if prefix == 'train' else 'validation'} (conversations in all: "
                    f"{len(index):,}). Change --val-fraction."
                )
            tokens, marks = samples.packed(
                chosen,
                self._pack,
                length=reader.length,
                dtype=self.settings.dtype(),
                padding=tokenizer.tokenizer.end[-1],
            )
            files[name], files[_MARKS_NAMES[name]] = tokens, marks
            num_tokens, num_trained = (
                int(index[key][chosen].sum(dtype=np.int64)) for key in ("length", "trained")
            )
            counts |= {
                f"{prefix}_tokens": marks.nbytes,
                f"{prefix}_documents": len(chosen),
            }
            record |= {
                f"{prefix}_trained_tokens": num_trained,
                f"{prefix}_padding_tokens": marks.nbytes - num_tokens,
            }
        chat = ChatRecord(
            sequence_length=reader.length,
            packing=self.packing,
            template_sha256=reader.template.sha256(),
            thoughts=reader.options.thoughts,
            on_long=reader.on_long,
            **{name: reader.counts[name] for name in _COUNTED},
            literal_samples=tokenizer.literal_samples,
            unescaped_samples=tokenizer.unescaped_samples,
            **record,
        )
        fields = {**counts, "text_bytes": tokenizer.text_bytes, "task": "chat", "chat": chat}
        fields["selection"] = selected.record
        encoder = tokenizer.encoder.name
        return PreparedData(
            files=files,
            split=selected.split,
            fields=fields,
            encoder=encoder,
            notes=selected.notes(),
            temporary_bytes=samples.temporary_bytes(),
        )

    def _choose_encoder(self) -> None:
        encoder = self.reader.tokenizer.encoder
        encoder.choose_fast(seed=self.settings.seed, log=self.log)

    def _read(self, store: ResumableTokenFiles | None) -> SampleFiles:
        """Return the samples.

        If the tokens of gigatoken and the reference encoder differ, this starts again with the
        reference encoder.
        """
        reader, encoder = self.reader, self.reader.tokenizer.encoder
        samples = SampleFiles(store)
        try:
            reader.read(samples, store)
        except EncoderMismatchError as error:
            package = self.settings.tokenizer.reference_package
            self.log(
                f"tokenizer: gigatoken differs from {package} ({error}); restarting with "
                f"{package} alone"
            )
            encoder.use_reference()
            reader.restart()
            if store is not None:
                store.encoder = self._versions(encoder.name)
                store.start()
            samples = SampleFiles(store)
            reader.read(samples, store)
        return samples

    def resumable(self, fingerprint: str, reporter: Reporter) -> PreparedData:
        """Return the result of `make`, which writes the samples to files in the output folder.

        An interrupted run with this fingerprint is continued. Raises DataError.
        """
        self.log = reporter.log
        self._choose_encoder()
        encoder = self.reader.tokenizer.encoder
        store = ResumableTokenFiles(
            self.settings.out,
            fingerprint=fingerprint,
            encoder=self._versions(encoder.name),
            names=SAMPLE_NAMES,
        )
        thresholds = gc.get_threshold()
        try:
            is_resumed = store.resume()
            if store.encoder == self._versions(self.settings.tokenizer.reference_name):
                encoder.use_reference()
            versions = self._versions(encoder.name)
            if not is_resumed or store.encoder != versions:
                # Another version may render or tokenize the remaining rows differently.
                store.encoder = versions
                store.start()
            elif not store.is_complete:
                done = store.totals
                reporter.log(
                    f"resuming after {done.documents:,} samples and {done.tokens:,} tokens of an "
                    "earlier run"
                )
            self.reader.report = lambda: reporter.update(store.totals)
            reporter.start(Survey(documents=None, text_bytes=None), store.totals)
            # Modules and vocabulary stay until the end. Scanning them in each garbage collection
            # took 0.026 ms a row. The rows have no cycles, so the collector finds nothing in them.
            gc.freeze()
            gc.set_threshold(_OBJECTS_A_COLLECTION)
            return self.make(store)
        except (WriteFailedError, UnreachableSourceError):
            raise
        except DataError:
            # The next run would find the same fault, unless the rows or the options change.
            store.discard()
            raise
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            reporter.stop()
            store.close()
            if not store.has_shards:
                remove_unfinished(self.settings.out)

    def _versions(self, encoder: str) -> str:
        """Return the versions that affect the samples.

        A run resumes only with the same versions.
        """
        near = ("datasketch",) if self.reader.sketches.is_needed else ()
        others = (f"{name} {version(name)}" for name in ("tokenizers", "jinja2", *near))
        return ", ".join((encoder, *others, f"rendering {_rendering_sha256()}"))

    def _pack(self, lengths: npt.NDArray[np.int64]) -> Blocks:
        if self.packing == "none":
            return one_each(len(lengths))
        return best_fit(lengths, capacity=self.reader.length)


def _rendering_sha256() -> str:
    """Return a hash of the modules that make samples from rows."""
    found = hashlib.sha256()
    data = Path(__file__).parents[1]
    for path in sorted(each for name in _RENDERING for each in (data / name).glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
