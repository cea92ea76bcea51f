"""Faults of a cluster: from facts to findings with cause, fix and exit code. Pure."""

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

from payload.core.errors import ExitCode, TileforgeError
from payload.core.one_line import printable_line
from payload.core.printable_text import shown
from payload.core.validation.fields import checked
from payload.launch.launchers.registry import names
from payload.machines.inventory import RANK_PORTS, Node
from payload.orchestrate.hardware.nvidia import GpuNeed, NvidiaFacts, gpu_faults
from payload.orchestrate.node.mesh import BULK_BYTES
from payload.orchestrate.ssh.remote_calls import MeshAnswer, Pair
from payload.stack.node_paths import BOOTSTRAP_STATE

STRANGER = "operator"
"""The name of this machine in trials of ports that are open to others."""
_PAUSE_S = 0.1

"""The only sign that a node's bootstrap is done, written last by it."""
LOGS = ("/var/log/tileforge-bootstrap.log", "/var/log/cloud-init-output.log")


# It becomes part of mpirun's and gloo's settings.
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


_ERROR_NAME = re.compile(r"E[A-Z0-9]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolder:
    """A node's shared folder, and its answer to the write of a small file."""

    folder: str = checked(max_chars=1024)
    mounted: bool
    """False where the machine's table of file systems has it, and it is not there."""
    took_s: float | None = checked(low=0, high=3600)
    """None where it did not answer, or was not asked."""
    error: str | None = checked(pattern=_ERROR_NAME, wanted="an error's name, as in errno")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The probe's answer from one node; None is what the machine did not tell."""

    time_unix: float = checked(low=0, high=1e11)
    """The node's clock when the probe began."""
    took_s: float = checked(low=0, high=3600)
    hostname: str = checked(max_chars=255)
    hostname_addresses: tuple[str, ...] = checked(max_items=1000, max_chars=255)
    architecture: str = checked(max_chars=64)
    python: str = checked(max_chars=64)
    bootstrap: Any
    """bootstrap.json: an object, or text when it is no JSON, or None when there is none."""
    bootstrap_log: tuple[str, ...] = checked(max_items=100)
    cpu_flags: tuple[str, ...] | None = checked(max_items=1000)
    physical_cores: int | None = checked(low=1, high=2**16)
    numa_domains: int | None = checked(low=1, high=2**16)
    memory_bytes: int | None = checked(low=0)
    disk_path: str = checked(max_chars=1024)
    disk_free_bytes: int = checked(low=0)
    interface: str | None = checked(pattern=_INTERFACE, wanted="an interface's name")
    """On the way to the head; on the head, to the first worker."""
    source_address: str | None = checked(max_chars=64)
    mtu: int | None = checked(low=1, high=2**31)
    resolver_answers: bool = True
    """True if asking for the name of another node's address comes to an end."""
    shared: SharedFolder | None = None
    """None where the node has no shared folder and should have none."""
    nvidia: NvidiaFacts | None = None
    """Its GPUs; None where it was not asked."""
    clock_offset_s: float | None = None
    """The node's clock minus the operator's."""


def clock_offset_s(
    *, sent_unix: float, received_unix: float, node_unix: float, took_s: float
) -> float:
    """Return the node's clock minus ours: its answer came between sending and receiving."""
    travel_s = max(0.0, received_unix - sent_unix - took_s)
    return node_unix - (sent_unix + travel_s / 2)


def reaches(
    node: Node, others: Collection[Node], *, port: int, trial: str, within_s: float
) -> bool:
    """Return whether this machine, if it is no node, reaches mesh.py on that port of `node`.

    The answer has to be that program's: whatever else takes a connection there does not count.
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
"""Checks of the trial, once its launcher has started the ranks."""
SHARED = "shared"
"""Check of nodes that have a shared folder, or should have one."""
GPU = "gpu"
"""Check of nodes on whose GPUs ranks compute."""
NCCL = "nccl"
"""Check of the trial where ranks compute on GPUs."""
STORE = "store"
"""Check of the head, last of all, where a run's results go to a store."""

_GIB = 2**30
_LINE_CHARS = 2000
_LOG_LINES = 12
# Firmware and the kernel keep some: a 32 GiB machine reports 31.3.
_MEMORY_SHARE = 0.9
_DISK_ERROR_GIB, _DISK_WARNING_GIB = 2, 10
# Rounding and a slow answer stay far below; certificates and make's file times break far above.
_CLOCK_WARNING_S, _CLOCK_ERROR_S = 2.0, 60.0
_AMX = "amx_bf16"
_AVX512_BF16 = "avx512_bf16"
_FOLDER_WARNING_S = 1.0
"""A write that is synced takes milliseconds within a zone."""
_LARGEST_PROBE_BYTES = 65_507 + 28  # UDP's largest payload and the headers
_SSH_CODES = (ExitCode.SSH_UNREACHABLE, ExitCode.SSH_AUTH, ExitCode.HOST_KEY)


def checks() -> tuple[str, ...]:
    """Return every check's name, in the order in which they are made."""
    return (*PROBED, GPU, SHARED, *names(), *TRIED, NCCL, STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong on one node."""

    node: str
    check: str
    """One of `checks()`."""
    severity: Severity
    cause: str
    fix: str
    exit_code: ExitCode = ExitCode.PREFLIGHT
    log: tuple[str, ...] = ()
    """Lines from the node that tell more."""

    def line(self) -> str:
        """Return node, cause and fix on one line, whatever a node said."""
        return _line(f"{self.node}: {self.cause}. {self.fix}")

    def log_lines(self) -> list[str]:
        """Return the log's lines, as a terminal shows them."""
        return [_line(each) for each in self.log]


def _line(text: str) -> str:
    return printable_line(text[:_LINE_CHARS]).rstrip()


def from_error(node: Node, error: TileforgeError) -> Finding:
    """Return the finding for a node that could not be asked."""
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
    """Return whether the node's bootstrap is done, and if not, where it is or broke off."""
    state = facts.bootstrap
    log = facts.bootstrap_log
    if state is None:
        cause = f"bootstrap has not begun to report: there is no {BOOTSTRAP_STATE}"
        fix = "Wait if the machine has just booted; else see `cloud-init status --long` there."
    elif not _is_whole(state):
        cause = f"{BOOTSTRAP_STATE} is damaged: {shown(state)}"
        fix = "Replace the machine, or run its bootstrap again."
    elif state["ok"] is True:
        return
    elif state["ok"] is False:
        # The reason is the end of the bootstrap's log, which only root may read.
        lines = str(state["reason"] or "").strip().splitlines()[-_LOG_LINES:]
        log = tuple(lines) or log
        cause = f"bootstrap failed in step {shown(state['step'])}: {_main_line(log)}"
        fix = "Remove the cause and run the bootstrap again."
    else:
        cause = f"bootstrap is not done yet, it is at step {shown(state['step'])}"
        fix = "Wait and try again."
    yield _error(node, "bootstrap", cause, fix, exit_code=ExitCode.BOOTSTRAP, log=log)


def payload_findings(
    nodes: Sequence[Node], facts: Mapping[str, NodeFacts], *, version: str, lock_sha: str | None
) -> Iterator[Finding]:
    """Yield nodes with another release or lock than this machine's.

    Without a lock here (`lock_sha`), the nodes are compared with the first of them.
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
            cause = f"it has payload {_word(state.get('version'))}, this machine has {version}"
            yield _error(node, "payload", cause, "Run the bootstrap again with this release.")
        elif state.get("sha") != expected:
            cause = (
                f"its packages are from another lock than {whose}'s "
                f"({_word(state.get('sha'))}, {_word(expected)})"
            )
            fix = "Run the bootstrap again with this release's requirements.lock."
            yield _error(node, "payload", cause, fix)


def cpu_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Compare cores, NUMA domains and matrix tiles with the inventory."""
    for name, planned, found in (
        ("physical core(s)", node.physical_cores, facts.physical_cores),
        ("NUMA domain(s)", node.numa_domains, facts.numa_domains),
    ):
        if found is not None and found < planned:
            cause = f"it has {found} {name}, the inventory says {planned}"
            yield _error(node, "cpu", cause, "Correct the inventory, or the machine type.")
        elif found is not None and found > planned:
            cause = f"it has {found} {name}, the inventory says {planned}: some stay unused"
            yield _warning(node, "cpu", cause, "Correct the inventory.")
    if facts.architecture in ("x86_64", "AMD64") and facts.cpu_flags is not None:
        if _AMX not in facts.cpu_flags:
            cause = "its CPU shows no AMX (amx_bf16): bf16 matmuls take 3 to 6 times as long"
            if _AVX512_BF16 not in facts.cpu_flags:
                cause = (
                    f"its CPU shows no AMX (amx_bf16) and no {_AVX512_BF16}: runs compute in fp32, "
                    "without the project's kernels for layers"
                )
            fix = "Use a machine type with AMX (C3, C4, H3), or a newer kernel or hypervisor."
            yield _warning(node, "cpu", cause, fix)
    elif facts.architecture not in ("x86_64", "AMD64"):
        cause = f"its processor is {facts.architecture}; Intel MPI runs on x86-64 only"
        yield _warning(node, "cpu", cause, "One node still works, under torchrun.")


def capacity_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Compare memory with the inventory, and look at the free disk."""
    if facts.memory_bytes is not None:
        found_gib = facts.memory_bytes / _GIB
        if found_gib < node.memory_gib * _MEMORY_SHARE:
            cause = f"it has {found_gib:.1f} GiB of memory, the inventory says {node.memory_gib:g}"
            yield _error(node, "memory", cause, "Correct the inventory, or the machine type.")
    free_gib = facts.disk_free_bytes / _GIB
    cause = f"{free_gib:.1f} GiB are free in {facts.disk_path}"
    if free_gib < _DISK_ERROR_GIB:
        fix = f"Free at least {_DISK_ERROR_GIB} GiB, or give it a larger disk."
        yield _error(node, "disk", cause, fix)
    elif free_gib < _DISK_WARNING_GIB:
        yield _warning(node, "disk", cause, "Checkpoints of GPT-2 124M need 1.5 GB each.")


def gpu_findings(
    node: Node, facts: NodeFacts, need: GpuNeed | None, *, has_device: bool | None = None
) -> Iterator[Finding]:
    """Yield GPUs that are missing or unfit, and a driver too old for torch; none without a need.

    `has_device` says whether the node has the device file of a GPU, where that is known.
    """
    if need is None or facts.nvidia is None:
        return
    for fault in gpu_faults(facts.nvidia, need=need, node=node, has_device=has_device):
        make = _error if fault.severity == "error" else _warning
        yield make(node, GPU, fault.cause, fault.fix)


def gpu_notes(nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> list[str]:
    """Return the GPUs in words, a line for all nodes that have the same."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        found = facts[node.name].nvidia if node.name in facts else None
        if found is not None and found.devices():
            alike.setdefault(found.describe(), []).append(node.name)
    return [f"{', '.join(names)}: {words}" for words, names in alike.items()]


_FOLDER_FAULTS = {
    "ESTALE": (
        "its handle is stale: the server exports another folder or disk than when it was mounted",
        "Mount it again there: `sudo umount -f -l {folder}; sudo mount {folder}`.",
    ),
    "EACCES": (
        "the login may not write there; the server takes it, or root, for a stranger (root squash)",
        "Make it writable on the server: `sudo chmod 1777 {folder}`.",
    ),
    "EROFS": ("it is mounted or exported read-only", "Export it with `rw` and mount it again."),
    "ENOSPC": ("it is full", "Free some room there."),
    "EDQUOT": ("the login's quota there is used up", "Free some room there, or raise the quota."),
}
_FOLDER_FAULTS["EPERM"] = _FOLDER_FAULTS["EACCES"]


def shared_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield a shared folder that is not mounted, silent, slow, stale, or read-only."""
    found = facts.shared
    if found is None:
        return
    name = f"the shared folder {found.folder}"
    if not found.mounted:
        cause = f"{name} is in /etc/fstab and not mounted"
        fix = f"Start its server, then `sudo mount {found.folder}` there."
    elif found.error is not None:
        other = (f"a write ends with {found.error}", "See the kernel's log there (`dmesg`).")
        why, remedy = _FOLDER_FAULTS.get(found.error, other)
        cause, fix = f"{name}: {why}", remedy.format(folder=found.folder)
    elif found.took_s is None:
        cause = f"{name} does not answer, so a run that uses it would wait without end"
        fix = "Start its server, or open the way to it (TCP port 2049)."
    elif found.took_s > _FOLDER_WARNING_S:
        cause = f"{name} is slow: a small file took {found.took_s:.1f} s"
        yield _warning(node, SHARED, cause, "See the load of its server.")
        return
    else:
        return
    yield _error(node, SHARED, cause, fix)


def clock_findings(nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield nodes whose clock is off; when all agree with each other, the operator's is."""
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
        cause = f"this machine's clock is {_apart(-common)} of every node's"
        yield _warning(nodes[0], "clock", cause, "Set it: times in reports will differ.")
        return
    for node in known:
        offset = offsets.get(node.name)
        if offset is None or abs(offset) <= _CLOCK_WARNING_S:
            continue
        cause = f"its clock is {_apart(offset)} of this machine's"
        fix = "Set it: timedatectl set-ntp true (or chronyc makestep) there."
        kind = _error if abs(offset) > _CLOCK_ERROR_S else _warning
        yield kind(node, "clock", cause, fix)


def name_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Yield a hostname that leads programs to the loopback, or nowhere."""
    addresses = facts.hostname_addresses
    fix = "mpirun and gloo are told their interface, so a run works; other programs may not."
    if not addresses:
        cause = f"its own name {facts.hostname!r} does not resolve there"
        yield _warning(node, "name", cause, fix)
    elif all(_is_loopback(address) for address in addresses):
        cause = f"its own name {facts.hostname!r} resolves to {addresses[0]} there"
        yield _warning(node, "name", cause, fix)
    if not facts.resolver_answers:
        cause = "its resolver does not answer when asked for another node's name"
        fix = "mpirun and gloo ask and wait: add all nodes to /etc/hosts, or fix /etc/resolv.conf."
        yield _warning(node, "name", cause, fix)


def route_findings(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    """Return whether the way between the nodes is known and leaves from the inventory's address."""
    if facts.interface is None:
        cause = "the interface on the way to the other nodes is not known (`ip route get` failed)"
        fix = "Install iproute2 there and see that it has a route to the head's address."
        yield _error(node, "route", cause, fix)
    elif facts.interface == "lo" and not _is_loopback(node.address):
        cause = "its way to the other nodes is the loopback interface"
        fix = "Two nodes of the inventory have addresses of one machine. Correct the inventory."
        yield _error(node, "route", cause, fix)
    elif facts.source_address not in (None, node.address) and not _is_loopback(node.address):
        cause = (
            f"packets to the other nodes leave from {facts.source_address} ({facts.interface}), "
            f"the inventory says {node.address}"
        )
        yield _warning(node, "route", cause, "See that both are open between the nodes.")


def exposure_finding(head: Node, *, port: int) -> Finding:
    """Return a warning that the operator's machine, which is no node, reaches the ranks' ports."""
    address = head.external_address or head.address
    cause = (
        f"this machine is no node and reaches port {port} of {address}, so others may, too: the "
        "port where the ranks meet has no password"
    )
    meeting = f"{RANK_PORTS[0]}-{RANK_PORTS[-1]}"
    fix = f"Open TCP {meeting} and 32768-60999 to the nodes' addresses alone (docs/security.md)."
    return _warning(head, "ports", cause, fix)


def mesh_findings(
    nodes: Sequence[Node], answers: Mapping[str, MeshAnswer], *, mtus: Mapping[str, int]
) -> Iterator[Finding]:
    """Yield pairs of nodes between which a port is closed, or large packets are lost."""
    by_name = {node.name: node for node in nodes}
    deaf = {name for name, answer in answers.items() if answer.bind_error}
    for name in sorted(deaf):
        cause = f"it cannot listen on {answers[name].bind_error}"
        fix = "Is the inventory's address its own, and the port free? Correct it, or try again."
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
            f"packets over {largest} bytes to {peer.name} get lost, its interface sends {mtu} (MTU)"
        )
        # Where TCP finds the way's own limit, data arrive all the same.
        kind = _error if failed else _warning
        yield kind(node, "ports", cause, f"Set the MTU to {largest} on all nodes.")
    elif failed:
        said = ", ".join(f"{port}: {reason}" for port, reason in failed.items())
        cause = f"it cannot reach {peer.name} ({peer.address}) on port(s) {said}"
        fix = (
            "Ranks use any TCP port between nodes. Open them in the firewall: between these two, "
            "both ways."
        )
        yield _error(node, "ports", cause, fix)


def _main_line(log: Sequence[str]) -> str:
    """Return the last line that names an error, or the last one."""
    named = [line for line in log if "error" in line.lower() or line.startswith("E: ")]
    return (named or list(log) or ["it gave no reason"])[-1].strip().rstrip(".")


def _word(value: Any) -> str:
    """Return the beginning of what should be a version or a hash."""
    return shown(value).strip("'")[:12]


def _is_whole(state: Any) -> bool:
    return isinstance(state, dict) and {"step", "ok", "reason"} <= set(state)


def is_ready(state: Any) -> bool:
    """Return whether a node's bootstrap.json says that it is done."""
    return _is_whole(state) and state["ok"] is True


def has_failed(state: Any) -> bool:
    """Return whether it says that the bootstrap failed, which only a person can fix."""
    return _is_whole(state) and state["ok"] is False


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _apart(offset_s: float) -> str:
    size = abs(offset_s)
    words = f"{size:.1f} s" if size < 120 else f"{size / 60:.0f} min"
    return f"{words} {'ahead' if offset_s > 0 else 'behind'}"


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
