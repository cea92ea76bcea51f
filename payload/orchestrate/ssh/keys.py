"""The operator's key of a cluster, and the claim and key of one attempt to start a run."""

from __future__ import annotations

import base64
import os
import re
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from payload.core.errors import AnswerError, ConfigError, PreflightError, TileforgeError
from payload.core.files import write_whole
from payload.core.suggested_commands import command
from payload.core.validation import RUN_ID, build, checked, parse_json
from payload.machines.inventory import ClusterInventory, Node
from payload.orchestrate.ssh.connection import Cluster, Connection, shell_text
from payload.orchestrate.ssh.files import put
from payload.orchestrate.ssh.remote_calls import (
    Nothing,
    all_or_raise,
    ask,
    on_every_node,
    parse_answer,
    remote_argv,
    remote_stdin,
    route_to,
)
from payload.stack.cluster_files import cluster_path

# ssh would read these in a file name as something else, and offers no way to write them.
_UNWRITABLE = frozenset('"\\\n\r$')


def operator_key_path(root: Path, *, cluster: str) -> Path:
    """Return where the operator's key of `cluster` is, under the project folder `root`.

    Raises ConfigError for a link in its place.
    """
    return cluster_path(root, cluster, "id_ed25519")


def make_operator_key(path: Path) -> str:
    """Return the public half of the key at `path`, which is made if there is none.

    The key is 0600 in a folder of 0700, and may have a passphrase. Raises ConfigError as
    `require_private` does, and for what is not an OpenSSH private key.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    if not path.exists():
        _write_new_key(path)
    require_private(path)
    try:
        public = _public_half(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm, struct.error) as error:
        raise ConfigError(
            f"{path} cannot be read as an OpenSSH private key ({error}). Put the key back, or move "
            "the file away, and a new key is made."
        ) from None
    return f"{public.decode('ascii')} tileforge-operator:{path.parent.name}"


def _public_half(private: bytes) -> bytes:
    """Return the public half of an OpenSSH private key, whose passphrase is not asked for.

    Raises ValueError, struct.error and UnsupportedAlgorithm.
    """
    try:
        key = serialization.load_ssh_private_key(private, password=None).public_key()
    except TypeError:  # it has a passphrase, and its public half is in clear
        key = serialization.load_ssh_public_key(_clear_half(private))
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _clear_half(private: bytes) -> bytes:
    """Return the public key that stands before the encrypted part of an OpenSSH private key.

    Source: https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.key.
    """
    content = base64.b64decode(b"".join(private.split(b"-----")[2].split()))
    at = len(b"openssh-key-v1\0")

    def string() -> bytes:
        nonlocal at
        (size,) = struct.unpack_from(">I", content, at)
        at += 4 + size
        return content[at - size : at]

    for _ in ("cipher", "kdf", "kdf's options"):
        string()
    at += 4  # the number of keys, always 1
    blob = string()
    kind = blob[4 : 4 + struct.unpack_from(">I", blob)[0]]
    return kind + b" " + base64.b64encode(blob)


def require_private(path: Path) -> None:
    """Raise ConfigError where a cluster's own key is another user's, or others may read it.

    It may have come with the folder, so that somebody else has it too.
    """
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"the key {path} is not yours. Move it away, and a new key is made.")
    if mode & 0o077:
        raise ConfigError(
            f"the key {path} may be read by others (mode {mode:o}). If nobody did: chmod 600 "
            f"{path}; else move it away, and a new key is made."
        )


def render_known_hosts(inventory: ClusterInventory) -> str:
    """Return every node's host keys under its name, which is its HostKeyAlias in the config."""
    return "".join(f"{node.name} {key}\n" for node in inventory.nodes for key in node.host_keys)


def render_ssh_config(
    inventory: ClusterInventory, *, key: PurePath, known_hosts: PurePath, on_head: bool
) -> str:
    """Return an ssh_config for `ssh -F`: nodes by name and address, host keys checked.

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
    route = route_to(node, head=inventory.head, access=inventory.access, on_head=on_head)
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


_ACTION_S = 30.0
_T = TypeVar("_T")
# Somebody else's supervisor may be starting, for which the head has 30 s.
_CLAIM_S = 60.0
_RETRY_S = 2.0

_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_PUBLIC = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{60,80}={0,2} tileforge-run:[A-Za-z0-9._-]{1,120}")
_ORIGIN = re.compile(r"[0-9A-Fa-f.:]{2,45}")
_FOLDER = re.compile(r"/[^\x00-\x1f\x7f\"\\$ ]{1,1000}/\.ssh/tileforge/[A-Za-z0-9._-]{1,120}")


class HeadBusyError(PreflightError):
    """Somebody else has the claim on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Result of a claim on the head."""

    name: str
    """The attempt's, which its key gets: nobody else's has it."""
    running: str | None
    """The run that is under way, so that the claim is not had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Where the head has what `ssh -F` needs to reach every node of the run."""

    folder: PurePosixPath

    @property
    def config(self) -> PurePosixPath:
        """The ssh_config, which names the key and the known hosts beside it."""
        return self.folder / "ssh_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claimed:
    """The head's answer to a claim, see node/control.py."""

    claim: bool
    running: str | None = checked(pattern=RUN_ID, wanted="a run's name")
    held: str | None = None
    """The text that the holder has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    name: str = checked("?", pattern=_KEY_NAME, wanted="a key's name")
    run_id: str = checked("?", pattern=RUN_ID, wanted="a run's name")
    origin: str = checked("?", pattern=_ORIGIN, wanted="an address")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    folder: str = checked(pattern=_FOLDER, wanted="a folder of ~/.ssh/tileforge")
    public: str = checked(pattern=_PUBLIC, wanted="a public key of a run")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    names: tuple[str, ...] = checked(pattern=_KEY_NAME, wanted="a key's name", max_items=10_000)


def attempt_name(run_id: str) -> str:
    """Return a name for an attempt to start a run, which nobody else's has. Raises ConfigError."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run id {run_id!r}: letters, digits, dots, hyphens and underscores only."
        )
    return f"{run_id}.{secrets.token_hex(4)}"


@contextmanager
def claimed(
    cluster: Cluster,
    *,
    run_dir: PurePosixPath,
    say: Callable[[str], None],
    timeout_s: float = _CLAIM_S,
    name: str | None = None,
    lost: TileforgeError | None = None,
) -> Iterator[Claim]:
    """Keep others from starting a run or a trial on this cluster.

    The claim ends with the connection, so also with this process; the head may notice that late.
    Waits for somebody else's, as long as `timeout_s`. An attempt that claims again gives its `name`
    and the error with which it has `lost` its connection: this is raised where the claim from
    before has not ended. Raises ConfigError for a run's name that is none, and PreflightError.
    """
    name = name or attempt_name(run_dir.name)
    ends = time.monotonic() + timeout_s
    head, has_told = cluster.inventory.head, False
    while True:
        with _asked(cluster.connect(head), run_dir, name) as answer:
            if answer.claim or answer.running is not None:
                yield Claim(name=name, running=answer.running)
                return
        holder = _holder(answer.held, head=head.name)
        is_own = lost is not None and holder.name == name
        held = f"{head.name}: somebody (from {holder.origin}) is starting {holder.run_id}"
        if is_own:
            held = f"{head.name}: the connection that broke still has the claim on it"
        if time.monotonic() > ends:
            if lost is not None and is_own:
                raise lost
            raise HeadBusyError(
                f"{held}, so nothing was started. Wait until it runs, and follow it with: "
                + command("orchestrate", "attach")
            )
        if not has_told:
            say(f"{held}: waiting for that")
            has_told = True
        time.sleep(_RETRY_S)


def install_run_key(cluster: Cluster, *, name: str, lasts_s: float) -> RunKey:
    """Make the key on the head and let every node trust it; the private half stays on the head.

    The nodes trust it for `lasts_s`, and from the head's address alone. Raises NodesError, and what
    connecting raises; call `remove_run_key` then, too.
    """
    inventory, head = cluster.inventory, cluster.inventory.head
    made = _act(cluster.connect(head), _Made, action="make", name=name)
    folder = PurePosixPath(made.folder)
    if folder.name != name or not made.public.endswith(f":{name}"):
        raise AnswerError(f"{head.name}: it made another key than {name!r}. Look at the machine.")
    known_hosts = folder / "known_hosts"
    config = render_ssh_config(
        inventory, key=folder / "id_ed25519", known_hosts=known_hosts, on_head=True
    )
    _put_text(cluster.connect(head), render_known_hosts(inventory), known_hosts)
    _put_text(cluster.connect(head), config, RunKey(folder=folder).config)

    def trust(node: Node) -> None:
        _act(
            cluster.connect(node),
            Nothing,
            action="trust",
            public=made.public,
            head=head.address,
            is_head=node.name == head.name,
            lasts_s=lasts_s,
        )

    trusted = on_every_node(inventory.nodes, trust, to_the_end=True)
    all_or_raise(trusted, what="installing the run's key")
    return RunKey(folder=folder)


def remove_run_key(cluster: Cluster, *names: str) -> None:
    """Let no node trust these keys any more, and delete them; may be repeated.

    While a worker may still trust a key, the head keeps its name, though neither half of it, so
    that `remove_dead_keys` asks that worker again. For whose attempt it is, or for keys that are
    dead. Raises NodesError that names the nodes where they may still be.
    """

    def forget(node: Node, *, keeps_names: bool = True) -> None:
        connection = cluster.connect(node)
        _act(connection, Nothing, action="forget", names=list(names), keeps_names=keeps_names)

    inventory = cluster.inventory
    all_or_raise(on_every_node(inventory.nodes, forget), what="removing the run's key")
    head = on_every_node([inventory.head], partial(forget, keeps_names=False))
    all_or_raise(head, what="removing the run's key")


def remove_dead_keys(cluster: Cluster) -> Sequence[str]:
    """Remove every key that no attempt uses or will use; returns the names of them.

    They are left by operators who were killed, or by runs that have ended. The head says which of
    those that it made: one that is in use stays, whoever asks, and one that another head made is
    left to that head and to its own end. Raises NodesError, as `remove_run_key`.
    """
    inventory = cluster.inventory
    asked = on_every_node(inventory.nodes, lambda node: _names(cluster.connect(node), "names"))
    found = {name for got in asked.values() if isinstance(got, tuple) for name in got}
    dead: Sequence[str] = ()
    if found:
        dead = _names(cluster.connect(inventory.head), "dead", names=sorted(found))
    dead = sorted(found & set(dead))
    if dead:
        remove_run_key(cluster, *dead)
    all_or_raise(asked, what="removing the run's key")
    return dead


def _names(connection: Connection, action: str, **arguments: Any) -> tuple[str, ...]:
    return _act(connection, _Names, action=action, timeout_s=2 * _ACTION_S, **arguments).names


@contextmanager
def _asked(connection: Connection, run_dir: PurePosixPath, name: str) -> Iterator[_Claimed]:
    arguments = {"action": "claim", "run_dir": str(run_dir), "name": name}
    with connection.listening(
        remote_argv("control.py"),
        stdin=remote_stdin("control.py", arguments),
        timeout_s=_CLAIM_S,
    ) as line:
        yield parse_answer(_Claimed, line, node=connection.node.name)


def _holder(held: str | None, *, head: str) -> _Holder:
    """Return who has the claim; what the holder has left may be half written, or anything."""
    try:
        return build(_Holder, parse_json(held or "{}", where=head), where=head)
    except ConfigError:
        return _Holder()


def _act(
    connection: Connection, answer: type[_T], *, timeout_s: float = _ACTION_S, **arguments: Any
) -> _T:
    return ask(connection, "run_key.py", answer, arguments, timeout_s=timeout_s)


def _put_text(connection: Connection, text: str, target: PurePosixPath) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, target.name)
        source.write_text(text, encoding="utf-8")
        put(connection, source, str(target), mode=0o600, timeout_s=_ACTION_S)
