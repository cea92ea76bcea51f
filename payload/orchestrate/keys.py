"""The operator's key of a cluster, and the text of what ssh reads: known_hosts and a config."""

from __future__ import annotations

import os
import secrets
from pathlib import Path, PurePath

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from payload.errors import ConfigError
from payload.inventory import ClusterInventory, Node
from payload.orchestrate.ssh import shell_text
from payload.orchestrate.streams import iap_argv
from payload.results import write_whole

# ssh would read these in a file name as something else, and offers no way to write them.
_UNWRITABLE = frozenset('"\\\n\r$')


def operator_key_path(root: Path, *, cluster: str) -> Path:
    """Where the operator's key of `cluster` is, under the project folder `root`."""
    return root / ".cluster" / cluster / "id_ed25519"


def make_operator_key(path: Path) -> str:
    """The public half of the key at `path`, which is made if there is none.

    The key is 0600 in a folder of 0700. Raises ConfigError when others may read an existing one.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    if not path.exists():
        _write_new_key(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"the key {path} may be read by others (mode {mode:o}). If nobody did: chmod 600 "
            f"{path}; else delete it, and a new one is made."
        )
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the key {path} cannot be read ({error}). Delete it for a new one."
        ) from None
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return f"{public.decode('ascii')} tileforge-operator:{path.parent.name}"


def render_known_hosts(inventory: ClusterInventory) -> str:
    """Every node's host keys under the node's name, which is its HostKeyAlias in the config."""
    return "".join(f"{node.name} {key}\n" for node in inventory.nodes for key in node.host_keys)


def render_ssh_config(
    inventory: ClusterInventory, *, key: PurePath, known_hosts: PurePath, on_head: bool
) -> str:
    """An ssh_config for `ssh -F`: each node by its name and its address, host keys checked.

    `on_head` is for mpirun on the head, which reaches the others at their addresses; without it,
    for the operator's machine, which reaches them through the head. Raises ConfigError.
    """
    shared = [
        "Host *",
        f"  User {inventory.ssh_user}",
        f"  IdentityFile {_quoted(key)}",
        "  IdentitiesOnly yes",
        "  IdentityAgent none",
        f"  UserKnownHostsFile {_quoted(known_hosts)}",
        "  GlobalKnownHostsFile none",
        "  StrictHostKeyChecking yes",
        "  UpdateHostKeys no",
        "  PasswordAuthentication no",
        "  KbdInteractiveAuthentication no",
        "  BatchMode yes",
        "  ConnectTimeout 10",
        "  ServerAliveInterval 15",
        "  ServerAliveCountMax 4",
    ]
    blocks = [_host_block(inventory, node, on_head=on_head) for node in inventory.nodes]
    return "\n\n".join("\n".join(block) for block in [*blocks, shared]) + "\n"


def write_ssh_files(folder: Path, inventory: ClusterInventory, *, key: Path) -> Path:
    """Put known_hosts and ssh_config in `folder`, for `ssh -F CONFIG NODE`; returns the config."""
    config, known_hosts = folder / "ssh_config", folder / "known_hosts"
    text = render_ssh_config(
        inventory, key=key.absolute(), known_hosts=known_hosts.absolute(), on_head=False
    )
    write_whole(known_hosts, render_known_hosts(inventory))
    write_whole(config, text)
    return config


def _host_block(inventory: ClusterInventory, node: Node, *, on_head: bool) -> list[str]:
    is_head = node.name == inventory.head.name
    from_outside = is_head and not on_head
    block = [
        f"Host {node.name} {node.address}",
        f"  HostName {(node.external_address if from_outside else None) or node.address}",
        f"  Port {node.ssh_port}",
        f"  HostKeyAlias {node.name}",
    ]
    if from_outside and inventory.access.kind == "iap":
        text = shell_text(iap_argv(node, inventory.access))
        block.append(f"  ProxyCommand {text.replace('%', '%%')}")
    elif not is_head and not on_head:
        block.append(f"  ProxyJump {inventory.head.name}")
    return block


def _quoted(path: PurePath) -> str:
    text = str(path)
    if _UNWRITABLE & set(text):
        raise ConfigError(
            f"the path {text!r} has a character that ssh_config cannot hold. Use another folder."
        )
    return '"' + text.replace("%", "%%") + '"'


def _write_new_key(path: Path) -> None:
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, this leaves alone what another process has made in the meantime.
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
