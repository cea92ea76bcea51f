"""Labelled texts for `benchmarks.classify`: descriptions of Debian's packages and their sections.

The one-line descriptions come from apt's package lists. Packages that are built from one source
often have almost the same description ("NAME - development files", "NAME - documentation"). So the
texts are divided by source: all texts of a source are in the same part.
"""

from __future__ import annotations

import csv
import io
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMS = frozenset(
    {
        "cli-mono",
        "debug",
        "devel",
        "doc",
        "fonts",
        "gnu-r",
        "golang",
        "haskell",
        "interpreters",
        "introspection",
        "java",
        "javascript",
        "kernel",
        "libdevel",
        "libs",
        "lisp",
        "localization",
        "metapackages",
        "misc",
        "ocaml",
        "oldlibs",
        "perl",
        "php",
        "python",
        "ruby",
        "rust",
        "translations",
        "zope",
    }
)
"""Sections that state a package's form or language; all other sections state a topic."""
_SEED = 20261123


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PackageText:
    """The description of a package."""

    text: str
    label: str
    """Section without its area: `non-free/net` becomes `net`."""
    source: str
    """Name of the source package, which several packages can share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Training, validation and held-out texts."""

    train: list[PackageText]
    validation: list[PackageText]
    """Texts for the choice of a recipe."""
    held_out: list[PackageText]
    """Texts with which the chosen recipe is measured once."""


def packages() -> Iterator[PackageText]:
    """Yield the packages in apt's lists, without duplicate descriptions."""
    done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True)
    return read_packages(done.stdout.decode("utf-8", "replace"))


def read_packages(listed: str) -> Iterator[PackageText]:
    """Yield the packages of a list in the format of Debian's control files."""
    seen = set()
    for paragraph in listed.split("\n\n"):
        lines = (line for line in paragraph.split("\n") if not line.startswith(" "))
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        text = (fields.get("Description") or fields.get("Description-en") or "").strip()
        label = fields.get("Section", "").rpartition("/")[2]
        # The source's version follows its name if it differs from the package's.
        source = (fields.get("Source") or fields.get("Package", "")).partition(" ")[0]
        if text and label and text not in seen:
            seen.add(text)
            yield PackageText(text=text, label=label, source=source)


def divide(
    found: Iterable[PackageText],
    *,
    labels: int,
    train: int,
    validation: int,
    held_out: int | None = None,
    by_source: bool = True,
) -> Parts:
    """Return texts of the most frequent labels in parts of the given sizes; None = the rest.

    The same lists give the same parts. Without `by_source`, a source can have texts in several
    parts.
    """
    rows = sorted(found)
    counts = Counter(row.label for row in rows)
    by_count = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    kept = {label for label, _ in by_count[:labels]}
    rows = [row for row in rows if row.label in kept]
    groups = [row.source if by_source else row.text for row in rows]
    names = sorted(set(groups))
    drawn = np.random.default_rng(_SEED).permutation(len(names)).tolist()
    place_of = dict(zip(names, drawn, strict=True))
    order = sorted(range(len(rows)), key=lambda number: (place_of[groups[number]], number))
    parts: list[list[PackageText]] = []
    taken: set[str] = set()
    for size in (train, validation, held_out):
        # A source at the end of a part has no texts in the next part.
        order = [number for number in order if groups[number] not in taken]
        chosen, order = order[:size], order[len(order[:size]) :]
        taken.update(groups[number] for number in chosen)
        parts.append([rows[number] for number in chosen])
    return Parts(train=parts[0], validation=parts[1], held_out=parts[2])


def write_csv(path: Path, rows: Sequence[PackageText], *, ending: str) -> None:
    """Write a csv with the columns `text`, which ends with `ending`, and `label`.

    A file with the same content is left alone, since `prepare` also compares its input's time.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(("text", "label"))
    writer.writerows((row.text + ending, row.label) for row in rows)
    content = buffer.getvalue().encode()
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
