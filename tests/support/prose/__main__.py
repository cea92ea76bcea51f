"""`python -m tests.support.prose [PATH ...]`: finds wordings of phrases.toml in the tracked files.

Prints a line per finding; the exit status is 1 if there are any. An unused exception is a finding,
too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.prose.texts import Text, texts_of

ROOT = Path(__file__).parents[3]
MOST_EXCEPTIONS = 20


@dataclass(frozen=True, slots=True)
class Phrase:
    """A wording to avoid, with what to write instead."""

    pattern: re.Pattern[str]
    better: str
    allowed: re.Pattern[str] | None

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches of the wording, except inside an allowed wording."""
        spans = [each.span() for each in self.allowed.finditer(text)] if self.allowed else []
        for match in self.pattern.finditer(text):
            if not any(start <= match.start() and match.end() <= end for start, end in spans):
                yield match


@dataclass(frozen=True, slots=True)
class Excuse:
    """An exception for texts that contain `contains`, with its `reason`."""

    path: str
    contains: str
    reason: str


def read_phrases() -> tuple[list[Phrase], list[Excuse]]:
    """Read phrases.toml. Raises ValueError for more than MOST_EXCEPTIONS exceptions."""
    raw = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text(encoding="utf-8"))
    phrases = [
        Phrase(
            _words(each["pattern"]),
            each["better"],
            _words(each["except"]) if "except" in each else None,
        )
        for each in raw["phrase"]
    ]
    exceptions = [Excuse(**each) for each in raw.get("exception", [])]
    if len(exceptions) > MOST_EXCEPTIONS:
        raise ValueError(f"{len(exceptions)} exceptions: at most {MOST_EXCEPTIONS}")
    return phrases, exceptions


def _words(pattern: str) -> re.Pattern[str]:
    between_words = pattern.replace(" ", r"\s+")
    return re.compile(rf"(?<![\w-])(?:{between_words})(?![\w-])", re.IGNORECASE)


def findings_in(texts: Sequence[Text], phrases: Sequence[Phrase]) -> Iterator[tuple[Text, str]]:
    """Yield each text with a wording to avoid, with a line about it."""
    for text in texts:
        for phrase in phrases:
            for match in phrase.find(text.text):
                line = text.line + text.text.count("\n", 0, match.start())
                found = " ".join(match.group().split())
                yield text, f"{text.path}:{line}: {found!r}; better: {phrase.better}"


def main(arguments: Sequence[str]) -> int:
    """Lint the tracked files, or those below the given paths."""
    phrases, exceptions = read_phrases()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *arguments], cwd=ROOT, capture_output=True, check=True
    )
    texts = [
        text
        for path in sorted(filter(None, listed.stdout.decode().split("\0")))
        if (ROOT / path).is_file()
        for text in texts_of(path, ROOT)
    ]
    used: set[Excuse] = set()
    count = 0
    for text, line in findings_in(texts, phrases):
        excuse = next(
            (e for e in exceptions if e.path == text.path and e.contains in text.text), None
        )
        if excuse is not None:
            used.add(excuse)
            continue
        print(line)
        count += 1
    if not arguments:
        for each in exceptions:
            if each not in used:
                print(f"phrases.toml: the exception for {each.path} excuses nothing; delete it")
                count += 1
    print(f"{count} findings in {len(texts)} texts", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
