"""A disk layer with Debian's Slurm and munge over the image, as on a small cluster's nodes.

The trainer's packages are those of this environment, mounted under /srv.
"""

from __future__ import annotations

from pathlib import Path

from tests.rig.apt_layer import build_layer
from tests.rig.cache import cached
from tests.rig.image import root_image

_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_COMMANDS = (
    ("sh", "-c", "mungekey --force && chown -R munge: /etc/munge"),
    ("useradd", "--create-home", "--uid", "1500", "trainer"),
    ("systemctl", "disable", "slurmctld", "slurmd", "munge"),
)


def slurm_layer() -> Path:
    """Return the layer for `Rig(layers=[...])`; the first call needs the network."""
    recipe = (root_image().name, *_PACKAGES, "3")
    return cached(
        "slurm", recipe=recipe, build=lambda folder: build_layer(folder, _PACKAGES, _COMMANDS)
    )
