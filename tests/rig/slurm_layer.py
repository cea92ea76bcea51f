"""A disk layer with Debian's Slurm and munge over the image, as on a small cluster's nodes.

The trainer's packages are those of this environment, mounted under /srv.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.rig.cache import cached
from tests.rig.host import run
from tests.rig.image import archive_sources, root_image

_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
# Machines cannot reach this host's name server, so that each lookup would take 10 s.
_CHANGED = ("etc/apt/sources.list", "etc/resolv.conf")


def slurm_layer() -> Path:
    """Return the layer for `Rig(layers=[...])`; the first call needs the network."""
    recipe = (root_image().name, *_PACKAGES, "3")
    return cached("slurm", recipe=recipe, build=_build)


def _build(folder: Path) -> None:
    """Install the packages over the image; the changes are the layer."""
    work, root = folder.with_name("slurm.work"), folder.with_name("slurm.root")
    for path in (work, root):
        path.mkdir(exist_ok=True)
    image = root_image() / "root"
    options = f"lowerdir={image},upperdir={folder},workdir={work}"
    run(["mount", "-t", "overlay", "slurm-layer", "-o", options, root])
    try:
        (root / "etc/apt/sources.list").write_text(archive_sources(), encoding="utf-8")
        nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2"]
        nspawn += ["--pipe", "--resolv-conf=replace-host", "--suppress-sync=yes"]
        nspawn += [f"--directory={root}", "--setenv=DEBIAN_FRONTEND=noninteractive"]
        apt = ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "Acquire::Retries=3"]
        run([*nspawn, *apt, "update"], timeout_s=300)
        run([*nspawn, *apt, "install", *_PACKAGES], timeout_s=600)
        run([*nspawn, "sh", "-c", "mungekey --force && chown -R munge: /etc/munge"])
        run([*nspawn, "useradd", "--create-home", "--uid", "1500", "trainer"])
        run([*nspawn, "systemctl", "disable", "slurmctld", "slurmd", "munge"])
        for name in ("lists", "archives"):
            run([*nspawn, "sh", "-c", f"rm -rf /var/lib/apt/{name}/* /var/cache/apt/{name}/*"])
    finally:
        run(["umount", root])
    for name in _CHANGED:
        (folder / name).unlink()
    shutil.rmtree(work)
    root.rmdir()
