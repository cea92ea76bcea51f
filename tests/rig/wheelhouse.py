"""The lock's wheels for the machines' Python, downloaded once and kept."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.markers import Marker

from tests.rig.cache import cached
from tests.rig.host import run

LOCK = Path(__file__).resolve().parents[2] / "bootstrap" / "requirements.lock"
WHEELHOUSE_ON_MACHINE = "/srv/wheelhouse"


def folder_on_machine(extra: str) -> str:
    """Return the folder of an extra's wheels on a machine."""
    return WHEELHOUSE_ON_MACHINE if extra == "train" else f"{WHEELHOUSE_ON_MACHINE}-{extra}"


def pip_conf(extras: Sequence[str]) -> str:
    """Return the settings of a machine's pip whose package index is the extras' wheels."""
    folders = "\n    ".join(map(folder_on_machine, extras))
    return f"[install]\nno-index = true\nfind-links =\n    {folders}\n"


_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.2"}
"""Version of Debian 12's Python."""
# Debian 12 has glibc 2.36; pip only accepts the given tags.
_GLIBC_MINORS = (34, 31, 28, 27, 26, 24, 17)
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def wheelhouse(extra: str = "train") -> Path:
    """Return the folder of wheels that `install-payload.sh --wheelhouse` needs.

    It has 0.4 GB for `train`, or 3 GB if this host has torch's CUDA build, which machines then get.
    """
    required = requirements(
        LOCK.read_text(encoding="utf-8"), extra=extra, torch=importlib.metadata.version("torch")
    )
    return cached("wheels", recipe=required, build=lambda folder: _download(folder, required))


def requirements(lock: str, *, extra: str, torch: str) -> list[str]:
    """Return `name==version` of the lock's lines for `extra` that apply to the machines.

    `torch` is the version of torch's build, such as 2.13.0+cpu; 2.13.0 needs CUDA packages.
    """
    extras = {extra} if torch.endswith("+cpu") else {extra, f"{extra}-cuda"}
    found = []
    for line in lock.splitlines():
        if line.startswith(("#", " ")):
            continue
        requirement, _, own = line.partition("  # ")
        name, _, marker = requirement.partition(" ; ")
        applies = not marker or Marker(marker).evaluate(dict(_PYTHON))
        is_other_build = name.startswith("torch==") and name != f"torch=={torch}"
        if extras & set(own.split(", ")) and applies and not is_other_build:
            found.append(name)
    return found


def _download(folder: Path, required: Sequence[str]) -> None:
    cpu = [name for name in required if name.endswith("+cpu")]
    _pip_download(folder, *(name for name in required if name not in cpu))
    if cpu:
        # If it cannot be reached, pip prints an error and uses its own settings.
        _pip_download(folder, "--extra-index-url", _CPU_INDEX, "--retries=1", "--timeout=5", *cpu)


def _pip_download(folder: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    pip += ["--python-version=3.11", "--implementation=cp"]
    pip += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    pip += [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
    pip += ["--platform=manylinux2014_x86_64", "--platform=linux_x86_64"]
    run([*pip, *arguments], timeout_s=1200)
