"""The engines' own packages, in an environment that is created once per machine and then kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.support.smollm2 import kept
from tests.support.waiting import DEADLINE_S

FOLDER = Path(__file__).parent
REQUIREMENTS = FOLDER / "requirements.txt"
PARSE = FOLDER / "parse.py"
_INSTALL_TIMEOUT_S = 300


def parse(engine: str, *files: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the engine's parser on files; `home` gets what SkyPilot writes when it is imported."""
    return subprocess.run(
        [str(_environment() / "bin" / "python"), str(PARSE), engine, *map(str, files)],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def _environment() -> Path:
    """Return the environment; the first time, its packages (475 MB) are installed."""
    mark = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    return kept(f"engines-{mark}", _install)


def _install(folder: Path) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    python = str(folder / "bin" / "python")
    # --relocatable: the folder is renamed when it is complete.
    _run([uv, "venv", "-q", "--relocatable", "--allow-existing", "-p", sys.executable, str(folder)])
    _run([uv, "pip", "install", "-q", "--no-deps", "-p", python, "-r", str(REQUIREMENTS)])


def _run(argv: list[str]) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
