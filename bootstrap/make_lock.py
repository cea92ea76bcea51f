"""Write requirements.lock from pyproject.toml: `make lock`, with UPGRADE=1 for newer versions.

uv resolves for every supported system and Python version. All extras share one version of each
package. Exception: `intel` has a different version of torch. Each line lists the extras that need
the package, so install-payload.sh can select lines without a resolver. The next lines list the
SHA-256 hashes of the package's wheels for the supported systems and Python versions.

torch has two lines: `torch==V` for the default package index, whose Linux builds require CUDA
packages (extras that end in `-cuda`), and `torch==V+cpu` for PyTorch's index of CPU builds. If that
index cannot be reached, the old hashes of the same version are kept.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "bootstrap" / "requirements.lock"
TOGETHER = ("train", "orchestrate", "infra", "dev", "quant", "fp8", "monitor", "storage")
UNRESOLVED = ("ccl",)
"""Extras whose packages come from a separate index, without dependencies. Their requirements are
copied from pyproject.toml without resolving."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEWEST_PYTHON = 14
HEADER = """\
# Written by `make lock` from pyproject.toml; do not edit. For Python 3.11 to 3.14, on Linux
# (x86-64, Arm) and macOS. A line: package==version ; where  # the extras that need it. Below it:
# SHA-256 of its wheels. Installed without a resolver by install-payload.sh, which refuses any
# other file.
"""
_PLATFORM = re.compile(r"any|(manylinux|linux|macosx)\w*_(x86_64|aarch64|arm64|universal2)")

Hashes = Mapping[str, Sequence[str]]
"""Maps `package==version` to sorted hashes."""


def resolve(
    requirements: Sequence[str],
    *,
    uv: str,
    pins: Sequence[str] = (),
    keep: Sequence[str] = (),
    options: Sequence[str] = (),
) -> tuple[list[str], dict[str, list[str]]]:
    """Resolve requirements; return the lines of all packages, with dependencies, and the hashes.

    `requirements` are arguments of `uv pip compile`: files, and `--extra` for pyproject.toml. The
    result must have the versions in `pins`, and has the versions in `keep` if possible.
    """
    with tempfile.TemporaryDirectory() as folder:
        constraints, output = Path(folder, "constraints.txt"), Path(folder, "lock.txt")
        constraints.write_text("\n".join(pins), encoding="utf-8")
        output.write_text("\n".join(keep), encoding="utf-8")
        command = [uv, "pip", "compile", *requirements, "--quiet", "--universal", *options]
        command += ["--python-version", "3.11", "--fork-strategy", "fewest"]
        command += ["--no-header", "--no-annotate", "--no-strip-extras"]
        _run([*command, "--constraints", str(constraints), "--output-file", str(output)])
        lines = output.read_text(encoding="utf-8").splitlines()
        constraints.write_text("\n".join([*pins, *lines]), encoding="utf-8")
        files = Path(folder, "pylock.toml")
        command += ["--format", "pylock.toml"]
        _run([*command, "--constraints", str(constraints), "--output-file", str(files)])
        return lines, hashes_of(files.read_text(encoding="utf-8"))


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def hashes_of(pylock: str) -> dict[str, list[str]]:
    """Return the hashes that a pylock.toml lists for wheels of supported systems and Python
    versions.

    Raises SystemExit for a package without any such wheel.
    """
    found: dict[str, list[str]] = {}
    for package in tomllib.loads(pylock).get("packages", []):
        pin = f"{package['name']}=={package['version']}"
        wheels = {
            unquote(urlsplit(wheel["url"]).path.rpartition("/")[2]): wheel["hashes"]["sha256"]
            for wheel in package.get("wheels", [])
        }
        fitting = [value for name, value in wheels.items() if is_supported(name)]
        if not fitting and "emscripten" not in package.get("marker", ""):
            raise SystemExit(
                f"{pin}: has no wheel for a supported system, so it cannot be locked. Use another "
                "version in pyproject.toml."
            )
        found[pin] = sorted(fitting)
    return found


def is_supported(wheel: str) -> bool:
    """Return whether a wheel's file name matches a supported system and Python version."""
    return any(_fits(tag) for tag in parse_wheel_filename(wheel)[3])


def _fits(tag: Tag) -> bool:
    if not _PLATFORM.fullmatch(tag.platform):
        return False
    if tag.interpreter.startswith("py3"):
        return tag.abi == "none"
    python = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    if python is None or int(python[1]) > NEWEST_PYTHON:
        return False
    if tag.abi in ("abi3", "none"):
        return True
    return int(python[1]) >= 11 and tag.abi == tag.interpreter


def render(lines_by_extra: Mapping[str, Sequence[str]], hashes: Hashes) -> str:
    """Return the text of the lock file."""
    extras_of: dict[str, set[str]] = {}
    for extra, lines in lines_by_extra.items():
        for line in lines:
            extras_of.setdefault(line, set()).add(extra)
    text = HEADER
    for line in sorted(extras_of):
        text += f"{line}  # {', '.join(sorted(extras_of[line]))}\n"
        text += "".join(f"    --hash=sha256:{value}\n" for value in hashes.get(_pin(line), ()))
    return text


def _pin(line: str) -> str:
    """Return `package==version` of a requirement line, without extras and markers."""
    return re.sub(r"\[[^]]*\]", "", line.partition(" ;")[0])


def read_lock(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return a lock's requirement lines by extra, and its hashes."""
    lines: dict[str, list[str]] = {}
    hashes: dict[str, list[str]] = {}
    line = ""
    for row in text.splitlines():
        if row.startswith("    --hash=sha256:"):
            hashes.setdefault(_pin(line), []).append(row.partition(":")[2])
        elif not row.startswith("#"):
            line, _, extras = row.partition("  # ")
            for extra in extras.split(", "):
                lines.setdefault(extra, []).append(line)
    return lines, hashes


def cpu_build(pin: str, *, old: Hashes, torch_index: str, uv: str) -> list[str]:
    """Return the hashes of torch's CPU builds for Linux, from PyTorch's index or the old lock."""
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder, "torch.in")
        requirement.write_text(f"{pin}\n", encoding="utf-8")
        options = ["--no-config", "--no-deps", "--default-index", torch_index]
        try:
            return resolve([str(requirement)], uv=uv, options=options)[1][pin]
        except subprocess.CalledProcessError:
            pass
    if pin not in old:
        raise SystemExit(
            f"{pin}: not found at {torch_index}, and the current lock has no hashes for it. Check "
            "the network, then run: make lock"
        )
    sys.stderr.write(f"{pin}: {torch_index} cannot be reached; keeping its old hashes\n")
    return list(old[pin])


def make_lock(*, upgrade: bool, torch_index: str, uv: str) -> str:
    """Return the text of a lock for the current pyproject.toml."""
    old_lines, old_hashes = read_lock(LOCK.read_text(encoding="utf-8") if LOCK.exists() else "")

    def extra(*names: str, pins: Sequence[str] = ()) -> tuple[list[str], dict[str, list[str]]]:
        keep = [] if upgrade else [line for name in names for line in old_lines.get(name, ())]
        flags = [part for name in names for part in ("--extra", name)]
        return resolve(["pyproject.toml", *flags], uv=uv, pins=pins, keep=sorted(set(keep)))

    pins, hashes = extra(*TOGETHER)
    lines = {name: extra(name, pins=pins)[0] for name in TOGETHER}
    shared = [pin for pin in pins if not pin.startswith("torch==")]
    lines["intel"], more = extra("intel", pins=shared)
    hashes |= more
    for name in ("train", "intel"):
        (torch,) = (line for line in lines[name] if line.startswith("torch=="))
        lines[f"{name}-cuda"], more = cuda_packages(torch, pins=lines[name], uv=uv)
        hashes |= more
        lines[name].append(f"{torch}+cpu")
        hashes[f"{torch}+cpu"] = cpu_build(
            f"{torch}+cpu", old=old_hashes, torch_index=torch_index, uv=uv
        )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in UNRESOLVED:
        lines[name] = [
            " ; ".join(part.strip() for part in requirement.split(";"))
            for requirement in project["optional-dependencies"][name]
        ]
    return render(lines, hashes)


def cuda_packages(
    torch: str, *, pins: Iterable[str], uv: str
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the CUDA packages that torch's default Linux build requires, with their hashes."""
    pins = list(pins)
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder, "torch.in")
        requirement.write_text(f"{torch}\n", encoding="utf-8")
        # --no-config ignores the override of torch's dependencies in pyproject.toml.
        lines, hashes = resolve([str(requirement)], uv=uv, pins=pins, options=["--no-config"])
    known = {_pin(pin) for pin in pins}
    return [line for line in lines if _pin(line) not in known], hashes


def main() -> None:
    """Write the lock."""
    parser = argparse.ArgumentParser(description="Pin every package in requirements.lock.")
    parser.add_argument("--upgrade", action="store_true", help="use the newest allowed versions")
    parser.add_argument("--uv", default="uv", help="uv executable (default: uv on PATH)")
    parser.add_argument(
        "--torch-index",
        default=CPU_INDEX,
        metavar="URL",
        help="index of PyTorch's CPU builds (default: %(default)s)",
    )
    arguments = parser.parse_args()
    text = make_lock(upgrade=arguments.upgrade, torch_index=arguments.torch_index, uv=arguments.uv)
    LOCK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
