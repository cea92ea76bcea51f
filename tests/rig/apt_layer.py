"""Disk layers over the image in which apt has installed more packages, on this host's network."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.rig.host import run
from tests.rig.image import SUITE, archive_sources, root_image
from tests.support.waiting import DEADLINE_S

# Machines cannot reach this host's name server, so that each lookup would take 10 s.
_CHANGED = ("etc/apt/sources.list", "etc/resolv.conf")


def build_layer(
    folder: Path,
    packages: Sequence[str],
    commands: Sequence[Sequence[str]] = (),
    *,
    suite: str = SUITE,
) -> None:
    """Write the changes that installing the packages and then running the commands makes."""
    work, root = folder.with_name(f"{folder.name}.work"), folder.with_name(f"{folder.name}.root")
    for path in (work, root):
        path.mkdir(exist_ok=True)
    image = root_image(suite) / "root"
    options = f"lowerdir={image},upperdir={folder},workdir={work}"
    run(["mount", "-t", "overlay", folder.name, "-o", options, root])
    try:
        (root / "etc/apt/sources.list").write_text(archive_sources(suite), encoding="utf-8")
        nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2"]
        nspawn += ["--pipe", "--resolv-conf=replace-host", "--suppress-sync=yes"]
        nspawn += [f"--directory={root}", "--setenv=DEBIAN_FRONTEND=noninteractive"]
        apt = ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "Acquire::Retries=3"]
        run([*nspawn, *apt, "update"], timeout_s=DEADLINE_S)
        run([*nspawn, *apt, "install", *packages], timeout_s=DEADLINE_S)
        for command in commands:
            run([*nspawn, *command])
        for name in ("lists", "archives"):
            run([*nspawn, "sh", "-c", f"rm -rf /var/lib/apt/{name}/* /var/cache/apt/{name}/*"])
    finally:
        run(["umount", root])
    for name in _CHANGED:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(work)
    root.rmdir()
