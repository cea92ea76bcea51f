"""`prepare` on a large generated corpus, and on a part of it beside nanoGPT's own script.

    python -m benchmarks.prepare_corpus --mb 2000 [--nanogpt CHECKOUT --peer-mb 200]

The corpus is generated from the standard library's text (see `benchmarks/corpus.py`) as JSON lines
in a temporary folder. The time covers the whole command: Python's start and imports, reading,
tokenizing, checking samples with tiktoken, writing, hashing and flushing to disk. Its peak memory
is the kernel's high-water mark. nanoGPT's data/openwebtext/prepare.py (see
`benchmarks/peers/prepare_nanogpt.py`) and this project then prepare the first `--peer-mb` of the
corpus, and their tokens are counted. `ratio` compares the whole commands, `ratio_loaded` leaves out
the peer's reading, and `cpu_ratio` compares CPU time, which other work on the machine disturbs
less. A table goes to stderr, one JSON object to stdout; the exit status is 1 if a bound is missed
or the tokens differ.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import write_corpus
from benchmarks.harness import REPO, Benchmark, Table
from payload.data.sources.text_files import stdlib_source
from payload.formats.data_folder import TRAIN_NAME, VAL_NAME

SEED = 2357
RATIO_BOUND = 5.0
PEAK_BOUND_BYTES = 2_000_000_000
# Text, tokens of both, and the Arrow files of datasets, which hold 8-byte ids.
_DISK_PER_TEXT_BYTE = 2
_DISK_PER_PEER_BYTE = 7
_PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True, slots=True)
class _Corpus:
    folder: Path
    text_bytes: int


@dataclass(frozen=True, slots=True)
class _Done:
    """A successful process, with its child processes."""

    report: dict[str, Any]
    """The last line of stdout, parsed as JSON."""
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Peak memory of the process or child process that needed the most."""

    def tokens(self) -> int:
        """Return the tokens of both splits from this project's report."""
        return int(self.report["train_tokens"] + self.report["val_tokens"])


def main(argv: Sequence[str]) -> int:
    """Generate the corpus and measure; return the exit status."""
    benchmark = Benchmark("prepare_corpus", __doc__)
    add = benchmark.parser.add_argument
    add("--mb", type=int, default=2000, metavar="MB", help="size of the text (default: 2000)")
    add("--nanogpt", type=Path, metavar="DIR", help="also measure nanoGPT in this checkout")
    add(
        "--peer-mb",
        type=int,
        default=200,
        metavar="MB",
        help="size of the text for nanoGPT (default: 200)",
    )
    add("--folder", type=Path, metavar="DIR", help="work folder (default: the system's)")
    arguments = benchmark.parse(argv)
    peer_bytes = arguments.peer_mb * 1_000_000 if arguments.nanogpt else 0
    labels = ("tileforge", "tileforge, part", "nanoGPT, part")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        _require_room(folder, text_bytes=arguments.mb * 1_000_000, peer_bytes=peer_bytes)
        heads = ("text MB", "seconds", "MB/s", "CPU s", "peak GB", "tokens")
        table = benchmark.table(*heads, labels=labels)
        result = _alone(table, folder, arguments.mb * 1_000_000)
        if peer_bytes:
            result |= _against_peer(table, folder, peer_bytes, checkout=arguments.nanogpt.resolve())
    benchmark.finish(result, packages=("gigatoken", "tiktoken", "datasets", "numpy"))
    return exit_status(result)


def exit_status(result: Mapping[str, Any]) -> int:
    """Return 1 if a bound is missed or the peer's tokens differ."""
    holds = result["peak_rss_bytes"] < PEAK_BOUND_BYTES
    is_fast = result.get("ratio", RATIO_BOUND) >= RATIO_BOUND
    return 0 if holds and is_fast and result.get("tokens_equal", True) else 1


def _alone(table: Table, folder: Path, size_bytes: int) -> dict[str, Any]:
    """Measure this project on the whole corpus."""
    corpus = _generate(folder / "whole", size_bytes)
    ours = _ours(corpus.folder, folder / "ours")
    _add_row(table, "tileforge", corpus, ours, tokens=ours.tokens())
    shutil.rmtree(corpus.folder)
    shutil.rmtree(folder / "ours")
    return {
        "text_mb": round(corpus.text_bytes / 1e6, 1),
        "tokens": ours.tokens(),
        "wall_s": round(ours.wall_s, 2),
        "cpu_s": round(ours.cpu_s, 2),
        "mb_per_s": round(corpus.text_bytes / ours.wall_s / 1e6, 1),
        "peak_rss_bytes": ours.peak_bytes,
    }


def _against_peer(table: Table, folder: Path, size_bytes: int, *, checkout: Path) -> dict[str, Any]:
    """Measure both, one after the other, on a smaller corpus."""
    corpus = _generate(folder / "part", size_bytes)
    ours = _ours(corpus.folder, folder / "ours")
    peer_out = folder / "peer"
    peer_out.mkdir()
    script = checkout / "data" / "openwebtext" / "prepare.py"
    module = [sys.executable, "-m", "benchmarks.peers.prepare_nanogpt"]
    theirs = _run(
        [*module, str(script), str(corpus.folder), str(peer_out)],
        environment=_PEER_ENVIRONMENT | {"HF_HOME": str(folder / "hub")},
    )
    load_s = theirs.report["load_s"]
    tokens = sum((peer_out / name).stat().st_size for name in (TRAIN_NAME, VAL_NAME)) // 2
    _add_row(table, "tileforge, part", corpus, ours, tokens=ours.tokens())
    _add_row(table, "nanoGPT, part", corpus, theirs, tokens=tokens)
    return {
        "peer_text_mb": round(corpus.text_bytes / 1e6, 1),
        "peer_ours_s": round(ours.wall_s, 2),
        "peer_ours_cpu_s": round(ours.cpu_s, 2),
        "peer_nanogpt_s": round(theirs.wall_s, 2),
        "peer_nanogpt_load_s": round(load_s, 2),
        "peer_nanogpt_cpu_s": round(theirs.cpu_s, 2),
        "peer_num_proc": theirs.report["num_proc"],
        "ratio": round(theirs.wall_s / ours.wall_s, 2),
        "ratio_loaded": round((theirs.wall_s - load_s) / ours.wall_s, 2),
        "cpu_ratio": round(theirs.cpu_s / ours.cpu_s, 2),
        "tokens_equal": ours.tokens() == tokens,
    }


def _add_row(table: Table, name: str, corpus: _Corpus, done: _Done, *, tokens: int) -> None:
    rate = corpus.text_bytes / done.wall_s / 1e6
    cells = (f"{corpus.text_bytes / 1e6:,.0f}", f"{done.wall_s:.1f}", f"{rate:.1f}")
    table.row(name, *cells, f"{done.cpu_s:.1f}", f"{done.peak_bytes / 1e9:.2f}", f"{tokens:,}")


def _generate(folder: Path, size_bytes: int) -> _Corpus:
    print(f"generating {size_bytes / 1e6:,.0f} MB of text", file=sys.stderr)
    folder.mkdir()
    written = write_corpus(folder, _stdlib_texts(), size_bytes=size_bytes, seed=SEED)
    return _Corpus(folder, written)


def _ours(corpus: Path, out: Path) -> _Done:
    """Run the whole command in a separate process."""
    options = ["--source", "jsonl", "--input", str(corpus), "--out", str(out), "--quiet", "--json"]
    return _run([sys.executable, "-m", "payload.data", "prepare", *options], environment={})


def _run(command: Sequence[str | Path], *, environment: Mapping[str, str]) -> _Done:
    started_s = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=REPO, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: {command[2]} ended with status {process.returncode}.")
    return _Done(
        report=json.loads(output.splitlines()[-1]),
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
    )


def _require_room(folder: Path, *, text_bytes: int, peer_bytes: int) -> None:
    # The whole corpus is deleted before the peer's part is generated.
    needed = max(text_bytes * _DISK_PER_TEXT_BYTE, peer_bytes * _DISK_PER_PEER_BYTE)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(
            f"error: {folder.parent} has {free / 1e9:.1f} GB free and needs {needed / 1e9:.1f}. "
            "Choose another --folder or a smaller --mb."
        )


def _stdlib_texts() -> list[bytes]:
    """Return the documents of `prepare --source stdlib`."""
    source = stdlib_source(skip_bad=False)
    source.identity()
    source.survey()
    return [piece for batch in source.batches({}) for piece in batch.pieces]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
