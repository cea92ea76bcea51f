"""The emulator: a program with tile instructions gets the results of Intel's manual."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.amx.emulation import Emulation, read_counts

pytestmark = [pytest.mark.slow, pytest.mark.processes]
SOURCE = Path(__file__).with_name("tiles.c")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("tiles") / "tiles"
    flags = [
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-mamx-tile",
        "-mamx-bf16",
        "-pthread",
    ]
    subprocess.run(["gcc", *flags, SOURCE, "-o", to], check=True)
    return to


def test_without_it_there_are_no_tiles(program: Path) -> None:
    assert subprocess.run([program, "zeros"], check=False).returncode == -signal.SIGILL


@pytest.mark.parametrize("case", ["products", "zeros", "threads"])
def test_tiles_hold_what_they_should(
    case: str, program: Path, emulation: Emulation, tmp_path: Path
) -> None:
    counts = tmp_path / "counts"
    subprocess.run([program, case], env=emulation.environment(counts=counts), check=True)
    found = read_counts(counts)
    if case == "products":
        assert found["products"] == 2 * 16 * 6 * 4
        # Twice the sum over all sizes of rows x columns x pairs x 2.
        assert found["multiplications"] == 2 * 136 * (1 + 4 + 7 + 10 + 13 + 16) * 34 * 2
    assert found["configurations"] > 0


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("without_configuration", "a tile that is not configured"),
        ("misfit", "tiles of a product do not fit each other"),
        ("twice", "a product with a tile twice"),
    ],
)
def test_what_a_cpu_refuses_is_refused(
    case: str, said: str, program: Path, emulation: Emulation
) -> None:
    environment = emulation.environment()
    ran = subprocess.run(
        [program, case], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == -signal.SIGABRT
    assert said in ran.stderr
