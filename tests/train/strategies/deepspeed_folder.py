"""DeepSpeed in a separate folder, next to the environment of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from tests.support.waiting import DEADLINE_S

_LISTED = Path(__file__).with_name("deepspeed.txt")
_WHEELS = ("msgpack==1.2.4",)
"""Packages with a wheel for each Python; installing a wheel does not run its code."""


def deepspeed_folder() -> Path:
    """Return the folder for PYTHONPATH; missing packages are built once and cached."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path.home() / ".cache" / "tileforge" / f"deepspeed-0.19.8-py{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            _install(folder, "--require-hashes", "--no-build-isolation", "-r", str(_LISTED))
            _install(folder, "--only-binary", ":all:", *_WHEELS)
            (folder / "done").touch()
    return folder


def _install(folder: Path, *words: str) -> None:
    """Install exactly these packages: torch and other packages shared with us do not change."""
    options = ["--target", str(folder), "--upgrade", "--no-deps", "--quiet"]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *words],
        env=os.environ | {"DS_BUILD_OPS": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
