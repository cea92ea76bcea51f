"""Finds faults in the output of a trial, and stores the measurements of the trial for `run`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from payload.config.training_sections import DtypeChoice
from payload.core.dtype import BF16_MIN_GAIN, Dtype
from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.one_line import joined_lines
from payload.core.regular_files import read_bytes
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import NODE_NAME
from payload.core.validation.records import build, check_schema
from payload.estimates.network import LOCAL_LINK, Link, sends_per_byte
from payload.launch.launcher import BOOTSTRAP_AGAIN, MISSING_LIBRARY, Launcher
from payload.machines.inventory import Node
from payload.orchestrate.findings.nodes import GPU, NCCL, Finding
from payload.stack.cluster_files import cluster_path

MARK = "tileforge-trial "
"""Prefix of the output lines of payload/train/fabric.py that this module parses."""

MAX_RANKS = 100_000
_OUTPUT_CHARS = 2**19
_LOG_LINES = 8
_ALARM = 14
_REFUSED = f"{ConfigError.__name__}: "
_NCCL_FIX = (
    "Open all TCP ports between the nodes; NCCL_DEBUG=INFO in the nodes' environment shows the "
    "interface that NCCL uses, and NCCL_SOCKET_IFNAME sets it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """Matmul rates of one rank."""

    node: str = checked(pattern=NODE_NAME, wanted="a node name")
    bf16: float = checked(low=1, high=1e18)
    fp32: float = checked(low=1, high=1e18)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Network rates of an all-reduce between all ranks."""

    all_reduce_bytes_per_s: float = checked(low=1, high=1e15)
    latency_s: float = checked(low=0, high=1e4)
    received_bytes_per_s: tuple[float, ...] = checked(low=1, high=1e15, max_items=MAX_RANKS)
    """Receive rate of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measurements that rank 0 reports."""

    ranks: tuple[RankSpeed, ...] = checked(max_items=MAX_RANKS)
    exchange: Exchange | None
    """Rates of the all-reduce; None with one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """A line of output from payload/train/fabric.py."""

    node: str | None = checked(None, pattern=NODE_NAME, wanted="a node name")
    stage: str | None = checked(None, max_chars=32)
    error: str | None = checked(None, max_chars=10_000)
    result: Result | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The response of node/mesh.py after a trial."""

    unreached: Mapping[str, str]
    """Output of ssh for each worker that the head could not reach."""
    status: int | None
    """Exit status of the launcher; None if it was not started or did not end in time."""
    late: bool
    stdout: str = checked(max_chars=_OUTPUT_CHARS)
    stderr: str = checked(max_chars=_OUTPUT_CHARS)

    def records(self) -> list[RankRecord]:
        """Return the valid records of the ranks, in order of arrival.

        A launcher mixes the output of ranks, so there may be no line break between two records.
        """
        found = []
        for part in self.stdout.split(MARK)[1:]:
            with suppress(ConfigError, ValueError, RecursionError):
                _, end = json.JSONDecoder().raw_decode(part)
                raw = parse_json(part[:end], where="the trial")
                found.append(build(RankRecord, raw, where="the trial"))
        return found

    def result(self) -> Result | None:
        """Return the measurements of rank 0, or None."""
        return next((record.result for record in self.records() if record.result is not None), None)


def failures(
    nodes: Sequence[Node],
    outcome: Outcome,
    *,
    hostnames: Mapping[str, str],
    deadline_s: float,
    launcher: Launcher,
    on_gpus: bool = False,
) -> list[Finding]:
    """Return the findings of the first source that has findings.

    The sources are, in this order: ssh, the ranks, the launcher, and silent nodes. `hostnames` maps
    hostnames, which begin the output lines of mpirun's helpers, to node names. With `on_gpus`, the
    ranks communicated over NCCL.
    """
    if outcome.status == 0 and outcome.result() is not None:
        return []
    found = [*_unreached(nodes, outcome, launcher)] or [
        *_rank_findings(nodes, outcome, on_gpus=on_gpus)
    ]
    return (
        found
        or [*_launcher_findings(nodes, outcome, hostnames, launcher)]
        or [*_silent(nodes, outcome, deadline_s=deadline_s, launcher=launcher, on_gpus=on_gpus)]
    )


def _unreached(nodes: Sequence[Node], outcome: Outcome, launcher: Launcher) -> Iterator[Finding]:
    head = nodes[0].name
    for node in nodes:
        output = outcome.unreached.get(node.name)
        if output is None:
            continue
        last = (output.splitlines() or ["no output"])[-1].rstrip(".")
        if "verification failed" in output:
            fix = (
                f"Its sshd shows {head} a host key that differs from the one in the inventory. "
                "Correct the inventory or the key."
            )
        elif "Permission denied" in output:
            fix = "Check that its sshd reads ~/.ssh/authorized_keys and accepts the head."
        else:
            fix = f"Open TCP port {node.ssh_port} of this node for the other nodes."
        cause = f"{head} cannot start a program on this node over ssh: {last}"
        yield _error(node.name, launcher.name, cause, fix, log=tuple(output.splitlines()))


def _rank_findings(nodes: Sequence[Node], outcome: Outcome, *, on_gpus: bool) -> Iterator[Finding]:
    records = outcome.records()
    known = {node.name for node in nodes}
    errors = {
        record.node: record.error for record in records if record.node in known and record.error
    }
    broken = {name: text for name, text in errors.items() if _is_environment(text)}
    for name, text in broken.items():
        library = MISSING_LIBRARY.search(text)
        cause = f"torch cannot be loaded on this node: {_one_line(text)}"
        if library:
            cause = f"its environment lacks the library {library[1].rpartition('/')[2]}"
        yield _error(name, "payload", cause, BOOTSTRAP_AGAIN, log=(text,) if library else ())
    no_gpu = {name: text for name, text in errors.items() if text.startswith(_REFUSED)}
    if on_gpus and not broken:
        for name, text in no_gpu.items():
            cause = f"its rank has no GPU: {_one_line(text.removeprefix(_REFUSED))}"
            yield _error(name, GPU, cause, "Run `nvidia-smi` on this node.")
    if broken or (on_gpus and no_gpu):
        return  # the other ranks only lost contact
    joined = {record.node for record in records if record.stage == "joined"}
    for name, text in errors.items():
        if on_gpus and name in joined:
            yield _error(name, NCCL, f"NCCL failed while measuring: {_one_line(text)}", _NCCL_FIX)
            continue
        doing = "while measuring" if name in joined else "while the ranks connect to each other"
        cause = f"gloo failed {doing}: {_one_line(text)}"
        yield _error(name, "gloo", cause, "Check that all TCP ports are open between the nodes.")


def _launcher_findings(
    nodes: Sequence[Node],
    outcome: Outcome,
    hostnames: Mapping[str, str],
    launcher: Launcher,
) -> Iterator[Finding]:
    text = outcome.stderr + outcome.stdout
    failures = list(launcher.trial_failures(text, nodes=nodes, hostnames=hostnames))
    for failure in failures:
        log = _log(outcome, launcher) if failure.shows_log else ()
        yield _error(failure.node, launcher.name, failure.cause, failure.fix, log=log)
    killed = launcher.report(text).killed
    if not failures and killed and killed.signal != _ALARM:
        where = next((node for node in nodes if node.address == killed.address), nodes[0])
        cause = f"the trial's rank on this node was killed by signal {killed.signal}"
        yield _error(where.name, launcher.name, cause, "Check the memory of the node: see dmesg.")


def _silent(
    nodes: Sequence[Node],
    outcome: Outcome,
    *,
    deadline_s: float,
    launcher: Launcher,
    on_gpus: bool,
) -> Iterator[Finding]:
    """Yield findings about the nodes that made the least progress, if no cause is known."""
    records = outcome.records()
    ports = (
        "Check that all TCP ports are open between the nodes, and that Python starts on this node."
    )
    stages = [
        ("started", launcher.name, f"{launcher.name} started no rank on this node", ports),
        ("joined", "gloo", "its rank did not find the other ranks", ports),
    ]
    if on_gpus:
        stages.append(
            ("summed", NCCL, "NCCL's first all-reduce did not finish on this node", _NCCL_FIX)
        )
    reached = {
        stage: {record.node for record in records if record.stage == stage} for stage, *_ in stages
    }
    log = _log(outcome, launcher)
    killed = launcher.report(outcome.stdout).killed
    late = outcome.late or (killed is not None and killed.signal == _ALARM)
    within = f" within {deadline_s:g} s" if late else f" (status {outcome.status})"
    for stage, check, what, fix in stages:
        behind = [node for node in nodes if node.name not in reached[stage]]
        for node in behind:
            yield _error(node.name, check, what + within, fix, log=log)
        if behind:
            return
    cause = "the measurement did not end" + within
    check = NCCL if on_gpus else "gloo"
    yield _error(nodes[0].name, check, cause, "Check the network between the nodes.", log=log)


def _log(outcome: Outcome, launcher: Launcher) -> tuple[str, ...]:
    lines = [line for line in outcome.stderr.splitlines() if line]
    if launcher.noise is not None:
        lines = [line for line in lines if not launcher.noise.search(line)]
    return tuple(lines[-_LOG_LINES:])


def _is_environment(text: str) -> bool:
    """Return whether a rank's error is about the packages that are installed on its node."""
    kinds = ("ImportError", "ModuleNotFoundError", "OSError: ")
    return text.startswith(kinds) or MISSING_LIBRARY.search(text) is not None


def _one_line(text: str) -> str:
    return joined_lines(text.strip().rstrip("."), longest=200)


def _error(node: str, check: str, cause: str, fix: str, *, log: tuple[str, ...] = ()) -> Finding:
    return Finding(node=node, check=check, severity="error", cause=cause, fix=fix, log=log)


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeed:
    """The measurements of one node, summed over its ranks."""

    bf16_flops_per_s: float = checked(low=1)
    fp32_flops_per_s: float = checked(low=1)
    received_bytes_per_s: float | None = checked(low=1)
    """Receive rate from the previous node while each node sends to the next; None for one node."""

    def gain(self) -> float:
        """Return the ratio of the bf16 speed to the fp32 speed."""
        return self.bf16_flops_per_s / self.fp32_flops_per_s

    def best_flops_per_s(self) -> float:
        """Return the speed in the faster dtype."""
        return max(self.bf16_flops_per_s, self.fp32_flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one trial."""

    world_size: int = checked(low=1)
    nodes: Mapping[str, NodeSpeed]
    """Measurements by node, in the order of the inventory."""
    all_reduce_bytes_per_s: float | None = checked(low=1)
    """Gradient bytes that an all-reduce sums per second; None with one rank."""
    latency_s: float | None = checked(low=0)
    """Time of an all-reduce of 4 KiB."""
    on_gpus: bool = False
    """True if the ranks computed on GPUs and communicated over NCCL."""

    @classmethod
    def from_result(cls, result: Result, *, on_gpus: bool = False) -> Measured:
        """Return rank 0's result, summed over each node's ranks; see payload/train/fabric.py."""
        exchange = result.exchange
        names = [rank.node for rank in result.ranks]
        received = exchange.received_bytes_per_s if exchange else None
        nodes = {}
        for name in dict.fromkeys(names):
            first = names.index(name)
            own_ranks = [rank for rank in result.ranks if rank.node == name]
            others = len(own_ranks) < len(names)
            nodes[name] = NodeSpeed(
                bf16_flops_per_s=sum(rank.bf16 for rank in own_ranks),
                fp32_flops_per_s=sum(rank.fp32 for rank in own_ranks),
                # Only the first rank of a node receives from a different node.
                received_bytes_per_s=received[first] if received and others else None,
            )
        return cls(
            world_size=len(names),
            nodes=nodes,
            all_reduce_bytes_per_s=exchange.all_reduce_bytes_per_s if exchange else None,
            latency_s=exchange.latency_s if exchange else None,
            on_gpus=on_gpus,
        )

    def link(self) -> Link | None:
        """Return the link of an all-reduce; None with one rank."""
        speed = self.all_reduce_bytes_per_s
        if speed is None:
            return None
        shares_cores = len(self.nodes) == 1 and not self.on_gpus
        return Link(
            bytes_per_s=speed * sends_per_byte(self.world_size),
            busy_s_per_byte=LOCAL_LINK.busy_s_per_byte if shares_cores else 0.0,
        )

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Return the dtype that a run would choose."""
        if choice != "auto":
            return choice
        is_bf16 = self.peak_flops_per_s("bf16") >= BF16_MIN_GAIN * self.peak_flops_per_s("fp32")
        return "bf16" if is_bf16 else "fp32"

    def peak_flops_per_s(self, choice: DtypeChoice) -> float:
        """Return the matmul rate of all nodes together, in the dtype that a run would choose."""
        if self.dtype(choice) == "bf16":
            return sum(speed.bf16_flops_per_s for speed in self.nodes.values())
        return sum(speed.fp32_flops_per_s for speed in self.nodes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A trial that a cluster has passed."""

    nodes_sha: str
    """Digest of the nodes in the inventory."""
    code: str
    """Digest of the payload with which the trial was made."""
    time_unix: float
    interfaces: Mapping[str, str]
    """Network interface towards the other nodes, by node."""
    measured: Measured
    schema_version: int = SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Write the record to `path`."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    def is_of(self, nodes: Sequence[Node]) -> bool:
        """Return whether the trial was made on these nodes."""
        return self.nodes_sha == nodes_sha(nodes)


def record_path(root: Path, *, cluster: str) -> Path:
    """Return the file in the project folder `root` for the newest trial that `cluster` passed."""
    return cluster_path(root, cluster, "trial.json")


def read_record(path: Path) -> Record | None:
    """Return the record at `path`; None if this release cannot read it."""
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, SCHEMA_VERSION, where=str(path))
        return build(Record, raw, where=str(path))
    except (OSError, ConfigError):
        return None


def known_trial(
    cluster: str, nodes: Sequence[Node], root: Path, *, on_gpus: bool = False
) -> Record | None:
    """Return the newest trial that these nodes passed on these devices, or None."""
    record = read_record(record_path(root, cluster=cluster))
    if record is None or not record.is_of(nodes) or record.measured.on_gpus != on_gpus:
        return None
    return record


def nodes_sha(nodes: Sequence[Node]) -> str:
    """Return a digest of these machines; a rebuilt machine has new host keys."""
    known = [
        [node.name, node.address, node.host_keys, node.machine_type, node.physical_cores]
        for node in nodes
    ]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
