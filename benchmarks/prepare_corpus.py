"""`prepare` on a large generated corpus, and on a part of it against nanoGPT's own script.

    python -m benchmarks.prepare_corpus --mb 2000 [--nanogpt CHECKOUT --peer-mb 200]

The corpus is made from the standard library's text (`benchmarks/corpus.py` says how) as JSON lines
in a temporary folder, and deleted at the end. Timed is the whole command, Python's start and
imports included, with reading, tokenizing, checking samples against tiktoken, writing, hashing and
flushing to the disk; its peak memory is the kernel's high-water mark. nanoGPT's
data/openwebtext/prepare.py (`benchmarks/peers/prepare_nanogpt.py` says how) and this project then
prepare the first `--peer-mb` of the corpus, and the tokens of both are counted. `ratio` is between
the whole commands, `ratio_loaded` leaves out what the peer takes to read the files in, `cpu_ratio`
is of the processors' time, which other work on the machine disturbs less. A table goes to
stderr, one JSON object to stdout; the exit status is 1 when a bound is missed or the tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.corpus import write_corpus
from benchmarks.machine import describe_machine
from benchmarks.prepare import stdlib_texts
from payload.formats.data_folder import TRAIN_NAME, VAL_NAME

SEED = 2357
RATIO_BOUND = 5.0
PEAK_BOUND_BYTES = 2_000_000_000
_REPO = Path(__file__).parent.parent
# Text, tokens of both, and what datasets keeps of each: its Arrow files hold 8-byte ids.
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
    """A process that ended well, with all that it started."""

    report: dict[str, Any]
    """The last line of its stdout."""
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Peak of the largest of its processes."""

    def tokens(self) -> int:
        """Return the tokens of both splits, by this project's report."""
        return int(self.report["train_tokens"] + self.report["val_tokens"])


def main(argv: Sequence[str]) -> int:
    """Generate, measure, print."""
    arguments = _parser().parse_args(argv)
    peer_bytes = arguments.peer_mb * 1_000_000 if arguments.nanogpt else 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        _require_room(folder, text_bytes=arguments.mb * 1_000_000, peer_bytes=peer_bytes)
        result = {"benchmark": "prepare_corpus"} | _alone(folder, arguments.mb * 1_000_000)
        if peer_bytes:
            result |= _against_peer(folder, peer_bytes, checkout=arguments.nanogpt.resolve())
    versions = {name: version(name) for name in ("gigatoken", "tiktoken", "datasets", "numpy")}
    result |= {"versions": versions, "machine": describe_machine()}
    print(json.dumps(result))
    return exit_status(result)


def exit_status(result: Mapping[str, Any]) -> int:
    """1 when a bound is missed or the peer, where one was asked for, has other tokens."""
    holds = result["peak_rss_bytes"] < PEAK_BOUND_BYTES
    is_fast = result.get("ratio", RATIO_BOUND) >= RATIO_BOUND
    return 0 if holds and is_fast and result.get("tokens_equal", True) else 1


def _alone(folder: Path, size_bytes: int) -> dict[str, Any]:
    """This project on the whole corpus."""
    corpus = _generate(folder / "whole", size_bytes)
    found = _ours(corpus.folder, folder / "ours")
    rate = corpus.text_bytes / found.wall_s / 1e6
    print(
        f"tileforge: {corpus.text_bytes / 1e6:,.0f} MB in {found.wall_s:.1f} s, {rate:.1f} MB/s, "
        f"{found.tokens():,} tokens, {found.cpu_s:.1f} s of the processors, peak memory "
        f"{found.peak_bytes / 1e9:.2f} GB",
        file=sys.stderr,
    )
    shutil.rmtree(corpus.folder)
    shutil.rmtree(folder / "ours")
    return {
        "text_mb": round(corpus.text_bytes / 1e6, 1),
        "tokens": found.tokens(),
        "wall_s": round(found.wall_s, 2),
        "cpu_s": round(found.cpu_s, 2),
        "mb_per_s": round(rate, 1),
        "peak_rss_bytes": found.peak_bytes,
    }


def _against_peer(folder: Path, size_bytes: int, *, checkout: Path) -> dict[str, Any]:
    """Both, one after the other, on a smaller corpus."""
    corpus = _generate(folder / "part", size_bytes)
    ours = _ours(corpus.folder, folder / "ours")
    peer_out = folder / "peer"
    peer_out.mkdir()
    script = checkout / "data" / "openwebtext" / "prepare.py"
    theirs = _run(
        [
            sys.executable,
            "-m",
            "benchmarks.peers.prepare_nanogpt",
            str(script),
            str(corpus.folder),
            peer_out,
        ],
        environment=_PEER_ENVIRONMENT | {"HF_HOME": str(folder / "hub")},
    )
    load_s = theirs.report["load_s"]
    tokens = sum((peer_out / name).stat().st_size for name in (TRAIN_NAME, VAL_NAME)) // 2
    ratio = theirs.wall_s / ours.wall_s
    loaded = (theirs.wall_s - load_s) / ours.wall_s
    print(
        f"the first {corpus.text_bytes / 1e6:,.0f} MB: tileforge {ours.wall_s:.1f} s, nanoGPT "
        f"{theirs.wall_s:.1f} s, of them {load_s:.1f} s to read them in: {ratio:.1f} times, "
        f"{loaded:.1f} without that, {theirs.cpu_s / ours.cpu_s:.1f} in the processors' time; "
        f"{ours.tokens():,} and {tokens:,} tokens",
        file=sys.stderr,
    )
    return {
        "peer_text_mb": round(corpus.text_bytes / 1e6, 1),
        "peer_ours_s": round(ours.wall_s, 2),
        "peer_ours_cpu_s": round(ours.cpu_s, 2),
        "peer_nanogpt_s": round(theirs.wall_s, 2),
        "peer_nanogpt_load_s": round(load_s, 2),
        "peer_nanogpt_cpu_s": round(theirs.cpu_s, 2),
        "peer_num_proc": theirs.report["num_proc"],
        "ratio": round(ratio, 2),
        "ratio_loaded": round(loaded, 2),
        "cpu_ratio": round(theirs.cpu_s / ours.cpu_s, 2),
        "tokens_equal": ours.tokens() == tokens,
    }


def _generate(folder: Path, size_bytes: int) -> _Corpus:
    print(f"making {size_bytes / 1e6:,.0f} MB of text", file=sys.stderr)
    folder.mkdir()
    written = write_corpus(folder, stdlib_texts(), size_bytes=size_bytes, seed=SEED)
    return _Corpus(folder, written)


def _ours(corpus: Path, out: Path) -> _Done:
    """The whole command, as a process of its own."""
    words = ["--source", "jsonl", "--input", str(corpus), "--out", str(out), "--quiet", "--json"]
    return _run([sys.executable, "-m", "payload.data", "prepare", *words], environment={})


def _run(command: Sequence[str | Path], *, environment: Mapping[str, str]) -> _Done:
    started_s = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=_REPO, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: {command[2]} ended with status {process.returncode}.")
    return _Done(
        report=json.loads(said.splitlines()[-1]),
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
    )


def _require_room(folder: Path, *, text_bytes: int, peer_bytes: int) -> None:
    # The peer's part comes when the whole corpus is gone.
    needed = max(text_bytes * _DISK_PER_TEXT_BYTE, peer_bytes * _DISK_PER_PEER_BYTE)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(
            f"error: {folder.parent} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed. "
            "Name another place with --folder, or a smaller --mb."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prepare_corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mb", type=int, default=2000, metavar="MB", help="of text (default: %(default)s)")
    add("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    add("--peer-mb", type=int, default=200, metavar="MB", help="for it (default: %(default)s)")
    add("--folder", type=Path, metavar="DIR", help="where to work (default: the system's)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
