"""A folder like a clone of the project, in which the commands of a page run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chat_data import make_model
from tests.tutorials.pages import ROOT, read_page, script
from tests.tutorials.substitutions import TABLE

_SHOWN = ("benchmarks", "bootstrap", "docs", "infra", "payload")
_LONGEST_S = 600
RunPage = Callable[[Path], str]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, a byte-level tokenizer and a chat template."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def clone() -> Iterator[Path]:
    """A folder on the disk with links to the project's folders, and `tileforge` in `bin`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in _SHOWN:
            (folder / each).symlink_to(ROOT / each)
        (folder / "bin").mkdir()
        for program, options in (("python", ""), ("tileforge", " -P -m payload")):
            path = folder / "bin" / program
            path.write_text(f'#!/bin/sh\nexec {sys.executable}{options} "$@"\n', encoding="utf-8")
            path.chmod(0o755)
        yield folder


@pytest.fixture
def run_page(clone: Path, tiny: Path) -> RunPage:
    """Runs the commands of a page in `clone`, and returns all output."""

    def run(path: Path) -> str:
        page = read_page(path)
        for name, text in page.files.items():
            (clone / name).write_text(text, encoding="utf-8")
        return run_script(script(page, TABLE[path.name], tiny=str(tiny)), clone)

    return run


def run_script(text: str, folder: Path, **env: str) -> str:
    """Run a bash script in a folder like a clone; return its output. It must exit with 0."""
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
            **env,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
