"""A disk layer with everything that bootstrap installs, for tests of later steps.

A machine on it still boots for the first time and runs its user-data, with new host keys, accounts
and state. Bootstrap finds packages and environment installed, and takes seconds instead of a
minute.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from infra.bootstrap_values import node_bootstrap
from infra.cloud_init import BootstrapFiles, render_user_data
from infra.config import ClusterConfig
from payload import __version__
from tests.rig.cache import cached
from tests.rig.host import RigError, run
from tests.rig.image import root_image
from tests.rig.machine import Machine
from tests.rig.rig import ROOT, Rig
from tests.rig.wheelhouse import wheelhouse
from tests.support.waiting import DEADLINE_S

FILES = BootstrapFiles.load(ROOT / "bootstrap")

# The private key of this pair was discarded.
_NOBODY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDQC5oFuLD7OiNkh4CSiD2bpP7Kvt2AR4GIGfBKesYne"
_OF_ONE_MACHINE = ("var/lib/cloud", "var/lib/tileforge", "var/log", "home/trainer/.ssh")


def node_user_data(
    public_key: str,
    *,
    extra_packages: tuple[str, ...] = (),
    os_login_user: str = "",
    wheelhouse: str = "",
    bucket: str = "none",
) -> str:
    """Return user-data that makes a machine of the rig ready for the owner of the key.

    With only a key it equals the user-data that `pulumi up` gives the nodes of a stack with default
    settings.
    """
    config = ClusterConfig(os_login_user=os_login_user, wheelhouse=wheelhouse, bucket=bucket)
    keys = () if os_login_user else (public_key,)
    node = node_bootstrap(config, authorized_keys=keys, version=__version__)
    return render_user_data(replace(node, extra_packages=extra_packages), FILES)


def layer() -> Path:
    """Return the layer for `Rig(layers=[layer()])`; the first call takes one or two minutes."""
    return _cached(_build)


def keep(machine: Machine) -> None:
    """Make the layer, if it is missing, from a machine that has just become ready.

    The machine is shut down and started again.
    """

    def copy(folder: Path) -> None:
        machine.stop()
        _copy_disk(machine, folder)
        machine.start()
        machine.wait_for_ssh()

    _cached(copy)


def _cached(build: Callable[[Path], None]) -> Path:
    recipe = (root_image().name, wheelhouse().name, node_user_data(_NOBODY))
    return cached("prepared", recipe=recipe, build=build)


def _build(folder: Path) -> None:
    with Rig([node_user_data(_NOBODY)]) as rig:
        (state,) = rig.wait_for_bootstrap(timeout_s=900).values()
        if not state["ok"]:
            raise RigError(f"bootstrap failed at {state['step']}: {state['reason']}")
        (machine,) = rig.machines
        machine.stop()
        _copy_disk(machine, folder)


def _copy_disk(machine: Machine, folder: Path) -> None:
    # cp and not Python: overlayfs stores deletions as devices and attributes.
    run(["cp", "--archive", f"{machine.folder}/disk/upper/.", folder], timeout_s=DEADLINE_S)
    for name in _OF_ONE_MACHINE:
        shutil.rmtree(folder / name)
    for path in (folder / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    (folder / "etc/machine-id").write_text("", encoding="utf-8")
