"""`prepare --source stdlib` against tiktoken's own batch encoder, on the same text in one run.

    python -m benchmarks.prepare [--rounds N]

Each round is the command in a process of its own, as a user starts it. Timed are, each within the
one before: the whole command with Python's start and imports (`ratio_command`); `prepare` from its
call on, so with finding and reading 31 MB of files, loading the tokenizers, tokenizing, checking
samples against tiktoken, writing, hashing and flushing to the disk (`ratio_whole`); and tokenizing,
checking, writing and hashing alone (`ratio`), since this source is read while it is counted. Timed
for tiktoken: its `encode_ordinary_batch` alone, loaded beforehand, with as many threads as cores,
on texts in memory. The two run in turn; the best round of each counts. `cpu_ratio` is of the
processors' time, of the whole command and of tiktoken's encoder, which other work on the machine
disturbs less. A table goes to stderr, one JSON object to stdout; the exit status is 1 when the
tokens differ or the bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.data.sources.split import choose_split
from payload.data.sources.text_files import STDLIB_VAL_FRACTION, stdlib_source
from payload.data.tokenizers.gpt2 import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding
from payload.formats.data_folder import TRAIN_NAME, VAL_NAME, token_dtype

SEED = 2357
DTYPE = token_dtype(VOCAB_SIZE)
RATIO_BOUND = 5
"""Bound of `ratio_whole`; the exit status tells if it is reached."""
_REPO = Path(__file__).parent.parent


def main(argv: Sequence[str]) -> int:
    """Measure, compare the tokens, print; 1 when they differ or the bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="COUNT")
    args = parser.parse_args(argv)
    texts = [text.decode("utf-8") for text in stdlib_texts()]
    threads = os.cpu_count() or 1
    gpt2_encoding()
    rounds = [_measure(texts, threads) for _ in range(args.rounds)]
    result = _summarise(rounds, texts, threads)
    _print_table(result)
    print(json.dumps(result))
    return 0 if result["tokens_equal"] and result["bound_reached"] else 1


@dataclass(frozen=True, slots=True)
class _Round:
    work_s: float
    whole_s: float
    command_s: float
    command_cpu_s: float
    tiktoken_s: float
    tiktoken_cpu_s: float
    tokens: int
    is_equal: bool
    encoder: str


def _measure(texts: list[str], threads: int) -> _Round:
    """One round of each. The 15 million Python integers of tiktoken's do not outlive it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "out"
        started_s, before_s = time.perf_counter(), _cpu_s(resource.RUSAGE_CHILDREN)
        report = prepare_in_a_process(folder)
        command_s = time.perf_counter() - started_s
        command_cpu_s = _cpu_s(resource.RUSAGE_CHILDREN) - before_s
        started_s, before_s = time.perf_counter(), _cpu_s(resource.RUSAGE_SELF)
        documents = gpt2_encoding().encode_ordinary_batch(texts, num_threads=threads)
        return _Round(
            work_s=report["worked_s"],
            whole_s=report["wall_s"],
            command_s=command_s,
            command_cpu_s=command_cpu_s,
            tiktoken_s=time.perf_counter() - started_s,
            tiktoken_cpu_s=_cpu_s(resource.RUSAGE_SELF) - before_s,
            tokens=sum(map(len, documents)) + len(documents),
            is_equal=_same(folder, documents),
            encoder=report["encoder"],
        )


def _cpu_s(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def prepare_in_a_process(folder: Path) -> dict[str, Any]:
    """Make `folder` by the command; its report."""
    words = ["--source", "stdlib", "--out", str(folder), "--seed", str(SEED), "--quiet", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "payload.data", "prepare", *words],
        cwd=_REPO,
        stdout=subprocess.PIPE,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _summarise(rounds: list[_Round], texts: list[str], threads: int) -> dict[str, object]:
    text_mb = sum(len(text.encode()) for text in texts) / 1e6
    best = {
        name: min(getattr(entry, name) for entry in rounds)
        for name in ("work_s", "whole_s", "command_s", "tiktoken_s")
    }
    ratios = {
        name: best["tiktoken_s"] / best[seconds]
        for name, seconds in (
            ("ratio", "work_s"),
            ("ratio_whole", "whole_s"),
            ("ratio_command", "command_s"),
        )
    }
    cpu = {
        name: min(getattr(entry, name) for entry in rounds)
        for name in ("command_cpu_s", "tiktoken_cpu_s")
    }
    return {
        "benchmark": "prepare",
        "text_mb": round(text_mb, 3),
        "documents": len(texts),
        "tokens": rounds[0].tokens,
        "rounds": len(rounds),
        **{name: round(seconds, 3) for name, seconds in best.items()},
        **{
            f"{name.removesuffix('_s')}_mb_per_s": round(text_mb / seconds, 1)
            for name, seconds in best.items()
        },
        **{name: round(seconds, 3) for name, seconds in cpu.items()},
        "cpu_ratio": round(cpu["tiktoken_cpu_s"] / cpu["command_cpu_s"], 2),
        "whole_s_rounds": [round(entry.whole_s, 3) for entry in rounds],
        "tiktoken_s_rounds": [round(entry.tiktoken_s, 3) for entry in rounds],
        "tiktoken_threads": threads,
        **{name: round(ratio, 2) for name, ratio in ratios.items()},
        "bound": RATIO_BOUND,
        "bound_reached": ratios["ratio_whole"] >= RATIO_BOUND,
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


def _same(folder: Path, documents: list[list[int]]) -> bool:
    """Return True if both files hold these documents' tokens, each with its end."""
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
        ("tileforge, without reading and start-up", "work", result["ratio"]),
        ("tileforge, all of prepare", "whole", result["ratio_whole"]),
        ("tileforge, with Python's start", "command", result["ratio_command"]),
        ("tiktoken batch", "tiktoken", 1),
    )
    table = Table("seconds", "MB/s", "ratio", labels=[label for label, _, _ in rows])
    for label, name, ratio in rows:
        table.row(label, str(result[f"{name}_s"]), str(result[f"{name}_mb_per_s"]), str(ratio))
    table.note(
        f"processors' time: {result['command_cpu_s']} s of the command, "
        f"{result['tiktoken_cpu_s']} s of tiktoken's, {result['cpu_ratio']} times; "
        f"tokens equal: {result['tokens_equal']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
