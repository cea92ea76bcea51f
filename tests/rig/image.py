"""The root file system of machines: Debian like its cloud images, made once and cached.

Next to it is a package repository with the packages that bootstrap installs, so that a machine
without internet runs the real `apt-get update` and `apt-get install`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from infra.cloud_init import NodeBootstrap
from tests.rig.cache import cached
from tests.rig.host import run

SUITE = "bookworm"
"""Debian 12, which machines have unless a test chooses another suite."""
TRIXIE = "trixie"
"""Debian 13."""
PACKAGES_ON_MACHINE = "/srv/packages"

_BASE = (
    *("apt-utils", "ca-certificates", "dbus", "iproute2", "iputils-ping", "kmod"),
    *("libpam-systemd", "openssh-server", "procps", "python3", "sudo", "systemd-sysv"),
)
_CLOUD_CFG = """\
datasource_list: [NoCloud, None]
network: {config: disabled}
"""
_ARCHIVE = "archive.list"
_SOURCES = f"deb [trusted=yes] file:{PACKAGES_ON_MACHINE} ./\n"


def root_image(suite: str = SUITE) -> Path:
    """Return the folder of `root`, `packages` and `archive.list` of a suite of Debian.

    The first call takes two minutes and needs the network.
    """
    required = NodeBootstrap(authorized_keys=(), version="").packages()
    # The name in Debian 12 is the last of several, the name in later releases the first.
    offered = tuple(names.split("|")[-1 if suite == SUITE else 0] for names in required)
    recipe = (suite, *_BASE, *offered, _CLOUD_CFG, _SOURCES, "2")
    return cached("image", recipe=recipe, build=lambda folder: _build(folder, offered, suite))


def archive_sources(suite: str = SUITE) -> str:
    """Return the line for Debian's archive that debootstrap wrote for apt."""
    return (root_image(suite) / _ARCHIVE).read_text(encoding="utf-8")


def _build(folder: Path, offered: Sequence[str], suite: str) -> None:
    root, packages = folder / "root", folder / "packages"
    packages.mkdir()
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(_BASE)}"]
    run([*bootstrap, suite, root], timeout_s=1200)
    # apt and not --include: debootstrap cannot resolve virtual packages.
    _apt_get(root, packages, "update")
    _apt_get(root, packages, "install", "cloud-init")
    _apt_get(root, packages, "install", "--download-only", *offered)
    write_package_index(packages)
    sources = root / "etc/apt/sources.list"
    sources.rename(folder / _ARCHIVE)
    sources.write_text(_SOURCES, encoding="utf-8")
    (root / "etc/cloud/cloud.cfg.d/99-rig.cfg").write_text(_CLOUD_CFG, encoding="utf-8")
    (root / "etc/machine-id").write_text("", encoding="utf-8")
    # Each machine makes its own, and resolves no names of the host's network.
    for path in [*root.glob("etc/ssh/ssh_host_*"), root / "etc/resolv.conf", root / "etc/hostname"]:
        path.unlink(missing_ok=True)
    for path in (root / "var/lib/apt/lists").glob("*_*"):
        path.unlink()


def _apt_get(root: Path, packages: Path, *arguments: str) -> None:
    """Run apt-get in the root, on the host's network; downloads go to `packages`."""
    nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", "--pipe"]
    nspawn += ["--resolv-conf=replace-host", "--suppress-sync=yes", f"--directory={root}"]
    nspawn += [f"--bind={packages}:/var/cache/apt/archives"]
    nspawn += ["--setenv=DEBIAN_FRONTEND=noninteractive"]
    apt = ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "Acquire::Retries=3"]
    run([*nspawn, *apt, *arguments], timeout_s=1200)


def write_package_index(folder: Path) -> None:
    """Make a folder of .deb files a repository that apt reads by its path."""
    entries = []
    for path in sorted(folder.glob("*.deb")):
        control = run(["dpkg-deb", "--field", path]).strip()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        place = f"Filename: ./{path.name}\nSize: {path.stat().st_size}\nSHA256: {digest}"
        entries.append(f"{control}\n{place}\n")
    (folder / "Packages").write_text("\n".join(entries), encoding="utf-8")
