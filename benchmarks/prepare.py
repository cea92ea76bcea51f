"""`prepare --source stdlib` against tiktoken's own batch encoder, on the same text in one run.

    python -m benchmarks.prepare [--rounds N]

Timed for Tileforge: reading 31 MB of files, tokenizing, checking samples against tiktoken, writing
and hashing (`ratio`); and the whole command but Python's start, so with finding the files, loading
the tokenizers and flushing to the disk (`ratio_whole`). Timed for tiktoken: its
`encode_ordinary_batch` alone, with as many threads as cores, on texts in memory. The two run in
turn; the best round of each counts. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe_machine
from payload.data.meta import TRAIN_NAME, VAL_NAME
from payload.data.plan import DTYPE, PrepareSettings
from payload.data.prepare import Outcome, prepare
from payload.data.progress import Reporter
from payload.data.sources.files import STDLIB_VAL_FRACTION, stdlib_source
from payload.data.split import choose_split
from payload.data.tokenizer import END_OF_TEXT, gpt2_encoding

SEED = 2357
RATIO_BOUND = 5
"""What `ratio_whole` is to reach; the exit status says whether it did."""


def main() -> int:
    """Measure, compare the tokens, print; 1 when they differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare")
    parser.add_argument("--rounds", type=int, default=9, metavar="COUNT")
    args = parser.parse_args()
    texts = [text.decode("utf-8") for text in stdlib_texts()]
    threads = os.cpu_count() or 1
    rounds = [_measure(texts, threads) for _ in range(args.rounds)]
    result = _summarise(rounds, texts, threads)
    _print_table(result)
    print(json.dumps(result))
    return 0 if result["tokens_equal"] and result["bound_reached"] else 1


@dataclass(frozen=True, slots=True)
class _Round:
    work_s: float
    whole_s: float
    tiktoken_s: float
    tokens: int
    is_equal: bool
    encoder: str


def _measure(texts: list[str], threads: int) -> _Round:
    """One round of each. The 15 million Python integers of tiktoken's do not outlive it."""
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        outcome = _prepare(Path(folder))
        whole_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        documents = gpt2_encoding().encode_ordinary_batch(texts, num_threads=threads)
        return _Round(
            work_s=outcome.worked_s,
            whole_s=whole_s,
            tiktoken_s=time.perf_counter() - started_s,
            tokens=sum(map(len, documents)) + len(documents),
            is_equal=_same(Path(folder), documents),
            encoder=outcome.meta.encoder,
        )


def _summarise(rounds: list[_Round], texts: list[str], threads: int) -> dict[str, object]:
    text_mb = sum(len(text.encode()) for text in texts) / 1e6
    work_s = min(entry.work_s for entry in rounds)
    whole_s = min(entry.whole_s for entry in rounds)
    tiktoken_s = min(entry.tiktoken_s for entry in rounds)
    return {
        "benchmark": "prepare",
        "text_mb": round(text_mb, 3),
        "documents": len(texts),
        "tokens": rounds[0].tokens,
        "rounds": len(rounds),
        "work_s": round(work_s, 3),
        "work_mb_per_s": round(text_mb / work_s, 1),
        "whole_s": round(whole_s, 3),
        "whole_mb_per_s": round(text_mb / whole_s, 1),
        "tiktoken_s": round(tiktoken_s, 3),
        "tiktoken_mb_per_s": round(text_mb / tiktoken_s, 1),
        "tiktoken_threads": threads,
        "ratio": round(tiktoken_s / work_s, 2),
        "ratio_whole": round(tiktoken_s / whole_s, 2),
        "bound": RATIO_BOUND,
        "bound_reached": tiktoken_s / whole_s >= RATIO_BOUND,
        "tokens_equal": all(entry.is_equal for entry in rounds),
        "encoder": rounds[0].encoder,
        "versions": {name: version(name) for name in ("gigatoken", "tiktoken", "numpy")},
        "machine": f"{describe_machine()}, Python {platform.python_version()}",
    }


def stdlib_texts() -> list[bytes]:
    """The documents of `--source stdlib`."""
    source = stdlib_source(skip_bad=False)
    source.identity()
    source.survey()
    return [piece for batch in source.batches({}) for piece in batch.pieces]


def _prepare(folder: Path) -> Outcome:
    settings = PrepareSettings(
        out=folder, val_fraction=STDLIB_VAL_FRACTION, seed=SEED, force=True, shaping=("stdlib",)
    )
    return prepare(stdlib_source(skip_bad=False), settings, Reporter(quiet=True))


def _same(folder: Path, documents: list[list[int]]) -> bool:
    """Whether both files hold these documents' tokens, each with its end."""
    split = choose_split(documents=len(documents), val_fraction=STDLIB_VAL_FRACTION, seed=SEED)
    is_val = split.val_mask(np.arange(len(documents)))
    for name, wanted in ((TRAIN_NAME, ~is_val), (VAL_NAME, is_val)):
        parts: list[npt.NDArray[np.generic]] = [
            np.array([*documents[i], END_OF_TEXT], dtype=DTYPE) for i in np.flatnonzero(wanted)
        ]
        if not np.array_equal(np.fromfile(folder / name, dtype=DTYPE), np.concatenate(parts)):
            return False
    return True


def _print_table(result: dict[str, object]) -> None:
    rows = (
        ("", "seconds", "MB/s"),
        ("tileforge, the work", result["work_s"], result["work_mb_per_s"]),
        ("tileforge, all of it", result["whole_s"], result["whole_mb_per_s"]),
        ("tiktoken batch", result["tiktoken_s"], result["tiktoken_mb_per_s"]),
    )
    for name, seconds, rate in rows:
        print(f"{name:<22}{seconds:>10}{rate:>10}", file=sys.stderr)
    print(f"{result['ratio']} times, {result['ratio_whole']} with all of it", file=sys.stderr)
    print(f"tokens equal: {result['tokens_equal']}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
