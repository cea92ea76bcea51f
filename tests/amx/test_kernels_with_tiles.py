"""The kernels' own tests, with oneDNN's code paths for AMX."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amx.emulation import Emulation, read_counts
from tests.support.launching import REPO

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize(
    ("tests", "products"),
    [
        (["test_products.py"], 20_000),
        (["test_kernels.py", "-k", "attention"], 2_000),
        (["test_kernels.py", "-k", "not attention"], 500_000),
        (["test_accumulate.py"], 50_000),
    ],
)
def test_the_kernels_pass_their_tests_with_tiles(
    tests: list[str], products: int, emulation: Emulation, tmp_path: Path
) -> None:
    counts = tmp_path / "counts"
    # pytest's faulthandler would add its own output when the emulator stops.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=REPO / "tests" / "train",
        env=emulation.environment(counts=counts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert re.search(r"\d+ passed", ran.stdout)
    assert " skipped" not in ran.stdout
    # Only these counts show that tiles were used.
    found = read_counts(counts)
    assert found["products"] > products
    assert found["releases"] > 0
