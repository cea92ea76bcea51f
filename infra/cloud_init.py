"""Renders a node's user-data for cloud-init from values and templates.

All functions are pure, except `BootstrapFiles.load`. Every process on the node, and every user who
can read the instance, can read user-data. Therefore it contains no secrets, only public keys.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import io
import ipaddress
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jinja2

from payload.core.errors import ConfigError
from payload.machines.gpu_catalog import NVIDIA_DRIVER_BRANCH
from payload.machines.inventory import SHARED_FOLDER
from payload.stack.node_paths import BOOTSTRAP_STATE, MONITORING_FOLDER, VENV
from payload.stack.stack_settings import LOGIN, NODE_PATH

NODE_USER = "trainer"
GRAFANA_VERSION = "12.4.0"
"""Pinned version of Grafana; its repository, apt.grafana.com, keeps old versions."""
MAX_BYTES = 256 * 1024
"""Size limit of a metadata value in Compute Engine."""

_SCRIPTS = PurePosixPath("/usr/local/lib/tileforge")
# python3-dev and g++ are for torch.compile, which compiles C++ with Python.h.
_PACKAGES = (
    *("g++", "iproute2", "numactl", "openssh-client", "python3-dev", "python3-venv"),
    "libtcmalloc-minimal4t64|libtcmalloc-minimal4",  # names in Ubuntu 24.04 and Debian 12
)

_KEY_TYPES = (
    *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("ssh-rsa", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"),
)
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]+")
_EXTRAS = re.compile(r"[a-z]+(,[a-z]+)*")
_INDEX = re.compile(r"https?://[^\s@'\"]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBootstrap:
    """Values for rendering a node's user-data."""

    authorized_keys: tuple[str, ...]
    """Public keys that can log in as `trainer`, each as a line of an authorized_keys file. The
    tuple can be empty only if `os_login_user` is set."""
    version: str
    """The payload's version, which the state file records."""
    extras: str = "train"
    """Extras of the lock to install, in the format of install-payload.sh."""
    extra_packages: tuple[str, ...] = ()
    """Additional Debian packages."""
    wheelhouse: str | None = None
    """Folder of wheels on the node, for nodes without internet; None uses the package index."""
    torch_index: str | None = None
    """Index of PyTorch's CPU builds; None uses install-payload.sh's default."""
    has_gpus: bool = False
    """True to install NVIDIA's driver and torch's CUDA build."""
    is_monitored: bool = False
    """True to install Prometheus."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Name and address of every node, the head first; empty if no node needs this list."""
    shared: str = "none"
    """Source of the shared folder: `none`, `nfs` (the head exports it) or `filestore`."""
    shared_clients: str = ""
    """Address range to which the head exports the shared folder."""
    os_login_user: str | None = None
    """If `trainer` has no key, only this user can log in, through Google's OS Login."""

    @property
    def login_user(self) -> str:
        """The user who can log in."""
        return self.os_login_user or NODE_USER

    def packages(self) -> tuple[str, ...]:
        """Return the Debian packages to install; `a|b` means the first available package."""
        ours = ("ca-certificates",) if self.is_monitored else ()
        return tuple(sorted({*_PACKAGES, *ours, *self.extra_packages}))


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapFiles:
    """The files of `bootstrap/` that user-data contains."""

    template: str
    node_setup: bytes
    install_payload: bytes
    lock: bytes
    shared_storage: bytes
    monitoring: Mapping[str, bytes]
    """Files of Prometheus and Grafana, by path below `bootstrap/monitoring`."""

    @classmethod
    def load(cls, folder: Path) -> BootstrapFiles:
        """Read the files from the repository's `bootstrap` folder. Raises ConfigError."""
        try:
            return cls(
                template=(folder / "cloud-init.yaml.j2").read_text(encoding="utf-8"),
                node_setup=(folder / "node-setup.sh").read_bytes(),
                install_payload=(folder / "install-payload.sh").read_bytes(),
                lock=(folder / "requirements.lock").read_bytes(),
                shared_storage=(folder / "shared-storage.sh").read_bytes(),
                monitoring={
                    path.relative_to(folder / "monitoring").as_posix(): path.read_bytes()
                    for path in sorted((folder / "monitoring").rglob("*"))
                    if path.is_file()
                },
            )
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}. The checkout is incomplete; restore the file."
            ) from None

    def lock_sha(self) -> str:
        """Return the SHA-256 of the lock file, which the state file records as `sha`."""
        return hashlib.sha256(self.lock).hexdigest()


def render_user_data(node: NodeBootstrap, files: BootstrapFiles) -> str:
    """Return cloud-init's user-data for one node. Equal arguments give equal text.

    Raises ConfigError for an invalid value, or if the text exceeds Compute Engine's limit.
    """
    _check(node)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    # JSON is valid YAML, so quotes and colons in a key's comment are safe.
    environment.filters |= {"quoted": json.dumps, "shell": shlex.quote}
    text = environment.from_string(files.template).render(
        state_file=BOOTSTRAP_STATE,
        user=NODE_USER,
        login_user=node.login_user,
        authorized_keys=[key.strip() for key in node.authorized_keys],
        settings=_settings(node, files),
        files={
            str(_SCRIPTS / "node-setup.sh"): ("0755", _packed(files.node_setup)),
            str(_SCRIPTS / "install-payload.sh"): ("0755", _packed(files.install_payload)),
            str(_SCRIPTS / "requirements.lock"): ("0644", _packed(files.lock)),
            **(
                {str(_SCRIPTS / "shared-storage.sh"): ("0755", _packed(files.shared_storage))}
                if node.shared != "none"
                else {}
            ),
            **{
                str(MONITORING_FOLDER / name): ("0644", _packed(content))
                for name, content in (files.monitoring if node.is_monitored else {}).items()
            },
        },
        setup_script=str(_SCRIPTS / "node-setup.sh"),
    )
    size = len(text.encode())
    if size > MAX_BYTES:
        raise ConfigError(
            f"user-data has {size} bytes, more than the limit of {MAX_BYTES}. Use fewer public "
            f"keys (now {len(node.authorized_keys)})."
        )
    return text


def _settings(node: NodeBootstrap, files: BootstrapFiles) -> dict[str, str]:
    """Return the settings of /etc/tileforge/bootstrap.conf, which node-setup.sh reads."""
    return {
        "VERSION": node.version,
        "SHA": files.lock_sha(),
        "NODE_USER": NODE_USER,
        "LOGIN_USER": node.login_user,
        "PACKAGES": " ".join(node.packages()),
        "VENV": str(VENV),
        "EXTRAS": node.extras,
        "WHEELHOUSE": node.wheelhouse or "",
        "TORCH_INDEX": node.torch_index or "",
        "NVIDIA_DRIVER": NVIDIA_DRIVER_BRANCH if node.has_gpus else "",
        "MONITORING": "prometheus" if node.is_monitored else "none",
        "NODES": " ".join(f"{name}={address}" for name, address in node.nodes),
        "GRAFANA_VERSION": GRAFANA_VERSION,
        "SHARED": node.shared,
        "SHARED_DIR": SHARED_FOLDER,
        "SHARED_CLIENTS": node.shared_clients,
    }


def _packed(content: bytes) -> str:
    # GzipFile writes the same header on every Python; gzip.compress does not.
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as packed:
        packed.write(content)
    return base64.b64encode(buffer.getvalue()).decode()


def _check(node: NodeBootstrap) -> None:
    if not node.authorized_keys and not node.os_login_user:
        raise ConfigError("authorized_keys is empty: no login would be possible. Add a public key.")
    if node.os_login_user:
        _match(LOGIN, node.os_login_user, "os_login_user =", "a user name of OS Login")
    for key in node.authorized_keys:
        problem = key_problem(key)
        if problem:
            raise ConfigError(f"authorized key {_shown(key)}: {problem}")
    for package in node.extra_packages:
        _match(_PACKAGE, package, "extra_packages has", "the name of a Debian package")
    for name, address in node.nodes:
        _match(LOGIN, name.replace("-", "_"), "nodes has", "the name of a node")
        ipaddress.IPv4Address(address)
    if node.shared_clients:
        ipaddress.IPv4Network(node.shared_clients)
    _match(_EXTRAS, node.extras, "extras =", "names of extras between commas, such as train")
    _match(re.compile(r"[\w.+-]+", re.ASCII), node.version, "version =", "such as 0.1.0")
    if node.wheelhouse is not None:
        _match(NODE_PATH, node.wheelhouse, "wheelhouse =", "an absolute path on the node")
    if node.torch_index is not None:
        _match(_INDEX, node.torch_index, "torch_index =", "a URL without a password")


def _match(pattern: re.Pattern[str], value: str, what: str, expected: str) -> None:
    if not pattern.fullmatch(value):
        raise ConfigError(f"{what} {value!r}: must be {expected}.")


def key_problem(key: str) -> str | None:
    """Return why the text is not a valid public key, or None if it is valid."""
    if "PRIVATE" in key:
        return "is a private key. Use the line in the .pub file of a new key pair."
    if not key.strip().isprintable():
        return "must be one line of printable text, as in ssh-keygen's .pub file."
    kind, _, rest = key.strip().partition(" ")
    if kind not in _KEY_TYPES:
        return f"must start with a key type: {', '.join(_KEY_TYPES)}."
    try:
        blob = base64.b64decode(rest.partition(" ")[0], validate=True)
    except binascii.Error:
        return "the part after the type is not base64; copy the line again."
    # RFC 4253, section 6.6: the key begins with its type, as a length-prefixed string.
    begins = len(kind).to_bytes(4, "big") + kind.encode()
    if not blob.startswith(begins) or len(blob) <= len(begins):
        return f"the part after the type is not a key of type {kind}; copy the line again."
    return None


def _shown(key: str) -> str:
    """Return the start of a public key for messages; never return text of a private key."""
    return repr("...") if "PRIVATE" in key else repr(key.strip()[:40])
