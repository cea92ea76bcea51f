"""A source as the command line names it, and which of its flags go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from payload.core.errors import UsageError

SourceKind = Literal["openwebtext", "text", "jsonl", "parquet", "csv", "hf", "stdlib"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
_FILE_KINDS = ("text", "jsonl", "parquet", "csv")
DEFAULT_TEXT_COLUMN = "text"
DEFAULT_SPLIT = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """A source as the command line names it."""

    kind: SourceKind
    inputs: tuple[str, ...] = field(default=())
    """Files or folders; for `hf` a dataset's name or folder."""
    glob: str | None = None
    """Which files of a folder; None = the kind's own."""
    text_column: str | None = None
    """Key or column with the text; None = `DEFAULT_TEXT_COLUMN`."""
    subset: str | None = None
    """`hf`: the dataset's configuration."""
    revision: str | None = None
    """`hf`: branch, tag or commit."""
    split: str | None = None
    """`hf`: None = `DEFAULT_SPLIT`."""
    skip_bad: bool = False

    def column(self) -> str:
        """Key or column with the text."""
        return DEFAULT_TEXT_COLUMN if self.text_column is None else self.text_column

    def chosen_split(self) -> str:
        """`hf`: which split."""
        return DEFAULT_SPLIT if self.split is None else self.split


def check_flags(request: SourceRequest) -> None:
    """Raise UsageError for flags that do not go together."""
    kind, count = request.kind, len(request.inputs)
    if kind == "stdlib" and count:
        raise UsageError(
            "--source stdlib reads the running Python's own source; leave out --input."
        )
    if kind == "hf" and count != 1:
        raise UsageError(
            "--source hf needs one --input: a dataset's name (owner/name) or a folder."
        )
    if kind == "openwebtext" and count > 1:
        raise UsageError("--source openwebtext takes at most one --input: a folder with a copy.")
    if kind in _FILE_KINDS and not count:
        raise UsageError(f"--source {kind} needs --input with at least one file or folder.")
    if kind not in _FILE_KINDS and request.glob is not None:
        raise UsageError(f"--glob chooses files of a folder; --source {kind} has no use for it.")
    if kind in ("text", "stdlib") and request.text_column is not None:
        raise UsageError(
            f"--text-column names a key or column; --source {kind} takes whole files and has none."
        )
    of_hf = {
        "--config": request.subset,
        "--revision": request.revision,
        "--split": request.split,
    }
    given = [flag for flag, value in of_hf.items() if value is not None]
    if kind != "hf" and given:
        raise UsageError(f"{' and '.join(given)} belongs to --source hf, not {kind}.")
    if kind == "hf" and request.revision is not None and Path(request.inputs[0]).is_dir():
        raise UsageError(
            f"--revision names a state of a dataset at the hub; --input {request.inputs[0]} is a "
            "folder here. Leave one of them out."
        )
