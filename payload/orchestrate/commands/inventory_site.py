"""Returns the site of an inventory: this machine, or a cluster over SSH."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.site import InventorySite
from payload.orchestrate.sites.local import Local


def site_of(
    chosen: ResolvedInventory,
    access: LocalAccess,
    *,
    talk: Console,
    argument: str | None = None,
    ssh_key: Path | None = None,
    quick: bool = False,
) -> InventorySite:
    """Return the site of an inventory. Raises ConfigError.

    `argument` is the value of `--inventory`; `quick` skips the tests of new nodes.
    """
    if chosen.inventory.access.shares_folder:
        return Local(chosen, access, argument=argument)
    # paramiko takes half a second to import, and a local run does not need it.
    from payload.orchestrate.sites.ssh import Ssh

    env = access.environment()
    return Ssh(chosen, env=env, talk=talk, argument=argument, ssh_key=ssh_key, quick=quick)
