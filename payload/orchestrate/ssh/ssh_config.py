"""Renders known_hosts and ssh_config for `ssh -F`, with host key checking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.machines.inventory import Access, Node
from payload.orchestrate.ssh.connection import shell_text
from payload.orchestrate.ssh.remote_calls import route_to

# Characters that have a special meaning in ssh_config's file names and cannot be escaped.
_UNWRITABLE = frozenset('"\\\n\r$')


def render_known_hosts(nodes: Sequence[Node]) -> str:
    """Return the text of known_hosts: every node's host keys under the node's name.

    The ssh_config uses the name as HostKeyAlias.
    """
    return "".join(f"{node.name} {key}\n" for node in nodes for key in node.host_keys)


def render_ssh_config(
    nodes: Sequence[Node],
    *,
    user: str,
    access: Access,
    key: PurePath,
    known_hosts: PurePath,
    on_head: bool,
) -> str:
    """Return an ssh_config for `ssh -F`: nodes by name and address, with strict host key checks.

    With `on_head`, the file is for mpirun on the head, which reaches the other nodes directly.
    Without `on_head`, the file is for the operator's machine, which reaches the nodes through the
    head. Raises ConfigError.
    """
    shared = [
        "Host *",
        f"  User {user}",
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
    blocks = [_host_block(node, head=nodes[0], access=access, on_head=on_head) for node in nodes]
    return "\n\n".join("\n".join(block) for block in [*blocks, shared]) + "\n"


def write_ssh_files(
    folder: Path, nodes: Sequence[Node], *, user: str, access: Access, key: Path
) -> Path:
    """Write known_hosts and ssh_config for `ssh -F CONFIG NODE`; return the config's path."""
    config, known_hosts = folder / "ssh_config", folder / "known_hosts"
    text = render_ssh_config(
        nodes,
        user=user,
        access=access,
        key=key.absolute(),
        known_hosts=known_hosts.absolute(),
        on_head=False,
    )
    write_whole(known_hosts, render_known_hosts(nodes))
    write_whole(config, text)
    return config


def _host_block(node: Node, *, head: Node, access: Access, on_head: bool) -> list[str]:
    route = route_to(node, head=head, access=access, on_head=on_head)
    block = [
        f"Host {node.name} {node.address}",
        f"  HostName {route.host}",
        f"  Port {node.ssh_port}",
        f"  HostKeyAlias {node.name}",
    ]
    if route.proxy:
        text = shell_text(route.proxy)
        block.append(f"  ProxyCommand {text.replace('%', '%%')}")
    elif route.jump is not None:
        block.append(f"  ProxyJump {route.jump}")
    return block


def _quoted(path: PurePath) -> str:
    text = str(path)
    if _UNWRITABLE & set(text):
        raise ConfigError(
            f"path {text!r}: ssh_config does not allow all of its characters. Use another folder."
        )
    return '"' + text.replace("%", "%%") + '"'
