"""Makes tests/fixtures/9e71e47, the files that the code of commit 9e71e47 wrote.

    python -m tests.formats.making

The files were made once, and later commits must read them unchanged. Needs root on Linux, an SSH
server, and an environment with the packages of that commit. The commands of recipe.py run in
separate namespaces, as user ada on a machine named laptop, so no file names this machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMIT = "9e71e47aafdf2c1ea215b656af4db56ce06d3ead"
ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / COMMIT[:7]
STORED = ("project", "results", "hub", "cloud")
LEFT_OUT = (
    *("sources", "bin", "mocks", "id_ed25519", "report.html", "*.json.gz", "*.lock"),
    "__pycache__",
)
"""Inputs, stand-ins, private keys, pages, traces and locks: no command reads these back."""

_NAMESPACE = """\
mount --bind "$2" "$1/srv/ada/tileforge/.venv"
mount --bind "$3" "$1/srv/ada/.cache/tileforge"
mount --rbind "$1/srv" /srv
mount --bind "$1/home" /home
hostname laptop
{
    printf '%s:x:0:0::%s:/bin/sh\\n' ada /srv/ada trainer /home/trainer
    cat /etc/passwd
} >"$1/passwd"
mount --bind "$1/passwd" /etc/passwd
cd /srv/ada/tileforge
exec .venv/bin/python -m tests.formats.making.recipe
"""


def main() -> int:
    """Make the fixtures."""
    arguments = argparse.ArgumentParser(description="Make the fixtures of a commit again.")
    arguments.add_argument("--out", type=Path, default=FIXTURES, metavar="DIR")
    out: Path = arguments.parse_args().out
    with tempfile.TemporaryDirectory(prefix="fixtures.") as name:
        folder, home = Path(name), Path(name, "srv", "ada")
        (folder / "home").mkdir()
        for each in ("tileforge/.venv", "project", "cloud", ".cache/tileforge", ".ssh"):
            (home / each).mkdir(parents=True)
        _check_out(home / "tileforge")
        _add_recipe(home / "tileforge")
        # Kernels that were built on this machine are reused.
        kernels = Path.home() / ".cache" / "tileforge"
        kernels.mkdir(parents=True, exist_ok=True)
        words = ["sh", "-ec", _NAMESPACE, "sh", str(folder), sys.prefix, str(kernels)]
        subprocess.run(["unshare", "--mount", "--uts", *words], check=True)
        _store(home, out)
    return 0


def _check_out(folder: Path) -> None:
    archive = ["git", "-C", str(ROOT), "archive", COMMIT]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as process:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=process.stdout, check=True)
    if process.returncode != 0:
        sys.exit(f"git archive {COMMIT} failed: fetch the repository's whole history")


def _add_recipe(checkout: Path) -> None:
    """Copy this package into the old checkout, which lacks it."""
    place = Path("tests", "formats", "making")
    shutil.copytree(ROOT / place, checkout / place, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / place.parent / "__init__.py").touch()


def _store(home: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(home / "expected.json", out)
    left_out = shutil.ignore_patterns(*LEFT_OUT)
    for name in STORED:
        shutil.copytree(home / name, out / name, symlinks=True, ignore=left_out)
    # Only the store has these files, as after the loss of a disk.
    shutil.rmtree(out / "project" / "runs" / "kept" / "checkpoints")


if __name__ == "__main__":
    sys.exit(main())
