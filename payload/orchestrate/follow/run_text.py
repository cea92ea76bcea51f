"""Renders text about plans, runs and results, and estimates disk space and time of a plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from payload.config.run_config import RunConfig, load_run_config
from payload.core.dtype import Dtype
from payload.core.durations import as_clock
from payload.core.errors import ConfigError, DataError
from payload.core.files import free_bytes
from payload.core.one_line import printable_line
from payload.core.regular_files import open_regular
from payload.core.wrapped_lines import wrapped
from payload.estimates.batch_size import USED
from payload.estimates.disk_room import disk_words, most_checkpoints
from payload.estimates.quantized_cost import QuantizedCost, quantized_cost
from payload.estimates.run_estimate import RunEstimate
from payload.estimates.run_time import RunTime, Speed, typical_speed
from payload.formats.data_folder import load_meta
from payload.formats.hf_folder import label_names
from payload.launch.environment import rank_environment
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import Placement, load_ranks
from payload.models.registry import family_name
from payload.orchestrate.hardware.nvidia import gpu_need
from payload.orchestrate.runs.resolved_plan import ResolvedPlan
from payload.orchestrate.runs.run_index import RunView
from payload.orchestrate.terminal.tables import labelled_lines, table_lines
from payload.pricing.cloud_prices import bucket_price
from payload.run_record.metrics_log import describe_missing
from payload.run_record.run_files import RunPaths, Summary, last_record, read_json
from payload.run_record.run_repair import known_dtype
from payload.run_record.stragglers import SlowRank
from payload.run_record.suggested_run_commands import run_command
from payload.run_record.task_metrics import named_metrics

_MAX_EARLIER_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Time, disk space and cost of a run, before it has begun."""

    checkpoints: int
    """Maximum number of checkpoints on disk at the same time."""
    checkpoint_bytes: int
    """Size of one checkpoint."""
    data_bytes: int
    """Size of the existing data folder."""
    free_bytes: int | None
    """Free space for the run's folder; None for nodes that were not queried."""
    disk: str
    """Description of the disk space of the checkpoints."""
    seconds: float
    """Time of the run: the sum of the parts of `time`."""
    time: RunTime
    basis: str
    """Description of the speed on which the time is based."""
    usd: float | None
    """Cost of the nodes during the run; None without prices."""
    store: str | None = None
    """Address of the run's store; None without a store."""
    store_checkpoints: int = 0
    """Number of checkpoints kept in the store."""
    store_usd_per_month: float | None = None
    """Price of the store; None for a folder, or if the region's price is unknown."""
    quantized: QuantizedCost | None = None
    """Savings and cost of 4-bit base weights; None for a run that cannot use them."""

    def lines(self) -> list[str]:
        """Return the lines about disk space, data, duration and store."""
        cost = "" if self.usd is None else f", ${self.usd:,.2f}"
        return [
            f"disk             {self.disk}",
            f"data             {self.data_bytes / 1e9:,.2f} GB, exists already"
            if self.data_bytes
            else "data             does not exist yet",
            f"duration         about {self.time.words()}{cost}, {self.basis}",
            *([f"store            {self._store_line()}"] if self.store else []),
            *([f"base of 4 bits   {self.quantized.sentence()}"] if self.quantized else []),
        ]

    def _store_line(self) -> str:
        kept = self.store_checkpoints * self.checkpoint_bytes
        usd = self.store_usd_per_month
        cost = "" if usd is None else f", ${usd:,.2f} a month"
        return (
            f"about {kept / 1e9:,.2f} GB in {self.store}: {self.store_checkpoints} checkpoints "
            f"kept{cost}"
        )


def estimate(
    planned: ResolvedPlan,
    *,
    data: Path,
    earlier: Sequence[RunPaths],
    is_local: bool,
    samples: bool = False,
    expected_val_tokens: int = 0,
) -> Estimate:
    """Estimate a run. The speed comes from earlier runs, a measurement, or a table.

    `earlier` has the runs on this machine, the newest first. `samples` is True if text is generated
    before and after the run; `expected_val_tokens` is used if the data do not exist yet.
    """
    numbers, train = planned.plan.arithmetic, planned.config.train
    quantized = _quantized(planned, earlier if is_local else ())
    speed, basis = _speed(planned, quantized, earlier if is_local else ())
    sizes = {path.name: path.stat().st_size for path in data.glob("*.bin")}
    time = speed.run_time(
        train,
        val_tokens=_val_tokens(data) or expected_val_tokens,
        checkpoint_bytes=numbers.checkpoint_bytes,
        sampled_params=numbers.params if samples else 0,
    )
    seconds, spec = time.total_s(), planned.predicted.adapted(planned.base)
    hourly_usd = planned.inventory.hourly_usd()
    address = planned.config.storage.address()
    kept = train.keep_checkpoints + 1  # and the best one
    checkpoints = most_checkpoints(keep=train.keep_checkpoints, uploads=address is not None)
    free = free_bytes(planned.paths.root) if is_local else None
    return Estimate(
        checkpoints=checkpoints,
        checkpoint_bytes=numbers.checkpoint_bytes,
        data_bytes=sum(sizes.values()),
        free_bytes=free,
        disk=disk_words(
            checkpoints=checkpoints,
            checkpoint_bytes=numbers.checkpoint_bytes,
            state_bytes=planned.predicted.optimizer_state_bytes(spec),
            free_bytes=free,
        ),
        seconds=seconds,
        time=time,
        basis=basis,
        usd=None if not hourly_usd else hourly_usd * seconds / 3600,
        store=None if address is None else str(address),
        store_checkpoints=kept,
        store_usd_per_month=_store_usd(planned, kept * numbers.checkpoint_bytes),
        quantized=quantized,
    )


def _speed(
    planned: ResolvedPlan, quantized: QuantizedCost | None, earlier: Sequence[RunPaths]
) -> tuple[Speed, str]:
    """Return the speed of a run, and a description of the speed's source.

    The trial does not measure dequantisation, so the time of dequantisation is added.
    """
    numbers = planned.plan.arithmetic
    dequantize_s = _dequantize_s(planned, quantized)
    measured = _measured_tokens_per_s(planned, earlier)
    if measured is not None:
        tokens_per_s, run_id = measured
        speed = Speed.of_tokens(numbers, tokens_per_s=tokens_per_s)
        return speed, f"at the {tokens_per_s:,.0f} tokens/s of run {run_id}"
    if numbers.step_s is not None:
        speed = Speed.of_steps(numbers, step_s=numbers.step_s + dequantize_s)
        return speed, f"at {speed.tokens_per_s():,.0f} tokens/s, {planned.speed_source}"
    return _typical_speed(planned, dequantize_s=dequantize_s)


def has_measured_speed(planned: ResolvedPlan, *, earlier: Sequence[RunPaths]) -> bool:
    """Return True if `estimate` uses a speed that was measured on these nodes."""
    return (
        planned.plan.arithmetic.step_s is not None
        or _measured_tokens_per_s(planned, earlier) is not None
    )


def _typical_speed(planned: ResolvedPlan, *, dequantize_s: float) -> tuple[Speed, str]:
    """Return the speed of typical CPU cores, and the source of the speed.

    Nodes with GPUs count as CPUs here, because the speed of the GPUs is unknown.
    """
    cores = sum(node.physical_cores for node in planned.inventory.nodes)
    device = replace(planned.predicted.device, kind="cpu")
    predicted = replace(planned.predicted, device=device)
    speed = typical_speed(
        predicted,
        predicted.adapted(planned.base),
        planned.plan.arithmetic,
        core_flops_per_s=planned.core_flops_per_s[predicted.dtype()],
        cores=cores,
        network=planned.link.network(planned.plan.world_size),
        dequantize_s=dequantize_s,
    )
    basis = (
        f"at {speed.tokens_per_s():,.0f} tokens/s, {planned.speed_source} "
        f"({cores} core(s) in {predicted.dtype()}), not measured"
    )
    if gpu_need(planned.config, planned.inventory.nodes) is not None:
        basis += "; GPUs are faster: run preflight to measure them"
    return speed, basis


def _dequantize_s(planned: ResolvedPlan, quantized: QuantizedCost | None) -> float:
    """Return how much of a step's time the run needs to dequantise its base weights."""
    if quantized is None or planned.config.model.quantize == "none":
        return 0.0
    return quantized.dequantize_s


def _store_usd(planned: ResolvedPlan, size: int) -> float | None:
    """Return the monthly price of `size` bytes in the cluster's bucket, if it is known.

    For any other bucket, the region is unknown.
    """
    address, head = planned.config.storage.address(), planned.inventory.head
    if address is None or address.bucket is None or address.bucket != planned.inventory.bucket:
        return None
    price = bucket_price(region=(head.zone or "").rpartition("-")[0])
    return None if price is None else price * size / 2**30


def _quantized(planned: ResolvedPlan, earlier: Sequence[RunPaths]) -> QuantizedCost | None:
    """Return savings and cost of 4-bit weights, from dequantisation measured in the newest run.

    Only runs in the same dtype count: fp32 takes longer than bf16.
    """
    free, dtype = planned.free_memory_bytes, planned.auto_dtype
    alike = (each for each in earlier[:_MAX_EARLIER_RUNS] if known_dtype(each) == dtype)
    summaries = (last_record(Summary, paths.summary) for paths in alike)
    rates = (each.dequantized_per_s for each in summaries if each is not None)
    return quantized_cost(
        planned.predicted,
        planned.base,
        world_size=planned.plan.world_size,
        dtype=dtype,
        core_flops_per_s=planned.core_flops_per_s,
        dequantized_per_s=next((rate for rate in rates if rate), None),
        cores=sum(node.physical_cores for node in planned.inventory.nodes),
        room_bytes=None if free is None else USED * free / planned.plan.ranks_per_node,
    )


def _val_tokens(data: Path) -> int:
    """Return the number of tokens in the validation set; 0 without data."""
    try:
        return load_meta(data).val_tokens
    except DataError:
        return 0


def _measured_tokens_per_s(
    planned: ResolvedPlan, earlier: Sequence[RunPaths]
) -> tuple[float, str] | None:
    """Return the speed and id of the newest run with the same cost per step on this machine."""
    for paths in earlier[:_MAX_EARLIER_RUNS]:
        try:
            summary = read_json(Summary, paths.summary)
            if summary is None or not summary.tokens_per_s:
                continue
            plan, config = LaunchPlan.load(paths.plan), load_run_config(paths.config)
        except ConfigError:
            continue
        dtype = planned.predicted.dtype()
        # Without checkpoints the dtype is unknown; with 4 bits it was bf16 in earlier versions.
        unknown = dtype if config.model.quantize == "none" else None
        own_key = _speed_key(planned.plan, planned.config, dtype=dtype)
        if _speed_key(plan, config, dtype=known_dtype(paths) or unknown) == own_key:
            return summary.tokens_per_s, paths.run_id
    return None


def _speed_key(plan: LaunchPlan, config: RunConfig, *, dtype: Dtype | None) -> tuple[object, ...]:
    """Return the settings that determine a run's speed in `dtype` on one machine."""
    return (
        plan.arithmetic.params,
        plan.world_size,
        plan.nodes,
        config.data.sequence_length,
        config.batch,
        config.engine,
        config.precision,
        config.model.quantize,
        config.adapter,
        config.memory,
        dtype,
    )


_MIB, _GIB = 2**20, 2**30
_ESTIMATE_COLUMN = 17
"""Width of an estimate's name."""
_ANY_WIDTH = 1_000_000
_TAIL_LINES = 12
_TAIL_BYTES = 2**16


def print_plan(
    planned: ResolvedPlan, estimated: Estimate, console: Console, *, job: str | None = None
) -> None:
    """Print estimates, hosts, ranks, environment, command line and Accelerate config.

    The nodes of a Slurm job are not known yet. For a job, print only estimates, ranks and the text
    `job`.
    """
    plan = planned.plan
    console.print("estimates")
    family = f"model family     {family_name(planned.base)}"
    whole = planned.base.whole
    kept = whole.note() if whole is not None else None
    others = [f"other parts      {kept}"] if kept else []
    lines = [family, *others, *arithmetic_lines(planned.plan), *estimated.lines()]
    # A pipe has no width: a program reads one line per estimate.
    width = console.width - 2 if console.is_terminal else _ANY_WIDTH
    fitted = chain(*(wrapped(line, width=width, indent=_ESTIMATE_COLUMN) for line in lines))
    console.print(_indent("\n".join(fitted)))
    rank_lines = _rank_lines(planned.placement, width=console.width - 2)
    ranks = "ranks\n" + _indent("\n".join(rank_lines))
    if job is not None:
        console.print(f"{ranks}\n{job}", end="")
        return
    console.print(f"run folder\n  {planned.paths.root}\n")
    console.print(f"hosts\n{_indent(planned.hosts())}")
    console.print(ranks)
    console.print("environment of every rank")
    console.print(_indent("\n".join(f"{k}={v}" for k, v in sorted(plan.environment.items()))))
    first = rank_environment(
        planned.placement.ranks[0],
        world_size=plan.world_size,
        ranks_per_node=plan.ranks_per_node,
        interfaces=plan.interfaces,
    )
    console.print("additional environment of rank 0")
    console.print(_indent("\n".join(f"{k}={v}" for k, v in sorted(first.items()))))
    console.print(f"{plan.launcher} and its environment")
    settings = [f"{k}={v}" for k, v in sorted(plan.launcher_environment.items())]
    console.print(_indent("\n".join([*settings, shlex.join(plan.argv)])))
    console.print("each rank runs")
    console.print(_indent(shlex.join(plan.program)))
    for node_rank, node in enumerate(planned.inventory.nodes):
        console.print(f"accelerate config of {node.name}")
        console.print(_indent(planned.accelerate(node_rank)))


def arithmetic_lines(plan: LaunchPlan) -> list[str]:
    """Return the lines with the estimates in the plan."""
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
        hidden = ", with the exchange after the backward pass" if plan.world_size > 1 else ""
        whole.append(f"step             about {numbers.step_s:.3g} s{hidden}")
    return [
        f"parameters       {numbers.params:,}",
        f"tokens per step  {numbers.tokens_per_step:,} ({numbers.tokens_total:,} in the run)",
        f"accumulation     {numbers.grad_accum_steps} micro-batch(es) of "
        f"{numbers.micro_batch_size} sequence(s) per step on each of {plan.world_size} rank(s)",
        f"arithmetic       {numbers.flops_per_step / 1e12:,.3f} TFLOP per step",
        f"memory           about {numbers.memory_bytes_per_rank / _GIB:.1f} GiB a rank",
        *computing,
        f"synchronisation  {sync}",
        *whole,
    ]


def strategy_table(planned: ResolvedPlan, *, width: int) -> str:
    """Return the possible strategies for the run's ranks as a table, the best first."""
    names = ("strategy", "GiB a rank", "MiB sent a step", "exchange s", "step s", "fits")
    rows = []
    for each in planned.strategies:
        step = "not measured" if each.step_s is None else f"{each.step_s:.3g}"
        fits = {True: "yes", False: "no", None: "not known"}[each.fits]
        memory, sent = each.memory_bytes / _GIB, each.sent_bytes / _MIB
        rows.append(
            (each.name(), f"{memory:.1f}", f"{sent:,.0f}", f"{each.sync_s:.3g}", step, fits)
        )
    return "\n".join(table_lines(names, rows, width=width, optional=("exchange s",)))


def _exchanged(numbers: RunEstimate) -> str:
    """Return the amount exchanged per step, and the mesh if it has several dimensions."""
    dimensions = [
        ("tensor", numbers.tensor, numbers.tensor_bytes),
        ("shard", numbers.shards, numbers.shard_bytes),
        ("replicate", numbers.replicas, numbers.replicate_bytes),
        ("pipeline", numbers.pipeline, numbers.pipeline_bytes),
    ]
    if all(size == 1 for name, size, _ in dimensions if name != "replicate"):
        return f"{numbers.grad_bytes / _MIB:,.1f} MiB of gradients"
    shown = [each for each in dimensions if each[1] > 1 or each[0] == "replicate"]
    mesh = " x ".join(f"{name} {size}" for name, size, _ in reversed(shown))
    (first, _, first_bytes), *others = (each for each in shown if each[1] > 1)
    sent = f"{first_bytes / _MIB:,.1f} MiB sent over {first}"
    for name, _, num_bytes in others:
        sent += f" and {num_bytes / _MIB:,.1f} over {name}"
    return f"mesh {mesh}: {sent} by each rank"


def result_lines(summary: Summary, *, checkpoint: Path | None, width: int) -> list[str]:
    """Return the result table of a run; for a classifier, the confusion matrix follows."""
    rows = [
        ("run", summary.run_id),
        ("status", summary.status),
        ("nodes", f"{summary.nodes} ({summary.world_size} rank(s))"),
        ("steps", f"{summary.steps:,}"),
        ("tokens", f"{summary.tokens:,}"),
        *named_metrics(summary.val_metrics),
        (
            "validation loss",
            f"{_evaluated(summary.final_val_loss, step=summary.final_val_step)} "
            f"(best {_number(summary.best_val_loss)})",
        ),
        ("loss", f"{_number(summary.first_loss)} -> {_number(summary.final_loss)}"),
        ("tokens/s", _number(summary.tokens_per_s, ",.0f")),
        ("MFU", _number(summary.mfu, ".1%")),
        ("ranks identical", "yes" if summary.ranks_identical else "not shown"),
        ("wall time", as_clock(summary.wall_s)),
    ]
    if summary.cost_usd is not None:
        per_million = _number(summary.usd_per_million_tokens, ".2f")
        rows.append(("cost", f"${summary.cost_usd:.2f} (${per_million} per million tokens)"))
    rows.append(("checkpoint", str(checkpoint) if checkpoint else "none"))
    if summary.best_checkpoint:
        rows.append(("best checkpoint", f"{summary.best_checkpoint}, by validation loss"))
    if summary.store:
        drained = "" if summary.store.is_drained else "; incomplete"
        rows.append(("store", f"{summary.store.words()}{drained}"))
    if summary.missing_metrics:
        rows.insert(4, ("metrics lost", f"steps {describe_missing(summary.missing_metrics)}"))
    if summary.resumes:
        rows.insert(2, ("resumes", str(summary.resumes)))
    if summary.restarts:
        rows.insert(2, ("restarts", str(summary.restarts)))
    lines = labelled_lines(rows, width=width)
    if summary.val_confusion:
        labels = label_names(checkpoint, num_labels=len(summary.val_confusion))
        lines += ["", *_confusion_lines(summary.val_confusion, labels, width=width)]
    return lines


def _confusion_lines(
    confusion: Sequence[Sequence[int]], labels: Sequence[str], *, width: int
) -> list[str]:
    """Return the lines of the confusion matrix.

    If the matrix is wider than `width` characters, return a line that names the file with the
    matrix.
    """
    names = [printable_line(label) for label in labels]
    rows = [(name, *map(str, row)) for name, row in zip(names, confusion, strict=True)]
    table = table_lines(("true label", *names), rows)
    if max(map(len, table)) > width:
        return [f"The confusion matrix of {len(labels)} labels is in summary.json and the report."]
    return ["confusion matrix (a column per predicted label)", *table]


def failure_lines(error: str, *, log: Path) -> list[str]:
    """Return the error, the path of the log, and its last lines."""
    lines = [f"error: {printable_line(error)}", f"log: {log}"]
    tail = log_tail(log)
    repeated = [line for line in tail if line.startswith("error: ") and line[7:] in error]
    return [*lines, *(f"  | {line}" for line in tail if line not in repeated)]


def straggler_line(slow: SlowRank, paths: RunPaths) -> str:
    """Return a message about a slow rank, with the command that shows its log."""
    node = None
    with suppress(ConfigError):
        node = next((r.node for r in load_ranks(paths.ranks) if r.rank == slow.rank), None)
    if not slow.is_slow:
        return f"note: {slow.words(node=node)}"
    command = run_command("logs", paths, "--rank", str(slow.rank))
    return f"warning: {slow.words(node=node)}. See the rank's log: {command}"


def log_tail(log: Path) -> list[str]:
    """Return the last lines of a log; empty if the log cannot be read."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []


def status_lines(view: RunView, *, width: int) -> list[str]:
    """Return the lines about one run."""
    rows = [
        ("run", view.run_id),
        ("status", view.status if not view.exit_class else f"{view.status} ({view.exit_class})"),
        ("step", f"{view.step:,} of {view.steps:,}"),
        *named_metrics(view.val_metrics),
        ("validation loss", _evaluated(view.val_loss, step=view.val_step)),
        ("loss", _number(view.loss)),
        ("tokens/s", _number(view.tokens_per_s, ",.0f")),
        ("last heartbeat", _age(view.age_s)),
    ]
    if view.store:
        rows.append(("store", view.store.words()))
        if view.store.problem:
            rows.append(("store fails", view.store.problem))
    rows += [("damaged", problem) for problem in view.damaged]
    if view.error:
        rows.append(("error", view.error))
    elif view.note:
        rows.append(("note", view.note))
    return labelled_lines(rows, width=width)


def ranks_lines(view: RunView, *, width: int) -> list[str]:
    """Return a table of the run's ranks, as lines of at most `width` characters."""
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
    return table_lines(
        ("rank", "node", "step", "phase", "last heartbeat", "ended"), rows, width=width
    )


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
    """Return `0-3,8` for 0, 1, 2, 3, 8."""
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


def _evaluated(loss: float | None, *, step: int | None) -> str:
    """Return a validation loss and its step, such as `2.3100 at step 120`."""
    return _number(loss) + ("" if step is None else f" at step {step:,}")


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{as_clock(seconds)} ago"
