"""Runs `python -m payload.data` as a user does, and makes its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from payload.data.__main__ import main
from payload.data.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding
from tests.support.waiting import DEADLINE_S

REPOSITORY = Path(__file__).resolve().parents[2]


def data_command(*args: object) -> list[str]:
    """Return the argv of one command."""
    return [sys.executable, "-m", "payload.data", *map(str, args)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with the repository importable, updated with `extra`.

    A PYTHONPATH in `extra` comes before the repository.
    """
    merged = {**os.environ, **(extra or {})}
    paths = [*filter(None, [(extra or {}).get("PYTHONPATH")]), str(REPOSITORY)]
    return {**merged, "PYTHONPATH": os.pathsep.join(paths)}


def run_data(
    *args: object, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command in a new process."""
    return subprocess.run(
        data_command(*args),
        cwd=REPOSITORY,
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def run_here(*args: object) -> subprocess.CompletedProcess[str]:
    """Run one command in this process."""
    words = [*map(str, args)]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def write_jsonl(path: Path, texts: Sequence[str], *, key: str = "text") -> Path:
    """Write one object a line."""
    lines = (json.dumps({key: text}) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def stdlib_texts(*, min_bytes: int) -> list[str]:
    """Return real text: the modules of this Python, repeated until there is enough."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))
    texts: list[str] = []
    size = 0
    while size < min_bytes:
        for file in files:
            texts.append(file.read_text(encoding="utf-8"))
            size += len(texts[-1])
    return texts


def reference_tokens(texts: Sequence[str]) -> npt.NDArray[np.uint16]:
    """Return the tokens that nanoGPT would write for `texts`, in order."""
    encoding = gpt2_encoding()
    tokens: list[int] = []
    for text in texts:
        tokens += [*encoding.encode_ordinary(text), END_OF_TEXT]
    return np.array(tokens, dtype=np.uint16)


def read_bin(path: Path) -> npt.NDArray[np.uint16]:
    """Read a file as nanoGPT's train.py does."""
    return np.array(np.memmap(path, dtype=np.uint16, mode="r"))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
