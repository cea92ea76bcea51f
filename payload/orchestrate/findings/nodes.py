"""Converts facts about nodes into findings with cause, fix and exit code, by pure functions."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from payload.core.durations import in_words
from payload.core.errors import ExitCode, TileforgeError
from payload.core.one_line import printable_line
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.launch.launchers.registry import names
from payload.machines.core_speed import flags_have_bf16
from payload.machines.inventory import RANK_PORTS, Node
from payload.orchestrate.hardware.nvidia import GpuNeed, NvidiaFacts, gpu_faults
from payload.orchestrate.node.mesh import BULK_BYTES
from payload.orchestrate.ssh.remote_calls import MeshAnswer, Pair
from payload.stack.node_paths import BOOTSTRAP_STATE

STRANGER = "operator"
"""The name of this machine in the check for ports that are open to other machines."""
_PAUSE_S = 0.1
LOGS = ("/var/log/tileforge-bootstrap.log", "/var/log/cloud-init-output.log")


# The interface name becomes part of the settings of mpirun and gloo.
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


_ERROR_NAME = re.compile(r"E[A-Z0-9]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolder:
    """A node's shared folder, and the result of writing a small file to it."""

    folder: str = checked(max_chars=1024)
    mounted: bool
    """False if /etc/fstab lists the folder, but the folder is not mounted."""
    took_s: float | None = checked(low=0, high=3600)
    """Seconds of a test write; None if the folder did not answer or was not tested."""
    error: str | None = checked(pattern=_ERROR_NAME, wanted="an error's name, as in errno")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts that one node reported; None means that a value is unknown."""

    time_unix: float = checked(low=0, high=1e11)
    """Time on the node's clock when the node began to answer the query."""
    took_s: float = checked(low=0, high=3600)
    hostname: str = checked(max_chars=255)
    hostname_addresses: tuple[str, ...] = checked(max_items=1000, max_chars=255)
    architecture: str = checked(max_chars=64)
    python: str = checked(max_chars=64)
    bootstrap: Any
    """Content of bootstrap.json: an object; text if it is not JSON; None if it does not exist."""
    bootstrap_log: tuple[str, ...] = checked(max_items=100)
    cpu_flags: tuple[str, ...] | None = checked(max_items=1000)
    physical_cores: int | None = checked(low=1, high=2**16)
    numa_domains: int | None = checked(low=1, high=2**16)
    memory_bytes: int | None = checked(low=0)
    disk_path: str = checked(max_chars=1024)
    disk_free_bytes: int = checked(low=0)
    interface: str | None = checked(pattern=_INTERFACE, wanted="an interface's name")
    """Network interface towards the head; on the head, towards the first worker."""
    source_address: str | None = checked(max_chars=64)
    mtu: int | None = checked(low=1, high=2**31)
    resolver_answers: bool = True
    """True if a reverse DNS lookup of another node's address returns."""
    shared: SharedFolder | None = None
    """The shared folder; None if the node has no shared folder and needs no shared folder."""
    nvidia: NvidiaFacts | None = None
    """Facts about the GPUs; None if they were not queried."""
    clock_offset_s: float | None = None
    """The node's clock minus the clock of the operator's machine."""


def clock_offset_s(
    *, sent_unix: float, received_unix: float, node_unix: float, took_s: float
) -> float:
    """Return the node's clock minus the clock of this machine.

    Assumes that the node read its clock halfway between the request and the reply.
    """
    travel_s = max(0.0, received_unix - sent_unix - took_s)
    return node_unix - (sent_unix + travel_s / 2)


def reaches(
    node: Node, others: Collection[Node], *, port: int, trial: str, within_s: float
) -> bool:
    """Return whether this machine, which is not a node, reaches mesh.py on a port of `node`.

    Only an answer of mesh.py counts, because a different program may accept the connection.
    """
    ends = time.monotonic() + within_s
    target = (node.external_address or node.address, port)
    hello = json.dumps({"trial": trial, "me": STRANGER}).encode() + b"\n"
    while (left_s := ends - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(target, timeout=left_s) as connection,
        ):
            connection.sendall(hello + bytes(BULK_BYTES))
            if connection.recv(16) == b"got it\n":
                connection.sendall(b"done\n")
                here = str(connection.getsockname()[0]).partition("%")[0]
                is_node = here in {other.address for other in others}
                return not is_node and not ipaddress.ip_address(here).is_loopback
        time.sleep(_PAUSE_S)
    return False


Severity = Literal["error", "warning"]

PROBED = ("ssh", "bootstrap", "payload", "cpu", "memory", "disk", "clock", "name", "route", "ports")
TRIED = ("gloo", "speed")
"""Checks that the trial makes after the launcher has started the ranks."""
SHARED = "shared"
"""Check that is made on nodes that have or should have a shared folder."""
GPU = "gpu"
"""Check that is made on nodes with GPUs that the ranks use."""
NCCL = "nccl"
"""Check that the trial makes if ranks compute on GPUs."""
STORE = "store"
"""Last check on the head, for a run with a store for results."""

_GIB = 2**30
_LINE_CHARS = 2000
_LOG_LINES = 12
# Firmware and the kernel reserve some memory: a 32 GiB machine reports 31.3.
_MEMORY_SHARE = 0.9
_DISK_ERROR_GIB, _DISK_WARNING_GIB = 2, 10
# Rounding and slow answers cause much smaller offsets. Certificate checks and make's file times
# fail only at much larger offsets.
_CLOCK_WARNING_S, _CLOCK_ERROR_S = 2.0, 60.0
_AMX = "amx_bf16"
_AVX512_BF16 = "avx512_bf16"
_FOLDER_WARNING_S = 1.0
"""A test write that takes this long causes a warning. Within a zone, a synced write takes
milliseconds."""
_LARGEST_PROBE_BYTES = 65_507 + 28  # UDP's largest payload and the headers
_SSH_CODES = (ExitCode.SSH_UNREACHABLE, ExitCode.SSH_AUTH, ExitCode.HOST_KEY)


def checks() -> tuple[str, ...]:
    """Return the names of all checks, in the order in which they are made."""
    return (*PROBED, GPU, SHARED, *names(), *TRIED, NCCL, STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of one node."""

    node: str
    check: str
    """Name of the check, one of `checks()`."""
    severity: Severity
    cause: str
    fix: str
    exit_code: ExitCode = ExitCode.PREFLIGHT
    log: tuple[str, ...] = ()
    """Lines from the node with details."""

    def line(self) -> str:
        """Return node, cause and fix as one line, even if text from a node has line breaks."""
        return _line(f"{self.node}: {self.cause}. {self.fix}")

    def log_lines(self) -> list[str]:
        """Return the log's lines with printable characters only."""
        return [_line(each) for each in self.log]


def _line(text: str) -> str:
    return printable_line(text[:_LINE_CHARS]).rstrip()


def from_error(node: Node, error: TileforgeError) -> Finding:
    """Return the finding for a node that could not be queried."""
    cause = error.cause.removeprefix(f"{node.name}: ")
    return Finding(
        node=node.name,
        check="ssh" if error.exit_code in _SSH_CODES else "bootstrap",
        severity="error",
        cause=cause.rstrip("."),
        fix=error.fix,
        exit_code=error.exit_code,
    )


def bootstrap_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if the node's bootstrap is not done."""
    state = facts.bootstrap
    log = facts.bootstrap_log
    if state is None:
        cause = f"bootstrap has not reported yet: {BOOTSTRAP_STATE} is missing"
        fix = "Wait if the machine has just booted; otherwise run `cloud-init status --long`."
    elif not _is_whole(state):
        cause = f"{BOOTSTRAP_STATE} is damaged: {shown(state)}"
        fix = "Replace the machine, or run its bootstrap again."
    elif state["ok"] is True:
        return
    elif state["ok"] is False:
        # The reason is the end of the bootstrap's log, which only root can read.
        lines = str(state["reason"] or "").strip().splitlines()[-_LOG_LINES:]
        log = tuple(lines) or log
        cause = f"bootstrap failed in step {shown(state['step'])}: {_main_line(log)}"
        fix = "Remove the cause and run the bootstrap again."
    else:
        cause = f"bootstrap is not done yet; its current step is {shown(state['step'])}"
        fix = "Wait and try again."
    yield _error(node, "bootstrap", cause, fix, exit_code=ExitCode.BOOTSTRAP, log=log)


def payload_findings(
    nodes: Sequence[Node], facts: Mapping[str, NodeFacts], *, version: str, lock_sha: str | None
) -> Iterator[Finding]:
    """Yield findings for nodes with a different release or lock file than this machine.

    Without a local lock (`lock_sha`), the nodes are compared with the first node.
    """
    states = {
        node.name: facts[node.name].bootstrap
        for node in nodes
        if node.name in facts and is_ready(facts[node.name].bootstrap)
    }
    first = next(iter(states), None)
    expected, whose = lock_sha, "this machine"
    if expected is None and first is not None:
        expected, whose = states[first].get("sha"), first
    for node in nodes:
        if node.name not in states:
            continue
        state = states[node.name]
        if state.get("version") != version:
            cause = f"it has payload {_short(state.get('version'))}, but this machine has {version}"
            yield _error(node, "payload", cause, "Run the bootstrap again with this release.")
        elif state.get("sha") != expected:
            cause = (
                f"its requirements.lock ({_short(state.get('sha'))}) differs from the one of "
                f"{whose} ({_short(expected)})"
            )
            fix = "Run the bootstrap again with this release's requirements.lock."
            yield _error(node, "payload", cause, fix)


def cpu_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield findings if cores or NUMA domains differ from the inventory, or if matmuls would be
    slow."""
    for name, planned, found in (
        ("physical core(s)", node.physical_cores, facts.physical_cores),
        ("NUMA domain(s)", node.numa_domains, facts.numa_domains),
    ):
        if found is not None and found < planned:
            cause = f"it has {found} {name}, but the inventory lists {planned}"
            yield _error(node, "cpu", cause, "Correct the inventory, or the machine type.")
        elif found is not None and found > planned:
            cause = f"it has {found} {name}, but the inventory lists {planned}, so some stay unused"
            yield _warning(node, "cpu", cause, "Correct the inventory.")
    if facts.architecture in ("x86_64", "AMD64") and facts.cpu_flags is not None:
        if _AMX not in facts.cpu_flags:
            cause = "its CPU shows no AMX (amx_bf16): bf16 matmuls take 3 to 6 times as long"
            if _AVX512_BF16 not in facts.cpu_flags:
                cause = (
                    f"its CPU shows no AMX (amx_bf16) and no {_AVX512_BF16}: runs compute in fp32"
                )
            fix = "Use a machine type with AMX (C3, C4, H3), or a newer kernel or hypervisor."
            yield _warning(node, "cpu", cause, fix)
    elif facts.cpu_flags is not None and not flags_have_bf16(facts.cpu_flags):
        cause = f"its CPU ({facts.architecture}) shows no bf16: runs compute in fp32"
        fix = "Use a CPU with bf16, such as an Arm Neoverse V1, V2 or N2, or ignore this."
        yield _warning(node, "cpu", cause, fix)


def capacity_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield findings if memory differs from the inventory, or free disk space is low."""
    if facts.memory_bytes is not None:
        found_gib = facts.memory_bytes / _GIB
        if found_gib < node.memory_gib * _MEMORY_SHARE:
            cause = (
                f"it has {found_gib:.1f} GiB of memory, but the inventory lists {node.memory_gib:g}"
            )
            yield _error(node, "memory", cause, "Correct the inventory, or the machine type.")
    free_gib = facts.disk_free_bytes / _GIB
    cause = f"{free_gib:.1f} GiB are free in {facts.disk_path}"
    if free_gib < _DISK_ERROR_GIB:
        fix = f"Free at least {_DISK_ERROR_GIB} GiB, or use a larger disk."
        yield _error(node, "disk", cause, fix)
    elif free_gib < _DISK_WARNING_GIB:
        yield _warning(node, "disk", cause, "Checkpoints of GPT-2 124M need 1.5 GB each.")


def gpu_findings(
    node: Node, facts: NodeFacts, need: GpuNeed | None, *, has_device: bool | None = None
) -> Iterator[Finding]:
    """Yield findings about missing or unfit GPUs, or a driver too old for torch.

    Yields nothing without `need`. `has_device` is True if the node has the device file of a GPU;
    None if that is unknown.
    """
    if need is None or facts.nvidia is None:
        return
    for fault in gpu_faults(facts.nvidia, need=need, node=node, has_device=has_device):
        make = _error if fault.severity == "error" else _warning
        yield make(node, GPU, fault.cause, fault.fix)


def gpu_notes(nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> list[str]:
    """Return descriptions of the GPUs, with one line for all nodes that have the same GPUs."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        found = facts[node.name].nvidia if node.name in facts else None
        if found is not None and found.devices():
            alike.setdefault(found.describe(), []).append(node.name)
    return [f"{', '.join(names)}: {text}" for text, names in alike.items()]


_FOLDER_FAULTS = {
    "ESTALE": (
        "the mount is stale: the server now exports another folder or disk",
        "Mount the folder again on the node: `sudo umount -f -l {folder}; sudo mount {folder}`.",
    ),
    "EACCES": (
        "the login has no write permission; the server maps the login, or root, to another user "
        "(root squash)",
        "Make the folder writable on the server: `sudo chmod 1777 {folder}`.",
    ),
    "EROFS": (
        "the folder is mounted or exported read-only",
        "Export the folder with `rw`, and mount it again.",
    ),
    "ENOSPC": ("no disk space is free", "Free some space in the folder."),
    "EDQUOT": (
        "the login's disk quota is used up",
        "Free some space in the folder, or raise the quota.",
    ),
}
_FOLDER_FAULTS["EPERM"] = _FOLDER_FAULTS["EACCES"]


def shared_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield findings about a shared folder that is unmounted, silent, slow, stale or read-only."""
    found = facts.shared
    if found is None:
        return
    name = f"the shared folder {found.folder}"
    if not found.mounted:
        cause = f"{name} is in /etc/fstab but not mounted"
        fix = f"Start its server, then `sudo mount {found.folder}` on the node."
    elif found.error is not None:
        other = (f"a write fails with {found.error}", "See the kernel's log on the node (`dmesg`).")
        why, remedy = _FOLDER_FAULTS.get(found.error, other)
        cause, fix = f"{name}: {why}", remedy.format(folder=found.folder)
    elif found.took_s is None:
        cause = f"{name} does not answer, so a run that uses it would hang"
        fix = "Start its server, or open the network to it (TCP port 2049)."
    elif found.took_s > _FOLDER_WARNING_S:
        cause = f"{name} is slow: a small file took {found.took_s:.1f} s"
        yield _warning(node, SHARED, cause, "Check the load of the file server.")
        return
    else:
        return
    yield _error(node, SHARED, cause, fix)


def clock_findings(nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield findings about wrong clocks; if all nodes agree, the operator's clock is wrong."""
    known = [node for node in nodes if node.name in facts]
    offsets = {
        node.name: offset
        for node in known
        if (offset := facts[node.name].clock_offset_s) is not None
    }
    if not offsets:
        return
    common = statistics.median_low(offsets.values())
    spread = max(abs(offset - common) for offset in offsets.values())
    if len(offsets) > 2 and abs(common) > _CLOCK_WARNING_S and spread <= _CLOCK_WARNING_S:
        cause = f"this machine's clock is {_apart(-common)} of the clocks of all nodes"
        yield _warning(
            nodes[0],
            "clock",
            cause,
            "Correct the clock of this machine; otherwise times in reports differ.",
        )
        return
    for node in known:
        offset = offsets.get(node.name)
        if offset is None or abs(offset) <= _CLOCK_WARNING_S:
            continue
        cause = f"its clock is {_apart(offset)} of the clock of this machine"
        fix = "Set the clock of the node: timedatectl set-ntp true (or chronyc makestep)."
        kind = _error if abs(offset) > _CLOCK_ERROR_S else _warning
        yield kind(node, "clock", cause, fix)


def name_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if the hostname resolves to the loopback address or does not resolve."""
    addresses = facts.hostname_addresses
    fix = (
        "Runs work, because mpirun and gloo get their interface explicitly; other programs may "
        "fail."
    )
    if not addresses:
        cause = f"the node's own name {facts.hostname!r} does not resolve on this node"
        yield _warning(node, "name", cause, fix)
    elif all(_is_loopback(address) for address in addresses):
        cause = f"the node's own name {facts.hostname!r} resolves to {addresses[0]} on this node"
        yield _warning(node, "name", cause, fix)
    if not facts.resolver_answers:
        cause = "its resolver does not answer a lookup of another node's name"
        fix = (
            "mpirun and gloo wait for the resolver. Add all nodes to /etc/hosts, or correct "
            "/etc/resolv.conf."
        )
        yield _warning(node, "name", cause, fix)


def route_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if the route from the node to the other nodes is unknown or unexpected."""
    if facts.interface is None:
        cause = "its interface towards the other nodes is unknown (`ip route get` failed)"
        fix = "Install iproute2 on this node, and check the route to the head's address."
        yield _error(node, "route", cause, fix)
    elif facts.interface == "lo" and not _is_loopback(node.address):
        cause = "its route to the other nodes is the loopback interface"
        fix = "Two nodes of the inventory have addresses of one machine. Correct the inventory."
        yield _error(node, "route", cause, fix)
    elif facts.source_address not in (None, node.address) and not _is_loopback(node.address):
        cause = (
            f"packets to the other nodes leave from {facts.source_address} ({facts.interface}), "
            f"but the inventory lists {node.address}"
        )
        yield _warning(
            node, "route", cause, "Check that both addresses are open between the nodes."
        )


def exposure_finding(head: Node, *, port: int) -> Finding:
    """Return a warning that this machine, which is not a node, reaches the ranks' ports."""
    address = head.external_address or head.address
    cause = (
        f"this machine is not a node, but can connect to port {port} of {address}. Other machines "
        "may connect, too, and the port where the ranks meet has no password"
    )
    meeting = f"{RANK_PORTS[0]}-{RANK_PORTS[-1]}"
    fix = (
        f"Open TCP {meeting} and 32768-60999 only to the nodes' addresses "
        "(docs/explanations/security.md)."
    )
    return _warning(head, "ports", cause, fix)


def mesh_findings(
    nodes: Sequence[Node], answers: Mapping[str, MeshAnswer], *, mtus: Mapping[str, int]
) -> Iterator[Finding]:
    """Yield findings about pairs of nodes if ports are closed or large packets are lost."""
    by_name = {node.name: node for node in nodes}
    deaf = {name for name, answer in answers.items() if answer.bind_error}
    for name in sorted(deaf):
        cause = f"cannot listen on {answers[name].bind_error}"
        fix = (
            "Check that the address in the inventory belongs to this node and that the port is "
            "free, or try again."
        )
        yield _error(by_name[name], "ports", cause, fix)
    for name, answer in answers.items():
        for peer, pair in answer.pairs.items():
            if peer in deaf:
                continue
            yield from _pair_findings(by_name[name], by_name[peer], pair, mtu=mtus.get(name))


def _pair_findings(node: Node, peer: Node, pair: Pair, *, mtu: int | None) -> Iterator[Finding]:
    failed, largest = pair.failed, pair.largest_packet
    loses = largest is not None and mtu is not None and largest < min(mtu, _LARGEST_PROBE_BYTES)
    if loses:
        cause = (
            f"packets over {largest} bytes to {peer.name} get lost, but the interface sends "
            f"packets of up to {mtu} bytes (MTU)"
        )
        # If TCP discovers the path MTU, data arrives nevertheless.
        kind = _error if failed else _warning
        yield kind(node, "ports", cause, f"Set the MTU to {largest} on all nodes.")
    elif failed:
        reasons = ", ".join(f"{port}: {reason}" for port, reason in failed.items())
        cause = f"cannot reach {peer.name} ({peer.address}) on port(s) {reasons}"
        fix = (
            "Ranks use any TCP port between nodes. Open all ports between these two nodes, in both "
            "directions."
        )
        yield _error(node, "ports", cause, fix)


def _main_line(log: Sequence[str]) -> str:
    """Return the last line that names an error, or the last line."""
    named = [line for line in log if "error" in line.lower() or line.startswith("E: ")]
    return (named or list(log) or ["no reason given"])[-1].strip().rstrip(".")


def _short(value: Any) -> str:
    """Return the beginning of a version or a hash."""
    return shown(value).strip("'")[:12]


def _is_whole(state: Any) -> bool:
    return isinstance(state, dict) and {"step", "ok", "reason"} <= set(state)


def is_ready(state: Any) -> bool:
    """Return whether a node's bootstrap.json reports success."""
    return _is_whole(state) and state["ok"] is True


def has_failed(state: Any) -> bool:
    """Return whether a node's bootstrap.json reports a failure, which only a user can fix."""
    return _is_whole(state) and state["ok"] is False


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _apart(offset_s: float) -> str:
    return f"{in_words(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}"


def _error(
    node: Node,
    check: str,
    cause: str,
    fix: str,
    *,
    exit_code: ExitCode = ExitCode.PREFLIGHT,
    log: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        node=node.name,
        check=check,
        severity="error",
        cause=cause,
        fix=fix,
        exit_code=exit_code,
        log=log,
    )


def _warning(node: Node, check: str, cause: str, fix: str) -> Finding:
    return Finding(node=node.name, check=check, severity="warning", cause=cause, fix=fix)
