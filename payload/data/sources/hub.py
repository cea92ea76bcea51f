"""Datasets of the Hugging Face hub, or local folders in the hub's formats, read with `datasets`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import one_line, shown
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.names import GIT_COMMIT
from payload.data.sources.documents import (
    Batch,
    Batcher,
    Cursor,
    Survey,
    UnreachableSourceError,
)
from payload.data.sources.parquet import (
    BATCH_ROWS,
    LostRows,
    ParquetReader,
    add_column,
    check_column,
    read_parquet,
    survey_parquet,
)
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.split import NANOGPT_VAL_FRACTION
from payload.data.sources.split_files import SPLIT_WORDS
from payload.data.sources.text_files import file_identity, join_notes, missing_shards
from payload.formats.data_folder import FOLDER_WORD
from payload.formats.hub_names import require_one_meaning

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

OPENWEBTEXT = "Skylion007/openwebtext"
# This commit holds 80 parquet files, plain_text/train-*-of-00080.parquet, and no script. Earlier
# commits hold tar files and a script that datasets >= 4 rejects (nanoGPT #633).
OPENWEBTEXT_REVISION = "79d93d786212f7344586290adb811d4ae6a1762c"
_MAX_FOOTERS = 256
"""Maximum number of files for which rows are counted over the network. Each file takes two
requests."""
_FORMATS = ("parquet", "json", "csv", "text", "arrow", "xml", "webdataset")
"""Formats of `datasets` that read only the given files."""


class HubSource:
    """A split of a dataset: every row is a document. Rows are streamed, not downloaded first."""

    inputs_of_files: Sequence[int] = ()

    def __init__(self, request: SourceRequest) -> None:
        given = request.inputs[0] if request.inputs else OPENWEBTEXT
        if request.inputs:
            require_one_meaning(given, setting="--input", kind="dataset", error=UsageError)
        # Without --input no local folder is used.
        self._folder = Path(given) if request.inputs and Path(given).is_dir() else None
        self._dataset = given
        self._request = request
        self._split = request.chosen_split()
        self.default_val_fraction = NANOGPT_VAL_FRACTION if request.kind == "openwebtext" else None
        self._builder: DatasetBuilder | None = None
        self.revision: str | None = None if request.inputs else OPENWEBTEXT_REVISION
        where = given if self._folder is None else f"{FOLDER_WORD} {given}"
        self.label = f"{request.kind}: {where}, split {self._split}"
        if self._folder is None and request.inputs and Path(given).exists():
            raise UsageError(
                f"--input {given} is a file; --source {request.kind} needs a folder or a dataset's "
                "name. For files use --source text, jsonl or parquet."
            )
        if self._folder is None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given):
            raise UsageError(
                f"--input {given!r} is neither a folder nor a dataset's name. Use owner/name."
            )

    def identity(self) -> list[Any]:
        """Return the commit of a hub dataset, or the path, size and time of each local file.

        Raises DataError.
        """
        where = [self._request.subset, self._split]
        if self._folder is not None:
            files = sorted(p for p in self._folder.rglob("*") if p.is_file())
            return [*where, file_identity(files)]
        if self.revision is None:
            self.revision = self._resolve_revision()
        return [*where, self._dataset, self.revision]

    def survey(self) -> Survey:
        """Return the number of rows if the files or the dataset card state that number."""
        column, skip_bad = self._request.column(), self._request.skip_bad
        places = self._parquet_places()
        if places and (self._folder is not None or len(places) <= _MAX_FOOTERS):
            with self._convert_errors("opening"):
                survey = survey_parquet(places, column, skip_bad=skip_bad)
            return replace(survey, note=self.note())
        if self._folder is not None:
            with self._convert_errors("reading"):
                return Survey(documents=self._count_rows(), text_bytes=None, note=self.note())
        known = (self._prepared_builder().info.splits or {}).get(self._split)
        documents = known.num_examples if known else None
        return Survey(documents=documents, text_bytes=None, note=self.note())

    def note(self, *, valid: str | None = None) -> str | None:
        """Return a note about missing shards and about the splits, or None.

        `valid` is the split with the rows for validation. Raises DataError.
        """
        files = self._prepared_builder().config.data_files or {}
        missing = missing_shards(list(map(str, files.get(self._split, ()))))
        return join_notes(missing, self._splits_note(valid))

    def valid_split(self) -> str | None:
        """Return the dataset's validation split; None without a validation split, or if --split is
        given.

        Raises DataError.
        """
        if self._request.split is not None:
            return None
        return next((each for each in self._splits() if SPLIT_WORDS.get(each) == "valid"), None)

    def _splits_note(self, valid: str | None) -> str | None:
        """Return a line about the dataset's splits; None if the dataset has only one split."""
        others = [each for each in self._splits() if each not in (self._split, valid)]
        if not others and valid is None:
            return None
        parts = [f"{self._split} for training", *([f"{valid} for validation"] if valid else [])]
        left = f"; left out: {', '.join(map(shown, others))} (choose with --split)"
        return f"splits of the dataset: {', '.join(parts)}{left if others else ''}"

    def _splits(self) -> list[str]:
        return list(map(str, self._prepared_builder().config.data_files or {}))

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the rows as documents."""
        column, skip_bad = self._request.column(), self._request.skip_bad
        places = self._parquet_places()
        with self._convert_errors("reading"):
            if places:
                # `datasets` would decode a whole row group in one step: gigabytes, in some files.
                yield from read_parquet(places, column, cursor, skip_bad=skip_bad)
            else:
                yield from self._stream(cursor)

    def _stream(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield batches of files other than parquet. The cursor holds the state of `datasets`."""
        column = self._request.column()
        rows = self._open_rows()
        if "state" in cursor:
            rows.load_state_dict(cursor["state"])
        batcher = Batcher(skip_bad=self._request.skip_bad)
        number = cursor.get("document", 0)
        for table in rows.iter(batch_size=BATCH_ROWS):
            check_column(table.schema, column, where=self._dataset)
            values = table.column(column)
            add_column(values, batcher, number=number, row=number, where=self._dataset)
            number += len(values)
            if batcher.is_full:
                yield batcher.take({"state": rows.state_dict(), "document": number})
        yield batcher.take({"state": rows.state_dict(), "document": number})

    def rows(self, split: str | None = None) -> Iterator[list[dict[str, Any]] | LostRows]:
        """Yield lists of rows of a split, with all columns.

        The default is the split that the user chose. Raises DataError.
        """
        split = split or self._split
        places = self._parquet_places(split)
        with self._convert_errors("reading"):
            if places:
                with ParquetReader(None) as reader:
                    for place in places:
                        yield from reader.read_rows(place)
            else:
                for table in self._open_rows(split).iter(batch_size=BATCH_ROWS):
                    yield table.to_pylist()

    def _count_rows(self) -> int:
        return sum(len(table) for table in self._open_rows().iter(batch_size=BATCH_ROWS))

    def _open_rows(self, split: str | None = None) -> IterableDataset:
        builder = self._prepared_builder()
        return builder.as_streaming_dataset(split=split or self._split).with_format("arrow")

    def _parquet_places(self, split: str | None = None) -> list[str]:
        """Return the files of a split if all are parquet, otherwise an empty list.

        Raises DataError.
        """
        from datasets.packaged_modules.parquet.parquet import ParquetConfig

        builder = self._prepared_builder()
        if not isinstance(builder.config, ParquetConfig):
            return []
        by_split, split = builder.config.data_files or {}, split or self._split
        if split not in by_split:
            raise DataError(
                f"{self._dataset}: split {split!r} not found. Choose one with --split: "
                f"{', '.join(map(str, by_split))}."
            )
        return [str(place) for place in by_split[split]]

    def _prepared_builder(self) -> DatasetBuilder:
        if self._builder is None:
            with self._convert_errors("opening"):
                if self._folder is not None:
                    _check_cards(self._folder)
                builder = _load_builder(
                    # For a bare name `datasets` would prefer a local folder of that name to the
                    # hub.
                    self._dataset if self._folder is not None else f"hf://datasets/{self._dataset}",
                    subset=self._request.subset,
                    revision=self.revision,
                )
                if self._folder is not None:
                    _check_places(self._folder, builder)
            self._builder = builder
        return self._builder

    def _resolve_revision(self) -> str:
        """Return the commit of --revision, or the newest commit."""
        revision = self._request.revision
        if revision is not None and GIT_COMMIT.fullmatch(revision):
            return revision
        from huggingface_hub import HfApi

        with self._convert_errors("finding"):
            found = HfApi().dataset_info(self._dataset, revision=revision).sha
        if found is None:
            raise DataError(
                f"dataset {self._dataset}: the hub returned no commit. Set one with --revision."
            )
        return found

    @contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        """Convert exceptions of `datasets` and of the hub's client to a DataError."""
        import pyarrow as pa
        import yaml
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # imported there

        # Both libraries log a warning at every retry; the final error has the same information.
        for name in ("datasets", "huggingface_hub"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            yield
        except DataError:
            raise
        except (OSError, HTTPError, DatasetsError, pa.ArrowException, yaml.YAMLError) as error:
            kind = DataError if self._folder is not None else UnreachableSourceError
            raise kind(self._explain(error, action)) from None
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{action} {self._dataset}: {one_line(error)}") from None

    def _explain(self, error: Exception, action: str) -> str:
        if self._folder is not None:
            return f"{action} {self._dataset}: {one_line(error)}"
        message = one_line(error)
        if _is_unreachable(error):
            return (
                f"the Hugging Face hub cannot be reached for {self._dataset} "
                f"({message.rstrip('.')}). Check the network and run the same command again, "
                "without --force, or use a local copy: --input FOLDER."
            )
        if type(error).__name__ in ("RepositoryNotFoundError", "DatasetNotFoundError"):
            return (
                f"the Hugging Face hub has no public dataset {self._dataset}. Check the name. For "
                "a private or gated dataset log in first: hf auth login."
            )
        if type(error).__name__ == "RevisionNotFoundError":
            return (
                f"dataset {self._dataset} has no revision {self._request.revision!r}. Choose "
                "another with --revision."
            )
        return f"{action} dataset {self._dataset} of the Hugging Face hub: {message}"


def _outside_error(dataset: object, place: str) -> str:
    return (
        f"{dataset}: the data file {shown(place)} is outside of the folder. Move the file into "
        "the folder, or read this file with --source jsonl, parquet or text."
    )


def _check_cards(folder: Path) -> None:
    """Raise DataError for a dataset card that names data outside of the folder.

    This runs before `datasets` reads the card, because `datasets` resolves every pattern in the
    card, even over the network.
    """
    import yaml
    from datasets import config
    from huggingface_hub import DatasetCard

    for name in (config.REPOCARD_FILENAME, config.REPOYAML_FILENAME):
        path = folder / name
        if not path.is_file():
            continue
        text = read_bytes(inside_folder(path)).decode("utf-8")
        if path.suffix == ".md":
            configs: Any = DatasetCard(text).data.get("configs")
        else:
            card = yaml.safe_load(text)
            configs = card.get("configs") if isinstance(card, dict) else None
        given = [each for each in configs or () if isinstance(each, dict)]
        for place in _texts([[each.get("data_files"), each.get("data_dir")] for each in given]):
            is_outside = Path(place).is_absolute() or ".." in Path(place).parts
            if is_outside or "://" in place or "::" in place:
                raise DataError(_outside_error(path, place))


def _check_places(folder: Path, builder: DatasetBuilder) -> None:
    """Raise DataError for a data file outside of the folder, for example behind a link.

    Formats other than `_FORMATS` also read files that are not listed, such as files next to a
    task.toml. For datasets of the hub, `datasets` checks this itself.
    """
    if builder.name not in _FORMATS:
        raise DataError(
            f"{folder}: `datasets` detects the format {shown(builder.name)[1:-1]}, which can read "
            f"files outside of the folder. Supported: {', '.join(_FORMATS)}. Or read the files "
            "with --source jsonl, parquet or text."
        )
    for places in (builder.config.data_files or {}).values():
        for place in map(str, places):
            try:
                inside_folder(Path(place), home=folder)
            except OSError:
                raise DataError(_outside_error(folder, place)) from None


def _texts(value: object) -> Iterator[str]:
    """Yield every text in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _load_builder(dataset: str, *, subset: str | None, revision: str | None) -> DatasetBuilder:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset_builder(dataset, name=subset, revision=revision)


def _is_unreachable(error: BaseException) -> bool:
    """Return True if the error or one of its causes is a failed connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionError, TimeoutError)):
            return True
        if type(cause).__name__ in ("ConnectError", "ConnectTimeout", "LocalEntryNotFoundError"):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
