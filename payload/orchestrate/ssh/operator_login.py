"""The operator's key for the nodes of an inventory, and files for `ssh -F` beside it."""

from __future__ import annotations

from pathlib import Path

from payload.core.errors import SshAuthError
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.ssh.remote_calls import (
    os_login_command,
)
from payload.orchestrate.ssh.ssh_config import write_ssh_files
from payload.stack.operator_key import operator_key_path, require_private, write_public_half


def operator_key(inventory: ClusterInventory, *, given: Path | None) -> Path:
    """Return the operator's key, and beside the cluster's own one, files for `ssh -F`."""
    own = operator_key_path(Path.cwd(), cluster=inventory.cluster)
    if given is None and not own.exists():
        public = write_public_half(own)
        os_login = ""
        if inventory.source == "pulumi" or inventory.project or inventory.access.project:
            os_login = f", or, with accessMode oslogin, to your account: {os_login_command(own)}"
        raise SshAuthError(
            f"there was no key of cluster {inventory.cluster}; {own} is new. Add its public half "
            f"to authorized_keys of {inventory.ssh_user} on every node: {public}{os_login} "
            "(or name the key that they know with --ssh-key.)"
        )
    if given is None:
        require_private(own)
    write_ssh_files(own.parent, inventory, key=given or own)
    return given or own
