"""Builds the report of `preflight`: a table, findings with fixes, and trial measurements."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from payload.config.run_config import RunConfig
from payload.core.dtype import BF16_MIN_GAIN
from payload.core.errors import ExitCode, TileforgeError, most_telling
from payload.estimates.network import LOCAL_LINK
from payload.estimates.step_time import predict_step
from payload.launch.ranks import Placement
from payload.machines.core_speed import flags_have_bf16
from payload.machines.inventory import Node
from payload.machines.machine import Domain
from payload.models.spec import ModelSpec
from payload.orchestrate.findings.nodes import (
    NCCL,
    TRIED,
    Finding,
    NodeFacts,
    checks,
    has_failed,
)
from payload.orchestrate.findings.trial import Measured, Record, known_trial, nodes_sha, record_path
from payload.orchestrate.hardware.nvidia import for_prediction, gpu_need
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.preflight.cluster_trial import Trial, try_cluster, try_this_machine
from payload.orchestrate.runs.run_input_checks import initial_spec
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import this_code
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.tables import table

_SLOW_NODE_SHARE = 0.8
_SLOW_LINK_SHARE = 0.5
# A part of the all-reduce overlaps with the backward pass, which is two thirds of the compute.
_MOST_SYNC_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted step of a run on the measured nodes."""

    what: str
    """Description of the run, for messages."""
    sync_s: float
    """Time of the all-reduce without any overlap; 0 with one rank."""
    compute_s: float
    step_s: float
    """Time of the step, with the update and the part of the all-reduce that does not overlap."""


def predict(
    config: RunConfig, spec: ModelSpec, measured: Measured, *, threads: int = 1
) -> Prediction:
    """Predict the times of one step, for ranks with `threads` threads."""
    config = config.computing_in(measured.dtype(config.precision.dtype))
    # One rank has no link.
    network = (measured.link() or LOCAL_LINK).network(measured.world_size)
    peak = measured.peak_flops_per_s(config.dtype())
    step = predict_step(config, spec, peak_flops_per_s=peak, network=network, threads=threads)
    return Prediction(
        what=f"{spec.num_params() / 1e6:.3g}M parameters, {config.batch.global_batch_size} "
        f"sequences of {config.data.sequence_length} tokens a step",
        sync_s=step.parts.exchange_s,
        compute_s=step.compute.seconds,
        step_s=step.parts.total_s(),
    )


def summary(measured: Measured, prediction: Prediction) -> str:
    """Return one line about the network and its effect on the step time."""
    link = measured.link()
    if link is None or measured.latency_s is None:
        return (
            f"measured with one rank, so without an exchange; predicted for {prediction.what}: "
            f"{_seconds(prediction.compute_s)} of computing"
        )
    return (
        f"all-reduce over {measured.world_size} ranks: {bits_text(link.bytes_per_s)} each way, "
        f"{measured.latency_s * 1e3:.1f} ms; predicted for {prediction.what}: "
        f"{_seconds(prediction.sync_s)} of synchronisation beside "
        f"{_seconds(prediction.compute_s)} of computing, {_seconds(prediction.step_s)} a step"
    )


def speed_findings(
    nodes: Sequence[Node], measured: Measured, *, without_bf16: Collection[str] = ()
) -> Iterator[Finding]:
    """Yield findings about nodes that gain nothing from bf16 or are slower than similar nodes.

    The nodes `without_bf16`, whose CPUs have no bf16 instructions, already have a finding.
    """
    for node in nodes:
        speed = measured.nodes[node.name]
        if speed.gain() < BF16_MIN_GAIN and node.name not in without_bf16:
            rates = speed.bf16_flops_per_s, speed.fp32_flops_per_s
            bf16, fp32 = map(tflops_text, rates)
            cause = (
                f"bf16 matmuls run at {speed.gain():.2f}x the speed of fp32 on this node "
                f"({bf16} and {fp32} TFLOP/s)"
            )
            fix = "A run with precision.dtype = auto uses fp32 if fp32 is faster over all ranks."
            yield _warning(node.name, "speed", cause, fix)
    for group in _alike(nodes):
        speeds = {node.name: measured.nodes[node.name].best_flops_per_s() for node in group}
        median = statistics.median(speeds.values())
        for name, speed_flops in speeds.items():
            if speed_flops < _SLOW_NODE_SHARE * median:
                cause = (
                    f"it is slow among {len(group)} nodes of its kind: {tflops_text(speed_flops)} "
                    f"TFLOP/s, but the median is {tflops_text(median)}"
                )
                fix = (
                    "The slowest rank sets the pace. Try again, check for other programs on the "
                    "node (top)"
                )
                yield _warning(name, "speed", cause, f"{fix}, or replace the node.")


def exchange_findings(
    nodes: Sequence[Node], measured: Measured, prediction: Prediction
) -> Iterator[Finding]:
    """Yield findings about slow links or the network, if the network dominates the step time."""
    if len(nodes) == 1 or prediction.sync_s <= _MOST_SYNC_SHARE * prediction.compute_s:
        return
    names = [node.name for node in nodes]
    slow = slow_links(names, measured)
    link = measured.link()
    whose = "its link is slow" if slow else f"the network between {', '.join(names)} is slow"
    for name in slow or names[:1]:
        received = measured.nodes[name].received_bytes_per_s
        between = link.bytes_per_s if link else 0.0
        speed = received if slow and received is not None else between
        cause = (
            f"{whose}, {bits_text(speed)}: predicted {_seconds(prediction.sync_s)} of "
            f"synchronisation a step beside {_seconds(prediction.compute_s)} of computing "
            f"({prediction.what})"
        )
        fix = (
            "Repair the network, raise batch.global_batch_size, or set distributed.grad_dtype = "
            "'bf16'."
        )
        yield _warning(name, "gloo", cause, fix)


def slow_links(names: Sequence[str], measured: Measured) -> list[str]:
    """Return the nodes that both receive and send more slowly than other nodes.

    Each node receives from the previous node, so a slow transfer may be caused by either node.
    """
    received = [measured.nodes[name].received_bytes_per_s for name in names]
    known = [speed for speed in received if speed is not None]
    if len(known) < len(names) or len(names) < 3:
        return []
    is_slow = [speed < _SLOW_LINK_SHARE * max(known) for speed in known]
    return [name for i, name in enumerate(names) if is_slow[i] and is_slow[(i + 1) % len(is_slow)]]


def _alike(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the groups of two or more nodes of the same kind."""
    kinds: dict[tuple[str | None, int, int], list[Node]] = {}
    for node in nodes:
        kind = (node.machine_type, node.physical_cores, node.numa_domains)
        kinds.setdefault(kind, []).append(node)
    return [like for like in kinds.values() if len(like) > 1]


def bits_text(bytes_per_s: float) -> str:
    """Return a network rate in decimal bits: `9.8 Gbit/s`, `0.92 Mbit/s`."""
    gbit = bytes_per_s * 8 / 1e9
    return f"{gbit:.3g} Gbit/s" if gbit >= 0.1 else f"{gbit * 1e3:.3g} Mbit/s"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def tflops_text(flops_per_s: float) -> str:
    """Return TFLOP/s with two decimals, or with more below 0.1."""
    tflops = flops_per_s / 1e12
    return f"{tflops:.2f}" if tflops >= 0.1 else f"{tflops:.2g}"


def _warning(node: str, check: str, cause: str, fix: str) -> Finding:
    return Finding(node=node, check=check, severity="warning", cause=cause, fix=fix)


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one preflight."""

    cluster: str
    checks: Mapping[str, Sequence[str]]
    """Checks that were made on each node."""
    facts: Mapping[str, NodeFacts]
    """Facts about each node that answered."""
    findings: Sequence[Finding]
    took_s: float
    measured: Measured | None = None
    """The trial's measurements; None without a successful trial."""
    notes: Sequence[str] = ()

    @property
    def exit_code(self) -> ExitCode:
        """Return 0 if no finding is an error; warnings do not count."""
        codes = [finding.exit_code for finding in self.findings if finding.severity == "error"]
        return most_telling(codes) if codes else ExitCode.OK

    def failing_nodes(self) -> list[str]:
        """Return the names of nodes with an error, in the order of the inventory."""
        failing = {finding.node for finding in self.findings if finding.severity == "error"}
        return [node for node in self.checks if node in failing]

    def least_memory_bytes(self) -> int | None:
        """Return the memory of the node with the least memory."""
        sizes = [facts.memory_bytes for facts in self.facts.values()]
        return min((size for size in sizes if size is not None), default=None)

    def have_bf16(self) -> bool | None:
        """Return whether every node's CPU has bf16 matmuls; None if unknown."""
        if any(map(_lacks_bf16, self.facts.values())):
            return False
        flags = [facts.cpu_flags for facts in self.facts.values()]
        return True if flags and None not in flags else None

    def status(self, node: str, check: str) -> str:
        """Return `ok`, `warning`, `error`, or `-` for a check that was not made."""
        found = {f.severity for f in self.findings if (f.node, f.check) == (node, check)}
        if found:
            return "error" if "error" in found else "warning"
        return "ok" if check in self.checks[node] else "-"

    def table(self) -> Table:
        """Return a row for each node, and a column for each check that was made on any node."""
        made = [check for check in checks() if any(check in done for done in self.checks.values())]
        names = ["node", *made, "cores", "GiB", "free GiB", "interface", "MTU"]
        names += ["TFLOP/s bf16", "fp32", "Gbit/s"] if self.measured else []
        found = table(*names)
        for node in self.checks:
            statuses = [self.status(node, check) for check in made]
            found.add_row(
                node, *statuses, *_numbers(self.facts.get(node)), *_speeds(self.measured, node)
            )
        return found

    def lines(self) -> list[str]:
        """Return the lines of all findings with their logs, errors first, then the notes."""
        lines = []
        for finding in sorted(self.findings, key=lambda finding: finding.severity):
            lines.append(f"{finding.severity}: {finding.line()}")
            lines += [f"  | {line}" for line in finding.log_lines()]
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def to_json(self) -> str:
        """Return the report as JSON."""
        nodes = {
            node: {
                "checks": {check: self.status(node, check) for check in checks()},
                "facts": asdict(self.facts[node]) if node in self.facts else None,
            }
            for node in self.checks
        }
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "cluster": self.cluster,
                "exit_code": self.exit_code,
                "exit_class": self.exit_code.label,
                "took_s": round(self.took_s, 3),
                "nodes": nodes,
                "findings": [asdict(finding) for finding in self.findings],
                "measured": asdict(self.measured) if self.measured else None,
                "notes": list(self.notes),
            },
            indent=2,
        )


def _lacks_bf16(facts: NodeFacts) -> bool:
    return facts.cpu_flags is not None and not flags_have_bf16(facts.cpu_flags)


def _numbers(facts: NodeFacts | None) -> list[str]:
    if facts is None:
        return ["-"] * 5
    memory = None if facts.memory_bytes is None else f"{facts.memory_bytes / 2**30:.1f}"
    free = f"{facts.disk_free_bytes / 2**30:.1f}"
    values = [facts.physical_cores, memory, free, facts.interface, facts.mtu]
    return ["-" if value is None else str(value) for value in values]


def _speeds(measured: Measured | None, node: str) -> list[str]:
    """Return the matmul rate in each dtype, and the rate at which the node receives."""
    if measured is None:
        return []
    speed = measured.nodes[node]
    received = speed.received_bytes_per_s
    return [
        f"{speed.bf16_flops_per_s / 1e12:.2f}",
        f"{speed.fp32_flops_per_s / 1e12:.2f}",
        "-" if received is None else f"{received * 8 / 1e9:.3g}",
    ]


_T = TypeVar("_T")

# While a machine boots, it has no host keys, sshd, account or finished bootstrap.
_BOOTING_CODES = (ExitCode.SSH_UNREACHABLE, ExitCode.SSH_AUTH, ExitCode.BOOTSTRAP)
_PAUSE_S = 10.0


class BootWait:
    """Retries while machines boot, within a time limit; prints each reason once."""

    def __init__(self, wait_s: float, say: Callable[[str], None]) -> None:
        """Start the timer."""
        self._ends = time.monotonic() + wait_s
        self._say = say
        self._last_reason: str | None = None

    def until_found(self, look: Callable[[], _T]) -> _T:
        """Retry `look` while machines boot and return its result; raise all other errors."""
        while True:
            try:
                return look()
            except TileforgeError as error:
                if error.exit_code not in _BOOTING_CODES or not self._has_paused(str(error)):
                    raise

    def until_ready(self, check: Callable[[], Report]) -> Report:
        """Return the first report after all nodes have booted, or the report at the time limit."""
        while True:
            report = check()
            if not _is_booting(report) or not self._has_paused(_reason(report)):
                return report

    def _has_paused(self, reason: str) -> bool:
        """Pause and return True, or return False if not enough time is left."""
        if not time.monotonic() + _PAUSE_S <= self._ends:
            return False
        if reason != self._last_reason:
            self._say(f"waiting: {reason}")
            self._last_reason = reason
        time.sleep(_PAUSE_S)
        return True


def _is_booting(report: Report) -> bool:
    failed = any(has_failed(facts.bootstrap) for facts in report.facts.values())
    return report.exit_code in _BOOTING_CODES and not failed


def _reason(report: Report) -> str:
    """Return the errors of all nodes as one line; the errors are the reason to wait."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    return "; ".join(f"{finding.node}: {finding.cause}" for finding in errors)


FRESH_S = 24 * 3600.0
"""Maximum age of a trial that `run` accepts for the same payload and nodes."""


def try_on_cluster(
    report: Report,
    nodes: Sequence[Node],
    cluster: Cluster,
    config: RunConfig,
    placement: Placement | None = None,
) -> Report:
    """Run a trial on the cluster, store it if it succeeds, and return the extended report."""
    talk = text_console(stderr=True)
    report = with_trial(
        report,
        nodes,
        config,
        lambda: try_cluster(
            nodes, cluster, report.facts, config=config, talk=talk, placement=placement
        ),
    )
    keep(report, nodes, Path.cwd(), now_unix=time.time())
    return report


def try_if_new(
    report: Report,
    nodes: Sequence[Node],
    cluster: Cluster,
    config: RunConfig,
    placement: Placement | None = None,
) -> Report:
    """Run a trial before a run.

    The trial is skipped if a recent trial of this payload on these nodes has succeeded.
    """
    record = _known_trial_of(report, nodes, config)
    if record is not None and is_fresh(record, now_unix=time.time()):
        return replace(report, measured=record.measured)
    return try_on_cluster(report, nodes, cluster, config, placement)


def with_known_trial(report: Report, nodes: Sequence[Node], config: RunConfig) -> Report:
    """Return the report with the newest trial of these nodes.

    The trial can be old, because `plan` also uses old trials.
    """
    record = _known_trial_of(report, nodes, config)
    return report if record is None else replace(report, measured=record.measured)


def _known_trial_of(report: Report, nodes: Sequence[Node], config: RunConfig) -> Record | None:
    on_gpus = gpu_need(config, nodes) is not None
    return known_trial(report.cluster, nodes, Path.cwd(), on_gpus=on_gpus)


def try_on_this_machine(
    report: Report,
    nodes: Sequence[Node],
    access: LocalAccess,
    config: RunConfig,
    *,
    domains: Mapping[str, tuple[Domain, ...]],
) -> Report:
    """Run a trial on this machine and return the extended report."""
    with tempfile.TemporaryDirectory(prefix="tileforge-") as folder:
        return with_trial(
            report,
            nodes,
            config,
            lambda: try_this_machine(nodes, access, Path(folder), config=config, domains=domains),
        )


def with_trial(
    report: Report, nodes: Sequence[Node], config: RunConfig, make: Callable[[], Trial]
) -> Report:
    """Return the report with the findings of a trial; skip the trial if a node is not fit."""
    if report.exit_code:
        note = (
            "nothing was started or measured, because these nodes are not fit: "
            f"{', '.join(report.failing_nodes())}"
        )
        return replace(report, notes=[*report.notes, note])
    silent = [name for name, facts in report.facts.items() if not facts.resolver_answers]
    if silent:
        # Each rank and mpirun itself would wait for the resolver many times.
        note = f"mpirun was not tried, because the resolver of {', '.join(silent)} does not answer"
        return replace(report, notes=[*report.notes, note])
    began = time.monotonic()
    trial = make()
    took_s = report.took_s + time.monotonic() - began
    if trial.note is not None:
        return replace(report, notes=[*report.notes, trial.note], took_s=took_s)
    tried = (trial.launcher, *TRIED, *([NCCL] if trial.on_gpus else []))
    made = [check for check in tried if check != "gloo" or len(nodes) > 1]
    findings, notes = list(trial.findings), list(report.notes)
    if trial.measured is None:
        # The trial makes no checks after a failed check.
        made = sorted({finding.check for finding in findings} & set(made), key=tried.index)
    else:
        spec, guess = initial_spec(config, vocab_size=None)
        ranks_per_node = trial.measured.world_size // len(nodes)
        cores = min(node.physical_cores for node in nodes)
        threads = config.launch.threads_per_rank or max(1, cores // ranks_per_node)
        device = for_prediction(config, nodes)
        prediction = predict(device, config.adapted(spec), trial.measured, threads=threads)
        without_bf16 = [name for name, facts in report.facts.items() if _lacks_bf16(facts)]
        findings += speed_findings(nodes, trial.measured, without_bf16=without_bf16)
        findings += exchange_findings(nodes, trial.measured, prediction)
        notes += [summary(trial.measured, prediction), *([guess] if guess else [])]
    return replace(
        report,
        checks={node: [*checks, *made] for node, checks in report.checks.items()},
        findings=[*report.findings, *findings],
        measured=trial.measured,
        notes=notes,
        took_s=took_s,
    )


def keep(report: Report, nodes: Sequence[Node], root: Path, *, now_unix: float) -> None:
    """Store a successful trial for `plan` and the next `run`."""
    if report.measured is None or report.exit_code:
        return
    interfaces = {name: facts.interface for name, facts in report.facts.items()}
    Record(
        nodes_sha=nodes_sha(nodes),
        code=this_code().digest,
        time_unix=now_unix,
        interfaces={name: found for name, found in interfaces.items() if found},
        measured=report.measured,
    ).write(record_path(root, cluster=report.cluster))


def is_fresh(record: Record, *, now_unix: float) -> bool:
    """Return whether the trial is recent enough for `run` to skip a new trial."""
    age_s = now_unix - record.time_unix
    return record.code == this_code().digest and 0 <= age_s < FRESH_S
