"""What commands print about plans, runs and results."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from payload.launch.arithmetic import Arithmetic
from payload.launch.environment import rank_environment
from payload.launch.plan import LaunchPlan
from payload.launch.ranks import Placement
from payload.metrics_log import describe_missing
from payload.orchestrate.estimate import Estimate
from payload.orchestrate.live import duration
from payload.orchestrate.planning import PlannedRun
from payload.orchestrate.runs import RunView
from payload.results import Summary
from payload.untrusted import open_regular

_MIB, _GIB = 2**20, 2**30
_TAIL_LINES = 12
_TAIL_BYTES = 2**16


def print_plan(planned: PlannedRun, estimated: Estimate, console: Console) -> None:
    """Hosts, ranks, environment, command line, Accelerate config and arithmetic."""
    plan = planned.plan
    console.print(f"run folder\n  {planned.paths.root}\n")
    console.print(f"hosts\n{_indent(planned.hosts())}")
    console.print("ranks")
    rank_lines = _rank_lines(planned.placement, width=console.width - 2)
    console.print(_indent("\n".join(rank_lines)))
    console.print("environment of every rank")
    console.print(_indent("\n".join(f"{k}={v}" for k, v in sorted(plan.environment.items()))))
    first = rank_environment(
        planned.placement.ranks[0],
        world_size=plan.world_size,
        ranks_per_node=plan.ranks_per_node,
        interfaces=plan.interfaces,
    )
    console.print("environment of rank 0 besides")
    console.print(_indent("\n".join(f"{k}={v}" for k, v in sorted(first.items()))))
    console.print(f"{plan.launcher} and its environment")
    settings = [f"{k}={v}" for k, v in sorted(plan.launcher_environment.items())]
    console.print(_indent("\n".join([*settings, shlex.join(plan.argv)])))
    console.print("each rank runs")
    console.print(_indent(shlex.join(plan.program)))
    for node_rank, node in enumerate(planned.inventory.nodes):
        console.print(f"accelerate config of {node.name}")
        console.print(_indent(planned.accelerate(node_rank)))
    console.print("arithmetic")
    lines = [*arithmetic_lines(planned.plan), *estimated.lines()]
    console.print(_indent("\n".join(lines)))


def arithmetic_lines(plan: LaunchPlan) -> list[str]:
    """The plan's numbers in words."""
    numbers = plan.arithmetic
    sync = (
        f"{_exchanged(numbers)} a step, about {numbers.sync_s:.3f} s to exchange"
        if plan.world_size > 1
        else "none with one rank"
    )
    computing = []
    if numbers.compute_s is not None and numbers.mfu is not None:
        share = f"{numbers.mfu:.0%} of the measured peak"
        computing.append(f"computing        about {numbers.compute_s:.3g} s a step, at {share}")
    whole = []
    if numbers.step_s is not None:
        hidden = ", with what the backward pass does not hide" if plan.world_size > 1 else ""
        whole.append(f"step             about {numbers.step_s:.3g} s{hidden}")
    return [
        f"parameters       {numbers.params:,}",
        f"tokens per step  {numbers.tokens_per_step:,} ({numbers.tokens_total:,} in the run)",
        f"accumulation     {numbers.grad_accum_steps} pass(es) per step on each of "
        f"{plan.world_size} rank(s)",
        f"arithmetic       {numbers.flops_per_step / 1e12:,.3f} TFLOP per step",
        f"memory           about {numbers.memory_bytes_per_rank / _GIB:.1f} GiB a rank",
        *computing,
        f"synchronisation  {sync}",
        *whole,
    ]


def _exchanged(numbers: Arithmetic) -> str:
    """Return what is exchanged in a step, and for shards the mesh of ranks that it goes over."""
    if numbers.shards == 1:
        return f"{numbers.grad_bytes / _MIB:,.1f} MiB of gradients"
    sent = f"{numbers.shard_bytes / _MIB:,.1f} MiB sent over shard"
    if numbers.replicas > 1:
        sent += f" and {numbers.replicate_bytes / _MIB:,.1f} over replicate"
    return f"mesh replicate {numbers.replicas} x shard {numbers.shards}: {sent} by each rank"


def result_lines(summary: Summary, *, checkpoint: Path | None, width: int) -> list[str]:
    """The short table at the end of a run."""
    rows = [
        ("run", summary.run_id),
        ("status", summary.status),
        ("nodes", f"{summary.nodes} ({summary.world_size} rank(s))"),
        ("steps", f"{summary.steps:,}"),
        ("tokens", f"{summary.tokens:,}"),
        ("loss", f"{_number(summary.first_loss)} -> {_number(summary.final_loss)}"),
        (
            "validation loss",
            f"{_number(summary.final_val_loss)} (best {_number(summary.best_val_loss)})",
        ),
        ("tokens/s", _number(summary.tokens_per_s, ",.0f")),
        ("MFU", _number(summary.mfu, ".1%")),
        ("ranks identical", "yes" if summary.ranks_identical else "not shown"),
        ("wall time", duration(summary.wall_s)),
        ("checkpoint", str(checkpoint) if checkpoint else "none"),
    ]
    if summary.missing_metrics:
        rows.insert(4, ("metrics lost", f"steps {describe_missing(summary.missing_metrics)}"))
    if summary.restarts:
        rows.insert(2, ("restarts", str(summary.restarts)))
    if summary.cost_usd is not None:
        per_million = _number(summary.usd_per_million_tokens, ".2f")
        rows.insert(-1, ("cost", f"${summary.cost_usd:.2f} (${per_million} per million tokens)"))
    return _aligned(rows, width=width)


def failure_lines(error: str, *, log: Path) -> list[str]:
    """The error itself, where to read on, and the log's end."""
    lines = [f"error: {error}", f"log: {log}"]
    tail = log_tail(log)
    repeated = [line for line in tail if line.startswith("error: ") and line[7:] in error]
    return [*lines, *(f"  | {line}" for line in tail if line not in repeated)]


def log_tail(log: Path) -> list[str]:
    """Return a log's last lines; none where it cannot be read."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []


def status_lines(view: RunView, *, width: int) -> list[str]:
    """One run as a whole."""
    rows = [
        ("run", view.run_id),
        ("status", view.status if not view.exit_class else f"{view.status} ({view.exit_class})"),
        ("step", f"{view.step:,} of {view.steps:,}"),
        ("loss", _number(view.loss)),
        ("validation loss", _number(view.val_loss)),
        ("tokens/s", _number(view.tokens_per_s, ",.0f")),
        ("last sign of life", _age(view.age_s)),
    ]
    rows += [("damaged", problem) for problem in view.damaged]
    if view.error:
        rows.append(("error", view.error))
    elif view.note:
        rows.append(("note", view.note))
    return _aligned(rows, width=width)


def ranks_lines(view: RunView, *, width: int) -> list[str]:
    """Return one run's ranks as lines of at most `width`."""
    rows = [
        (
            str(rank.rank),
            rank.node,
            "-" if rank.step is None else str(rank.step),
            rank.phase or "-",
            _age(rank.age_s),
            "-" if rank.exit_code is None else f"status {rank.exit_code}",
        )
        for rank in view.ranks
    ]
    return table_lines(("rank", "node", "step", "phase", "last sign", "ended"), rows, width=width)


def list_lines(views: Sequence[RunView], *, width: int) -> list[str]:
    """Return all runs as lines of at most `width`."""
    rows = [
        (
            view.run_id,
            view.status,
            f"{view.step}/{view.steps}",
            _number(view.loss),
            _number(view.val_loss),
        )
        for view in views
    ]
    return table_lines(("run", "status", "step", "loss", "validation"), rows, width=width)


def table_lines(names: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Return a table; where it is wider than `width`, each row under its first cell instead."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        padded = (
            [f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)]
            for row in (names, *rows)
        )
        return ["  ".join(row).rstrip() for row in padded]
    lines = []
    for first, *rest in rows:
        lines.append(f"{names[0]} {first}")
        cells = [f"{name} {cell}" for name, cell in zip(names[1:], rest, strict=True)]
        lines += _filled(cells, width=width)
    return lines


def _filled(cells: Sequence[str], *, width: int) -> list[str]:
    """Return cells in as few indented lines as fit."""
    lines = ["  " + cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 2 + len(cell) <= width:
            lines[-1] += "  " + cell
        else:
            lines.append("  " + cell)
    return lines


def _aligned(rows: Sequence[tuple[str, str]], *, width: int) -> list[str]:
    """Return names and values; a value that does not fit beside its name goes below it."""
    column = max(len(name) for name, _ in rows)
    lines: list[str] = []
    for name, value in rows:
        beside = f"{name:<{column}}  {value}"
        lines += [beside] if len(beside) <= width else [name, f"  {value}"]
    return lines


def _rank_lines(placement: Placement, *, width: int) -> list[str]:
    rows = [
        (
            str(rank.rank),
            rank.node,
            str(rank.local_rank),
            "several" if rank.numa_domain is None else str(rank.numa_domain),
            _ranges(rank.cores),
            str(rank.threads),
        )
        for rank in placement.ranks
    ]
    names = ("rank", "node", "local rank", "NUMA domain", "cores", "threads")
    return table_lines(names, rows, width=width)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.rstrip("\n").split("\n")) + "\n"


def _number(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{duration(seconds)} ago"
