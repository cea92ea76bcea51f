"""Splits that the names of files declare: train.jsonl, valid.jsonl and test.jsonl."""

from __future__ import annotations

import os
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
    "trainset": "train",
    "valid": "valid",
    "validation": "valid",
    "validate": "valid",
    "validset": "valid",
    "valset": "valid",
    "val": "valid",
    "dev": "valid",
    "devset": "valid",
    "eval": "valid",
    "evaluation": "valid",
    "test": "test",
    "tests": "test",
    "testing": "test",
    "testset": "test",
    "devtest": "test",
    "holdout": "test",
    "heldout": "test",
}
"""For each word that can occur in the name of a file or of its folder, the file's split."""
_PAIRS = ("holdout", "heldout")
"""Words for a split that are also written as two words, such as held-out."""
_SEPARATORS = re.compile(
    r"[\W_]+|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
)
"""Borders of words: punctuation, a letter beside a digit, and the capitals of camelCase."""


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of a source, grouped by split."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    """Test files, which are left out."""
    has_ignored_names: bool = False
    """True if file names declare splits, but none declares training data. Then all files are for
    training."""

    def read(self) -> list[Path]:
        """Return the files to read: the training files, then the validation files."""
        return [*self.train, *self.valid]

    def note(self) -> str | None:
        """Return a line about the splits; None if no file name declares a split."""
        if self.has_ignored_names:
            return (
                "splits by file name: no name declares training data, so all files are for "
                "training. To keep a file for validation, name another file train"
            )
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

    A file is for training if its name declares no split. If no file is for training, the names are
    ignored, and all files are for training. Text files may be the source code of a program, and the
    names of such files often have words such as test. So the names of text files count only if
    every name declares a split.
    """
    parents = {path.parent.absolute() for path in files}
    root = Path(os.path.commonpath(parents)) if parents else Path()
    names = [split_of(path, root) for path in files]
    if is_text and (None in names or "train" not in names):
        return SplitFiles(tuple(files))
    if "train" not in names and None not in names:
        return SplitFiles(tuple(files), has_ignored_names=len(set(names)) > 1)
    by_name = {
        name: tuple(path for path, each in zip(files, names, strict=True) if each in wanted)
        for name, wanted in (("train", ("train", None)), ("valid", ("valid",)), ("test", ("test",)))
    }
    return SplitFiles(by_name["train"], by_name["valid"], by_name["test"])


def split_of(path: Path, root: Path) -> FileSplitName | None:
    """Return the split that a file's name or the name of a parent folder declares, or None.

    The file's own folder and the folders within `root` count. If several declare a split, the
    nearest one decides.
    """
    found = split_in(path.name)
    within = path.parent.absolute().relative_to(root).parts
    for folder in (path.parent.name, *reversed(within)):
        # The whole name counts, because names such as test_project often contain one.
        found = found or SPLIT_WORDS.get("".join(_words(folder)))
    return found


def split_in(name: str) -> FileSplitName | None:
    """Return the split of the first word in a name that is in `SPLIT_WORDS`, or None."""
    words = _words(name)
    for number, word in enumerate(words):
        pair = "".join(words[number : number + 2])
        if word in SPLIT_WORDS or pair in _PAIRS:
            return SPLIT_WORDS[word if word in SPLIT_WORDS else pair]
    return None


def _words(name: str) -> list[str]:
    return [word.lower() for word in _SEPARATORS.split(name)]


def _names(files: Iterable[Path]) -> str:
    names = [shown_name(path.name) for path in files]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
