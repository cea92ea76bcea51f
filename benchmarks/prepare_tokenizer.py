"""`prepare --source stdlib --tokenizer FOLDER` against `tokenizers`, on the same text in one run.

    python -m benchmarks.prepare_tokenizer FOLDER [--rounds N]

Each round is the command in a process of its own; timed is its work without start-up and counting.
Timed for `tokenizers`: its `encode_batch_fast` alone, on all cores, on texts in memory. The two run
in turn; the best round of each counts. Every token of every document is compared with those of
transformers' AutoTokenizer. One JSON object goes to stdout; the exit status is 1 when a token
differs or, where gigatoken was used, the bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.prepare import SEED, stdlib_texts
from payload.data.sources.split import choose_split
from payload.data.sources.text_files import STDLIB_VAL_FRACTION
from payload.formats.data_folder import TRAIN_NAME, VAL_NAME, load_meta

RATIO_BOUND = 3
_REPO = Path(__file__).parent.parent


def main(argv: Sequence[str]) -> int:
    """Measure, compare the tokens, print; 1 when they differ or the bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prepare_tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3, metavar="COUNT")
    args = parser.parse_args(argv)
    texts = [text.decode("utf-8") for text in stdlib_texts()]
    text_mb = sum(len(text.encode()) for text in texts) / 1e6
    ours, theirs, is_equal, encoder = [], [], True, ""
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            report = _prepare(args.folder, Path(name) / "out")
            if number == 0:
                is_equal = _same(Path(name) / "out", args.folder, texts)
        ours.append(report["worked_s"])
        encoder = report["encoder"]
        theirs.append(_tokenizers_s(args.folder, texts))
    ratio = min(theirs) / min(ours)
    must_reach = encoder.startswith("gigatoken")
    result = {
        "benchmark": "prepare_tokenizer",
        "text_mb": round(text_mb, 3),
        "documents": len(texts),
        "mb_per_s": round(text_mb / min(ours), 1),
        "tokenizers_mb_per_s": round(text_mb / min(theirs), 1),
        "ratio": round(ratio, 2),
        "bound": RATIO_BOUND if must_reach else None,
        "tokens_equal": is_equal,
        "encoder": encoder,
        "threads": os.cpu_count(),
        "work_s_rounds": ours,
        "tokenizers_s_rounds": [round(each, 3) for each in theirs],
        "versions": {name: version(name) for name in ("gigatoken", "tokenizers", "transformers")},
        "machine": describe_machine(),
    }
    print(json.dumps(result))
    return 0 if is_equal and (ratio >= RATIO_BOUND or not must_reach) else 1


def _prepare(folder: Path, out: Path) -> dict[str, Any]:
    words = ["--source", "stdlib", "--tokenizer", str(folder.resolve()), "--out", str(out)]
    words += ["--seed", str(SEED), "--quiet", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "payload.data", "prepare", *words],
        cwd=_REPO,
        stdout=subprocess.PIPE,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _tokenizers_s(folder: Path, texts: list[str]) -> float:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    began_s = time.perf_counter()
    tokenizer.encode_batch_fast(texts)
    return time.perf_counter() - began_s


def _same(out: Path, folder: Path, texts: list[str]) -> bool:
    """Say whether both files hold transformers' tokens of each text, each with its end."""
    from transformers import AutoTokenizer

    tokenizer, meta = AutoTokenizer.from_pretrained(folder), load_meta(out)
    split = choose_split(documents=len(texts), val_fraction=STDLIB_VAL_FRACTION, seed=SEED)
    is_val = split.val_mask(np.arange(len(texts)))
    for name, wanted in ((TRAIN_NAME, ~is_val), (VAL_NAME, is_val)):
        chosen = [texts[i] for i in np.flatnonzero(wanted)]
        parts = [[*ids, meta.end_of_text] for ids in tokenizer(chosen)["input_ids"]]
        found = np.fromfile(out / name, dtype=meta.dtype)
        if not np.array_equal(found, np.concatenate(parts)):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
