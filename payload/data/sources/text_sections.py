"""Splits one large text file into documents: at form feeds, at blank lines, or by size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from payload.data.sources.documents import MIB, PIECE_BYTES, character_start, last_safe_cut

Cut = Literal["form feed", "blank line", "line end", "space", "size", "end"]

_SECTIONS = 200
"""Intended number of sections. A tenth of them is enough to measure a loss."""
_LARGEST_TARGET_BYTES = 64 * 1024
_SMALLEST_LIMIT_BYTES = 4096
_LIMIT_TARGETS = 8
_READ_BYTES = MIB
_LONGEST_CHARACTER_BYTES = 4
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Rules for splitting a file.

    The rules depend only on the file, so a resumed run uses the same rules.

    Without form feeds, a section ends at the first blank line after `target_bytes`. A section that
    reaches `limit_bytes` ends at its last line break, or at white space if it has no line break.
    """

    at_form_feeds: bool
    target_bytes: int
    limit_bytes: int
    documents: int = 0
    note: str = ""

    def sections(self, path: Path, *, offset: int = 0) -> Iterator[tuple[bytes, int, Cut]]:
        """Yield each non-blank section, the offset after it, and the kind of cut."""
        with path.open("rb") as file:
            file.seek(offset)
            held, at_end = b"", False
            while not at_end:
                read = file.read(_READ_BYTES)
                at_end = not read
                held, start = held + read, 0
                while (found := self._cut(held, start)) is not None:
                    section, start, cut = found
                    if section.strip():
                        yield section, offset + start, cut
                held, offset = held[start:], offset + start
            if held.strip():
                yield held, offset + len(held), "end"

    def _cut(self, held: bytes, start: int) -> tuple[bytes, int, Cut] | None:
        """Return the next section, the start of the following section, and the kind of cut."""
        limit = start + self.limit_bytes
        if self.at_form_feeds:
            place = held.find(b"\f", start, limit)
            if place >= 0:
                return held[start:place], place + 1, "form feed"
        else:
            blank = _BLANK_LINE.search(held, start + self.target_bytes, limit)
            if blank is not None:
                return held[start : blank.end()], blank.end(), "blank line"
        if len(held) < limit + _LONGEST_CHARACTER_BYTES:
            return None
        # Not before half the limit, so that rare line ends do not make tiny sections.
        place = held.rfind(b"\n", start + self.limit_bytes // 2, limit) + 1
        if place:
            return held[start:place], place, "line end"
        window = held[start:limit]
        space = last_safe_cut(window)
        if space:
            return held[start : start + space], start + space, "space"
        place = character_start(held, limit)
        return held[start:place], place, "size"


def divide(path: Path) -> Division:
    """Choose the rules for the file at `path`, and count its sections. Raises OSError."""
    if _has_form_feed(path):
        by_form_feeds = _with_counts(
            path, Division(at_form_feeds=True, target_bytes=0, limit_bytes=PIECE_BYTES)
        )
        if by_form_feeds.documents > 1:
            return by_form_feeds
    target = max(1, min(_LARGEST_TARGET_BYTES, path.stat().st_size // _SECTIONS))
    limit = max(_SMALLEST_LIMIT_BYTES, _LIMIT_TARGETS * target)
    return _with_counts(path, Division(at_form_feeds=False, target_bytes=target, limit_bytes=limit))


def _with_counts(path: Path, division: Division) -> Division:
    cuts: Counter[Cut] = Counter()
    size = 0
    for section, _, cut in division.sections(path):
        cuts[cut] += 1
        size += len(section)
    documents = cuts.total()
    del cuts["end"]
    how = ", ".join(f"{count:,} at a {cut}" for cut, count in cuts.most_common())
    note = (
        f"{path} is a single file: it was split into {documents:,} documents of about "
        f"{size // max(1, documents):,} bytes ({how.replace('at a size', 'by size')}). To control "
        "the split, use several files, or one document a line with --source jsonl."
    )
    return replace(division, documents=documents, note=note)


def _has_form_feed(path: Path) -> bool:
    with path.open("rb") as file:
        return any(b"\f" in chunk for chunk in iter(lambda: file.read(_READ_BYTES), b""))
