"""The lock's wheels for the machines' Python, downloaded once and kept."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.markers import Marker

from tests.rig.cache import cached
from tests.rig.host import run
from tests.rig.image import SUITE, TRIXIE

LOCK = Path(__file__).resolve().parents[2] / "bootstrap" / "requirements.lock"
WHEELHOUSE_ON_MACHINE = "/srv/wheelhouse"


def folder_on_machine(extra: str) -> str:
    """Return the folder of an extra's wheels on a machine."""
    return WHEELHOUSE_ON_MACHINE if extra == "train" else f"{WHEELHOUSE_ON_MACHINE}-{extra}"


def pip_conf(extras: Sequence[str]) -> str:
    """Return the settings of a machine's pip whose package index is the extras' wheels."""
    folders = "\n    ".join(map(folder_on_machine, extras))
    return f"[install]\nno-index = true\nfind-links =\n    {folders}\n"


_PYTHONS = {SUITE: "3.11.2", TRIXIE: "3.13.5"}
"""Version of Python by suite of Debian."""
# Debian 12 has glibc 2.36. Each tag is named, because pip does not derive older ones.
_GLIBC_MINORS = range(36, 16, -1)
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def python_of(suite: str) -> str:
    """Return the version of a suite's Python."""
    return _PYTHONS[suite]


def wheelhouse(extra: str = "train") -> Path:
    """Return the folder of wheels that `install-payload.sh --wheelhouse` needs.

    It has 0.4 GB for `train`, or 3 GB if this host has torch's CUDA build, which machines then get.
    """
    required = requirements(
        LOCK.read_text(encoding="utf-8"), extra=extra, torch=importlib.metadata.version("torch")
    )
    return cached("wheels", recipe=required, build=lambda folder: download(folder, required))


def requirements(lock: str, *, extra: str, torch: str, python: str = _PYTHONS[SUITE]) -> list[str]:
    """Return `name==version` of the lock's lines for `extra` that apply to the machines.

    `torch` is the version of torch's build, such as 2.13.0+cpu; 2.13.0 needs CUDA packages.
    """
    versions = {"python_version": _minor(python), "python_full_version": python}
    extras = {extra} if torch.endswith("+cpu") else {extra, f"{extra}-cuda"}
    found = []
    for line in lock.splitlines():
        if line.startswith(("#", " ")):
            continue
        requirement, _, own = line.partition("  # ")
        name, _, marker = requirement.partition(" ; ")
        applies = not marker or Marker(marker).evaluate(versions)
        is_other_build = name.startswith("torch==") and name != f"torch=={torch}"
        if extras & set(own.split(", ")) and applies and not is_other_build:
            found.append(name)
    return found


def download(folder: Path, required: Sequence[str], *, python: str = _PYTHONS[SUITE]) -> None:
    """Download the wheels of the requirements for a version of Python into the folder."""
    cpu = [name for name in required if name.endswith("+cpu")]
    _pip_download(folder, python, *(name for name in required if name not in cpu))
    if cpu:
        # If it cannot be reached, pip prints an error and uses its own settings.
        _pip_download(
            folder, python, "--extra-index-url", _CPU_INDEX, "--retries=1", "--timeout=5", *cpu
        )


def _minor(python: str) -> str:
    return python.rpartition(".")[0]


def _pip_download(folder: Path, python: str, *arguments: str) -> None:
    minor = _minor(python)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    pip += [f"--python-version={minor}", "--implementation=cp"]
    pip += [f"--abi={abi}" for abi in (f"cp{minor.replace('.', '')}", "abi3", "none")]
    pip += [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in _GLIBC_MINORS]
    pip += ["--platform=manylinux2014_x86_64", "--platform=linux_x86_64"]
    run([*pip, *arguments], timeout_s=1200)
