"""What `preflight` prints: one table, then every finding with its fix."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from payload.errors import ExitCode, most_telling
from payload.orchestrate.facts import NodeFacts
from payload.orchestrate.findings import Finding, checks, one_line
from payload.orchestrate.measured import Measured

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one preflight."""

    cluster: str
    checks: Mapping[str, Sequence[str]]
    """By node: the checks that were made there."""
    facts: Mapping[str, NodeFacts]
    """By node, where it could be asked."""
    findings: Sequence[Finding]
    took_s: float
    measured: Measured | None = None
    """The trial's figures, where there was one that passed."""
    notes: Sequence[str] = ()

    @property
    def exit_code(self) -> ExitCode:
        """0 when nothing keeps a run from working; warnings do not."""
        codes = [finding.exit_code for finding in self.findings if finding.severity == "error"]
        return most_telling(codes) if codes else ExitCode.OK

    def failing_nodes(self) -> list[str]:
        """Nodes with an error, in the inventory's order."""
        failing = {finding.node for finding in self.findings if finding.severity == "error"}
        return [node for node in self.checks if node in failing]

    def least_memory_bytes(self) -> int | None:
        """Of the node with the least."""
        sizes = [facts.memory_bytes for facts in self.facts.values()]
        return min((size for size in sizes if size is not None), default=None)

    def status(self, node: str, check: str) -> str:
        """`ok`, `warning`, `error`, or `-` for a check that was not made."""
        found = {f.severity for f in self.findings if (f.node, f.check) == (node, check)}
        if found:
            return "error" if "error" in found else "warning"
        return "ok" if check in self.checks[node] else "-"

    def table(self) -> Table:
        """A row for each node, a column for each check that was made somewhere."""
        made = [check for check in checks() if any(check in done for done in self.checks.values())]
        table = Table(box=None, pad_edge=False)
        names = ["node", *made, "cores", "GiB", "free GiB", "interface", "MTU"]
        names += ["TFLOP/s bf16", "fp32", "Gbit/s"] if self.measured else []
        for name in names:
            table.add_column(name, no_wrap=True)
        for node in self.checks:
            statuses = [self.status(node, check) for check in made]
            table.add_row(
                node, *statuses, *_numbers(self.facts.get(node)), *_speeds(self.measured, node)
            )
        return table

    def lines(self) -> list[str]:
        """Every finding, errors first, each with its log."""
        lines = []
        for finding in sorted(self.findings, key=lambda finding: finding.severity):
            lines.append(f"{finding.severity}: {finding.line()}")
            lines += [f"  | {one_line(line)}" for line in finding.log]
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def to_json(self) -> str:
        """The same for programs."""
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


def _numbers(facts: NodeFacts | None) -> list[str]:
    if facts is None:
        return ["-"] * 5
    memory = None if facts.memory_bytes is None else f"{facts.memory_bytes / 2**30:.1f}"
    free = f"{facts.disk_free_bytes / 2**30:.1f}"
    values = [facts.physical_cores, memory, free, facts.interface, facts.mtu]
    return ["-" if value is None else str(value) for value in values]


def _speeds(measured: Measured | None, node: str) -> list[str]:
    """Of the matrix products in each dtype, and of what the node receives from its neighbour."""
    if measured is None:
        return []
    speed = measured.nodes[node]
    received = speed.received_bytes_per_s
    return [
        f"{speed.bf16_flops_per_s / 1e12:.2f}",
        f"{speed.fp32_flops_per_s / 1e12:.2f}",
        "-" if received is None else f"{received * 8 / 1e9:.3g}",
    ]
