"""The kernels' own tests, with oneDNN taking its ways for AMX."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.amx.emulation import Emulation, read_counts
from tests.launching import REPO

KERNELS = ("test_kernels.py", "test_products.py", "test_accumulate.py", "test_update.py")


def test_the_tests_of_the_kernels_pass_with_tiles(emulation: Emulation, tmp_path: Path) -> None:
    files = [f"tests/train/{name}" for name in KERNELS]
    counts = tmp_path / "counts"
    # pytest's faulthandler would write its own words when the emulator gives up.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=REPO,
        env=emulation.environment(counts=counts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert re.search(r"\d+ passed", ran.stdout) and " skipped" not in ran.stdout
    found = read_counts(counts)
    # Nothing says that tiles were taken but this: 1.4 million, on 2026-11-22.
    assert found["products"] > 1_000_000
    assert found["releases"] > 0
