"""nanoGPT's data/openwebtext/prepare.py on local files; one process of `benchmarks.prepare_corpus`.

The script runs unmodified, except for changes that a machine without the hub and a corpus of less
than two million documents need. `load_dataset` reads the given JSON lines. tiktoken's GPT-2
encoding is made from the merge ranks in this repository, which equal those that tiktoken would
fetch. `num_proc` is the number of cores. A split is written in at most as many shards as it has
documents, since 1024 would fail. The script writes train.bin and val.bin next to its copy. The last
line on stdout has the seconds of `load_dataset` and of the whole script.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import tiktoken

from payload.data.tokenizers.gpt2 import gpt2_encoding

_CHANGES = {
    "\nnum_proc = 8\n": "\nnum_proc = {cores}\n",
    " total_batches = 1024\n": " total_batches = min(1024, len(dset))\n",
}


def main(script: Path, corpus: Path, out: Path) -> None:
    """Run the script, and print one JSON object."""
    source = script.read_text(encoding="utf-8")
    cores = os.cpu_count() or 1
    for line, changed in _CHANGES.items():
        if source.count(line) != 1:
            raise SystemExit(f"error: {script} has no {line.strip()!r}; use nanoGPT at 3adf61e.")
        source = source.replace(line, changed.format(cores=cores))
    load = datasets.load_dataset
    load_s = 0.0

    def load_local(_name: str, *, num_proc: int) -> Any:
        nonlocal load_s
        started_s = time.perf_counter()
        files = sorted(map(str, corpus.glob("*.jsonl")))
        loaded = load("json", data_files=files, num_proc=num_proc)
        load_s = time.perf_counter() - started_s
        return loaded

    datasets.load_dataset = load_local
    tiktoken.get_encoding = lambda encoding_name: gpt2_encoding()
    copy = out / "prepare.py"
    copy.write_text(source, encoding="utf-8")
    started_s = time.perf_counter()
    runpy.run_path(str(copy), run_name="__main__")
    whole_s = time.perf_counter() - started_s
    print(json.dumps({"load_s": load_s, "whole_s": whole_s, "num_proc": cores}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
