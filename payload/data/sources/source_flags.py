"""The source flags of the command line, and the check of their combinations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from payload.core.errors import DataError, UsageError
from payload.core.printable_text import shown
from payload.core.regular_files import home_path
from payload.formats.hub_names import HubName, require_one_meaning

SourceKind = Literal["auto", "openwebtext", "text", "jsonl", "parquet", "csv", "hf", "stdlib"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
_FILE_KINDS = ("auto", "text", "jsonl", "parquet", "csv")
DEFAULT_TEXT_COLUMN = "text"
DEFAULT_SPLIT = "train"
_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".json", ".csv", ".tsv", ".parquet", ".gz", ".txt")
"""Suffixes of data files. Names of datasets on the hub seldom end like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """The source flags of the command line."""

    kind: SourceKind
    inputs: tuple[str, ...] = field(default=())
    """Files or folders; for `hf` the name of a dataset or a folder."""
    input_numbers: tuple[int, ...] = ()
    """For each of `inputs`, the index of the --input that led to it; empty if `inputs` equals the
    list of --input."""
    glob: str | None = None
    """Pattern for the files of a folder; None uses the default of the kind."""
    text_column: str | None = None
    """Key or column with the text; None means `DEFAULT_TEXT_COLUMN`."""
    subset: str | None = None
    """`hf`: name of the dataset's configuration."""
    revision: str | None = None
    """`hf`: branch, tag or commit."""
    split: str | None = None
    """`hf`: split; None means `DEFAULT_SPLIT`."""
    skip_bad: bool = False
    columns: tuple[tuple[str, str], ...] = ()
    """Columns of the source to rename: the column, and the name under which it is read."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of rows and messages that are left out."""

    def column(self) -> str:
        """Return the key or column with the text."""
        return DEFAULT_TEXT_COLUMN if self.text_column is None else self.text_column

    def chosen_split(self) -> str:
        """Return the split, for `hf`."""
        return DEFAULT_SPLIT if self.split is None else self.split


def resolve_source(request: SourceRequest, *, setting: str = "--input") -> SourceRequest:
    """Return the request, with kind `hf` instead of `auto` if the input is a dataset on the hub.

    Raises DataError, which names `setting`, for a file or folder that does not exist.
    """
    if request.kind != "auto" or not request.inputs:
        return request
    given = request.inputs[0]
    if "/" in given:
        require_one_meaning(given, setting=setting, kind="dataset", error=UsageError)
    if len(request.inputs) > 1 or home_path(given).exists():
        paths = [home_path(each) for each in request.inputs]
        missing = next((each for each in paths if not each.exists()), None)
        if missing is not None:
            raise DataError(
                f"{setting} {missing}: file or folder not found. Correct the path; a dataset of "
                "the hub must be the only input."
            )
        return replace(request, inputs=tuple(map(str, paths)))
    is_path = given.startswith(("/", "./", "../", "~")) or Path(given).suffix.lower() in _SUFFIXES
    if is_path or "/" not in given or HubName.parse(given) is None:
        raise DataError(
            f"{setting} {given}: file or folder not found. Correct the path, or use a dataset of "
            "the hub, OWNER/NAME."
        )
    return replace(request, kind="hf")


def check_flags(request: SourceRequest) -> None:
    """Raise UsageError for flags that cannot be combined."""
    kind, count = request.kind, len(request.inputs)
    if kind == "stdlib" and count:
        raise UsageError(
            "--source stdlib reads the source files of the running Python. Leave out --input."
        )
    if kind == "hf" and count != 1:
        raise UsageError(
            "--source hf needs exactly one --input: a dataset's name (owner/name) or a folder."
        )
    if kind == "openwebtext" and count > 1:
        raise UsageError("--source openwebtext accepts at most one --input: a folder with a copy.")
    if kind in _FILE_KINDS and not count:
        raise UsageError(f"--source {kind} needs --input with at least one file or folder.")
    if kind not in _FILE_KINDS and request.glob is not None:
        raise UsageError(f"--glob cannot be used with --source {kind}. Leave out --glob.")
    if request.glob is not None and not any(home_path(each).is_dir() for each in request.inputs):
        raise UsageError(
            f"--glob {shown(request.glob)} selects files of a folder, but the input is not a "
            "folder. Leave out --glob."
        )
    if kind in ("text", "stdlib") and request.text_column is not None:
        raise UsageError(
            f"--text-column cannot be used with --source {kind}, which reads whole files. Leave "
            "out --text-column."
        )
    hf_flags = {
        "--config": request.subset,
        "--revision": request.revision,
        "--split": request.split,
    }
    given = [flag for flag, value in hf_flags.items() if value is not None]
    if kind != "hf" and given:
        raise UsageError(
            f"{' and '.join(given)} cannot be used with --source {kind}, only with --source hf."
        )
    if kind == "hf" and request.revision is not None and Path(request.inputs[0]).is_dir():
        raise UsageError(
            f"--revision needs a dataset of the hub; --input {request.inputs[0]} is a local "
            "folder. Leave out --revision, or use the name of a dataset as --input."
        )
