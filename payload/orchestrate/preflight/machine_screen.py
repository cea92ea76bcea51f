"""The screen of `preflight` for this machine: its hardware, which computations are fast, and
fixes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from payload.config.run_config import RunConfig
from payload.core.printable_text import counted, printable
from payload.launch.ranks import Placement
from payload.machines.machine_facts import INSTALL_COMPILER, MachineFacts
from payload.orchestrate.findings.nodes import GPU, Finding
from payload.orchestrate.preflight.report import Report, tflops_text

COLUMNS = 80
_LABEL = 13
_GIB = 2**30
_LEAST_FREE_SHARE = 0.5
_HUGE_PAGES_GLIBC = (2, 35)
_LAUNCHER = "launcher"
_ON_GPUS = "PyTorch on the GPUs; the project's kernels are for CPUs"
_ROWS = {
    **{"cpu": "instructions", "memory": "memory", "disk": "disk", "name": "network"},
    **{"gpu": "GPU", "nccl": "GPU", "payload": _LAUNCHER, "mpirun": _LAUNCHER},
    **{"torchrun": _LAUNCHER, "srun": _LAUNCHER, "gloo": _LAUNCHER, "speed": "matmuls"},
}
"""For each check, the label of the row that shows the findings. A check without an entry has a
separate row."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One row of the screen."""

    label: str
    text: str
    advice: list[str] = field(default_factory=list)
    """Sentences with the fix of each fault; empty for a good machine."""


def screen(
    facts: MachineFacts, report: Report, placement: Placement | None, *, config: RunConfig
) -> list[str]:
    """Return the lines, each of at most 80 columns.

    `placement` has the ranks on this machine's CPUs. Without a placement, the run is on GPUs.
    """
    rows = {row.label: row for row in _rows(facts, report, placement, config=config)}
    logs: list[str] = []
    for finding in sorted(report.findings, key=lambda each: each.severity):
        label = _ROWS.get(finding.check, finding.check)
        row = rows.setdefault(label, Row(label=label, text=report.status(*_place(finding))))
        row.advice.append(f"{finding.severity}: {finding.cause}. {finding.fix}".rstrip())
        logs += [f"  | {line}" for line in finding.log_lines()]
    if report.notes:
        rows["note"] = Row(label="note", text="; ".join(report.notes))
    return [line for row in rows.values() for line in _lines(row)] + logs


def _place(finding: Finding) -> tuple[str, str]:
    return finding.node, finding.check


def _lines(row: Row) -> Iterator[str]:
    indent = " " * _LABEL
    yield from _wrapped(row.text, first=f"{row.label:<{_LABEL}}", indent=indent)
    for text in row.advice:
        yield from _wrapped(text, first=f"{indent}-> ", indent=f"{indent}   ")


def _wrapped(text: str, *, first: str, indent: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        COLUMNS,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _rows(
    facts: MachineFacts, report: Report, placement: Placement | None, *, config: RunConfig
) -> Iterator[Row]:
    yield Row(label="CPU", text=f"{facts.cpu}, {_cores_text(facts, report)}")
    yield Row(label="instructions", text=", ".join(facts.instructions) or "none that are known")
    yield Row(
        label="runs fast",
        text=_kernels_text(facts, report, config) if placement is not None else _ON_GPUS,
    )
    if report.measured is not None:
        (speed,) = report.measured.nodes.values()
        rates = (speed.bf16_flops_per_s, speed.fp32_flops_per_s)
        bf16, fp32 = map(tflops_text, rates)
        yield Row(label="matmuls", text=f"{bf16} TFLOP/s in bf16, {fp32} in fp32, measured")
    yield _memory_row(facts)
    yield _limits_row(facts)
    yield Row(label="disk", text=f"{_gib(facts.free_disk_bytes)} GiB free in this folder, for runs")
    yield _compiler_row(facts)
    yield _allocator_row(facts, malloc=config.launch.malloc)
    if placement is not None:
        yield _numa_row(report, placement)
    else:
        (node,) = report.checks
        yield Row(label=_ROWS[GPU], text=report.status(node, GPU))
    yield Row(label=_LAUNCHER, text=_launcher_text(report))


def _cores_text(facts: MachineFacts, report: Report) -> str:
    (node,) = report.facts.values()
    cores = node.physical_cores or facts.usable_cpus
    return f"{counted(cores, 'usable core')}, {counted(facts.cpus, 'CPU')}"


def _kernels_text(facts: MachineFacts, report: Report, config: RunConfig) -> str:
    """Return which computations run on the project's kernels on this machine, and why other
    computations do not."""
    alone = "PyTorch alone, without the project's kernels: "
    if not config.used_engine().wants_kernels():
        return f"{alone}a setting of [engine] turns them off"
    if facts.system != "Linux":
        return f"{alone}they need Linux"
    if facts.compiler is None:
        return f"{alone}this machine has no C++ compiler"
    has_bf16, measured = report.have_bf16(), report.measured
    if measured is None:
        dtype = "fp32" if has_bf16 is False else "bf16"
    else:
        dtype = measured.dtype(config.precision.dtype)
    (node,) = report.facts.values()
    if dtype == "bf16" and node.architecture not in ("x86_64", "AMD64"):
        return "loss and AdamW run on the project's kernels; the layers run on PyTorch in bf16"
    if dtype == "bf16":
        return "layers, loss and AdamW run on the project's kernels in bf16"
    why = "has no bf16 instructions" if has_bf16 is False else "is no faster in bf16"
    return f"layers, loss and AdamW run on the project's kernels in fp32, as the CPU {why}"


def _memory_row(facts: MachineFacts) -> Row:
    usable = min(facts.total_memory_bytes, facts.limits.memory_bytes or facts.total_memory_bytes)
    free = facts.free_memory_bytes
    row = Row(label="memory", text=f"{_gib(usable)} GiB")
    if free is not None:
        row.text += f", {_gib(free)} free: a run uses at most what is free when it starts"
        if free < _LEAST_FREE_SHARE * usable:
            row.advice.append("Stop other programs for a larger micro-batch (top lists them).")
    return row


def _limits_row(facts: MachineFacts) -> Row:
    """Return a row with the limits that a container or job sets, by a control group or CPU set."""
    limits = facts.limits
    parts = []
    if limits.cpus is not None and limits.cpus < facts.usable_cpus:
        parts.append(f"a quota of {limits.cpus:g} of {counted(facts.usable_cpus, 'CPU')}")
    if facts.usable_cpus < facts.cpus:
        parts.append(f"{facts.usable_cpus} of {counted(facts.cpus, 'CPU')} allowed")
    if limits.memory_bytes is not None and limits.memory_bytes < facts.total_memory_bytes:
        parts.append(
            f"{_gib(limits.memory_bytes)} of {_gib(facts.total_memory_bytes)} GiB of memory"
        )
    if not parts:
        return Row(label="limits", text="none set by a container, job or service")
    advice = "Raise them for a larger run, in the options of the container or job."
    return Row(label="limits", text=", ".join(parts), advice=[advice])


def _compiler_row(facts: MachineFacts) -> Row:
    if facts.compiler is not None:
        return Row(label="compiler", text=f"{facts.compiler}: builds the kernels at first use")
    return Row(label="compiler", text="none", advice=[f"Install one: {INSTALL_COMPILER}"])


def _allocator_row(facts: MachineFacts, *, malloc: str) -> Row:
    name, version = facts.libc
    row = Row(label="allocator", text=f"{name or 'not glibc'} {version}".rstrip())
    row.text += f', launch.malloc = "{malloc}"'
    if facts.huge_pages is not None:
        row.text += f", huge pages: {facts.huge_pages}"
    if malloc in ("default", "tcmalloc"):
        return row
    if not name:
        row.advice.append("Runs cannot tune this allocator; a system with glibc is faster.")
    elif facts.huge_pages == "never":
        row.advice.append(
            "Allow huge pages: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    elif tuple(int(part) for part in version.split(".")[:2]) < _HUGE_PAGES_GLIBC:
        row.advice.append("glibc 2.35 and later also use huge pages.")
    return row


def _numa_row(report: Report, placement: Placement) -> Row:
    (node,) = report.facts.values()
    domains = counted(node.numa_domains or 1, "domain")
    threads = placement.ranks[0].threads
    ranks = counted(placement.ranks_per_node, "rank")
    return Row(
        label="NUMA", text=f"{domains}: a run starts {ranks} of {counted(threads, 'thread')}"
    )


def _launcher_text(report: Report) -> str:
    ((node, made),) = report.checks.items()
    tried = [check for check in made if _ROWS.get(check) == _LAUNCHER and check != "payload"]
    if not tried:
        return "not tried"
    return ", ".join(f"{check} {report.status(node, check)}" for check in tried)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f}"
