"""Compares what `prepare` trains with the oracle, for a template and every row."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from payload.data.__main__ import main as data
from payload.data.reading.packed_blocks import PADDING, TRAINED, open_packed
from tests.chat_templates.conversations import ROWS, as_file_row
from tests.chat_templates.oracle import Expected, LostError, NoStopError, Oracle, Turn, runs
from tests.chat_templates.tokenizer import make_tokenizer

_LENGTH = 16384
_COPIES = 4
"""Each file has the row this often: one copy is for validation, which cannot be empty."""

RIGHT = "right"
BOTH_REFUSE = "transformers refuses too"
LOST = "refused: a part is lost"
NO_STOP = "refused: no stop token"
WRONG = "wrong"
OUTCOMES = (RIGHT, BOTH_REFUSE, LOST, NO_STOP, WRONG)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one row with one template."""

    kind: str
    """One of OUTCOMES."""
    detail: str = ""
    """The fault, or the reason of the refusal."""


def outcomes(template: str) -> dict[str, Outcome]:
    """Return the outcome of each row of ROWS with a template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder) / "tokenizer", template)
        oracle = Oracle(tokenizer)
        found = {}
        for number, (name, row) in enumerate(ROWS.items()):
            source = Path(folder) / f"{number}.jsonl"
            line = json.dumps(as_file_row(row)) + "\n"
            source.write_text(line * _COPIES, encoding="utf-8")
            found[name] = _outcome(oracle, row, source, tokenizer)
        return found


def _outcome(oracle: Oracle, row: Mapping[str, Any], source: Path, tokenizer: Path) -> Outcome:
    refused = ""
    expected = None
    try:
        expected = _expected(oracle, row)
    except LostError as error:
        refused, reason = LOST, str(error)
    except NoStopError:
        refused, reason = NO_STOP, ""
    except Exception as error:  # transformers passes on the template's error, of any class
        refused, reason = BOTH_REFUSE, repr(error)
    samples = _prepare(source, tokenizer)
    if isinstance(samples, str):
        if refused:
            return Outcome(refused, samples)
        return Outcome(WRONG, f"refused, but can be trained: {samples}")
    if expected is None:
        return Outcome(WRONG, f"trained, but: {refused} ({reason})")
    return _compare(oracle, expected, samples)


def _expected(oracle: Oracle, row: Mapping[str, Any]) -> Expected:
    """Return what the oracle expects of a row, with the arguments of calls in either form.

    In a file the arguments are text. Most templates take objects, some take text alone.
    """
    try:
        return oracle.expected(row)
    except (LostError, NoStopError):
        raise
    except Exception:
        if "tools" not in row:
            raise
        return oracle.expected(as_file_row(deepcopy(dict(row))))


Sample = tuple[tuple[int, ...], tuple[bool, ...]]


def _prepare(source: Path, tokenizer: Path) -> list[Sample] | str:
    """Return the tokens of each sample and which are trained, or the message of a refusal."""
    out = source.with_suffix("")
    words = ["prepare", "--task", "chat", "--source", "jsonl", "--input", source, "--quiet"]
    words += ["--tokenizer", tokenizer, "--sequence-length", _LENGTH, "--packing", "none"]
    words += ["--val-fraction", 1 / _COPIES, "--out", out]
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        code = data([str(word) for word in words])
    if code != 0:
        return errors.getvalue().strip()
    blocks = open_packed(out, split="train", sequence_length=_LENGTH)
    copies = Counter(_samples(blocks))
    assert set(copies.values()) == {_COPIES - 1}, copies.values()
    return list(copies)


def _samples(blocks: Any) -> Iterator[Sample]:
    every = np.arange(blocks.num_blocks(), dtype=np.int64)
    for tokens, marks in zip(blocks.tokens.whole(every), blocks.marks_of(every), strict=True):
        used = (marks & PADDING) == 0
        yield tuple(tokens[used].tolist()), tuple(((marks[used] & TRAINED) != 0).tolist())


def _compare(oracle: Oracle, expected: Expected, samples: list[Sample]) -> Outcome:
    allowed = [oracle.tokens_of(text) for text in expected.texts]
    for tokens, _ in samples:
        if tokens not in allowed:
            return Outcome(WRONG, f"text: {oracle.decoded(tokens)!r}")
    found = sorted(
        (turn for tokens, trained in samples for turn in runs(tokens, trained)),
        key=lambda turn: turn.context,
    )
    wanted = sorted(expected.turns, key=lambda turn: turn.context)
    if found == wanted:
        return Outcome(RIGHT)
    return Outcome(
        WRONG,
        f"trained {[_shown(oracle, each) for each in found]}, "
        f"expected {[_shown(oracle, each) for each in wanted]}",
    )


def _shown(oracle: Oracle, turn: Turn) -> str:
    start = len(turn.context) - turn.count
    before = oracle.decoded(turn.context[max(0, start - 4) : start])
    return f"{before}⟦{oracle.decoded(turn.context[start:])}⟧"
