"""Splits that the names of files declare: train.jsonl, valid.jsonl and test.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from payload.core.printable_text import shown_name

FileSplitName = Literal["train", "valid", "test"]
SPLIT_WORDS: dict[str, FileSplitName] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "eval": "valid",
    "test": "test",
}
"""For each word that can occur in the name of a file or of its folder, the file's split."""
_SEPARATORS = re.compile(r"[-_. ]+")


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of a source by their split."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    """Test files, which are left out."""

    def read(self) -> list[Path]:
        """Return the files to read: the training files, then the validation files."""
        return [*self.train, *self.valid]

    def note(self) -> str | None:
        """Return a line about the splits; None if the names declare none."""
        if not self.valid and not self.test:
            return None
        parts = [
            f"{name} {use}: {_names(files)}"
            for name, use, files in (
                ("train", "for training", self.train),
                ("valid", "for validation", self.valid),
                ("test", "left out", self.test),
            )
            if files
        ]
        more = "" if self.valid else "; validation rows are chosen from the training files"
        return f"splits by file name: {'; '.join(parts)}{more}"


def split_files(files: Sequence[Path], *, is_text: bool = False) -> SplitFiles:
    """Return the files by split.

    If no name declares training data, the names are ignored, and all files are for training. A file
    whose name declares no split is for training, too. Text files may be the source files of a
    program, whose names often have words such as test. So the names of text files count only if
    each declares a split.
    """
    names = [split_of(path) for path in files]
    if "train" not in names or (is_text and None in names):
        return SplitFiles(tuple(files))
    by_name = {
        name: tuple(path for path, each in zip(files, names, strict=True) if each in wanted)
        for name, wanted in (("train", ("train", None)), ("valid", ("valid",)), ("test", ("test",)))
    }
    return SplitFiles(by_name["train"], by_name["valid"], by_name["test"])


def split_of(path: Path) -> FileSplitName | None:
    """Return the split that the name of a file or of its folder declares, or None."""
    words = _SEPARATORS.split(path.name.lower())
    found = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
    return found or SPLIT_WORDS.get(path.parent.name.lower())


def _names(files: Iterable[Path]) -> str:
    names = [shown_name(path.name) for path in files]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
