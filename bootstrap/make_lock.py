"""Write requirements.lock from pyproject.toml: `make lock`, with UPGRADE=1 for newer versions.

uv resolves, for every system and Python that the project allows. All extras get the same
version of a package, but for torch, of which `intel` has its own. Each line ends with the extras
that need it, so that install-payload.sh can choose lines without a resolver.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "bootstrap" / "requirements.lock"
TOGETHER = ("train", "orchestrate", "infra", "dev")
UNRESOLVED = ("ccl",)
"""On an index of its own and without dependencies: taken from pyproject.toml as it is."""
HEADER = """\
# Written by `make lock` from pyproject.toml; do not edit. For Python 3.11 or newer.
# A line: package==version ; where  # the extras that need it. Installed without a resolver by
# install-payload.sh, which takes torch's CPU build on Linux.
"""


def resolve(
    extras: Iterable[str], *, pins: Sequence[str], keep: Sequence[str], uv: str
) -> list[str]:
    """Requirement lines of `extras` with all that they need.

    `pins` are versions that must be met, `keep` versions to prefer.
    """
    with tempfile.TemporaryDirectory() as folder:
        constraints, output = Path(folder, "constraints.txt"), Path(folder, "lock.txt")
        constraints.write_text("\n".join(pins), encoding="utf-8")
        output.write_text("\n".join(keep), encoding="utf-8")
        command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--universal"]
        command += ["--python-version", "3.11", "--fork-strategy", "fewest"]
        command += ["--no-header", "--no-annotate", "--no-strip-extras"]
        command += ["--constraints", str(constraints), "--output-file", str(output)]
        command += [part for extra in extras for part in ("--extra", extra)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return output.read_text(encoding="utf-8").splitlines()


def render(lines_by_extra: dict[str, list[str]]) -> str:
    """The lock's text."""
    extras_of: dict[str, set[str]] = {}
    for extra, lines in lines_by_extra.items():
        for line in lines:
            extras_of.setdefault(line, set()).add(extra)
    rows = [f"{line}  # {', '.join(sorted(extras_of[line]))}" for line in sorted(extras_of)]
    return HEADER + "\n".join(rows) + "\n"


def old_lines(extras: Iterable[str]) -> list[str]:
    """Lines of the present lock for `extras`, without their comments."""
    if not LOCK.exists():
        return []
    wanted = set(extras)
    rows = [line.split("  # ") for line in LOCK.read_text(encoding="utf-8").splitlines()]
    return [row[0] for row in rows if len(row) == 2 and wanted & set(row[1].split(", "))]


def make_lock(*, upgrade: bool, uv: str) -> str:
    """The text of a lock for the present pyproject.toml."""
    keep = [] if upgrade else old_lines(TOGETHER)
    pins = resolve(TOGETHER, pins=[], keep=keep, uv=uv)
    lines = {extra: resolve([extra], pins=pins, keep=[], uv=uv) for extra in TOGETHER}
    shared = [pin for pin in pins if not pin.startswith("torch==")]
    keep = [] if upgrade else old_lines(["intel"])
    lines["intel"] = resolve(["intel"], pins=shared, keep=keep, uv=uv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in UNRESOLVED:
        lines[extra] = [
            " ; ".join(part.strip() for part in requirement.split(";"))
            for requirement in project["optional-dependencies"][extra]
        ]
    return render(lines)


def main() -> None:
    """Write the lock."""
    parser = argparse.ArgumentParser(description="Pin every package in requirements.lock.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest allowed versions")
    parser.add_argument("--uv", default="uv", help="the uv program (default: the one on PATH)")
    arguments = parser.parse_args()
    LOCK.write_text(make_lock(upgrade=arguments.upgrade, uv=arguments.uv), encoding="utf-8")


if __name__ == "__main__":
    main()
