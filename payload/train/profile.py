"""Profiles one step on one rank with torch: a trace, and a table of operators by time.

On a GPU, the table has the GPU's kernels instead of the operators that launch them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from payload.run_record.profile_table import (
    PROFILE_TABLE,
    Operator,
    ProfileTable,
    table_lines,
    write_table,
)

_MOST = 60

log = logging.getLogger(__name__)


@contextmanager
def profiled(folder: Path, *, step: int, rank: int, is_cpu: bool = True) -> Iterator[None]:
    """Profile the block; write the trace and the table into `folder`, and log the table.

    `is_cpu` is false if the rank computes on a GPU. If the profile cannot be written, only log a
    warning: the step itself succeeded.
    """
    activities = [ProfilerActivity.CPU] if is_cpu else supported_activities()  # type: ignore[no-untyped-call]
    with profile(activities=activities, acc_events=True) as recorded:
        yield
    averages = recorded.key_averages()
    found = operators(averages) if is_cpu else kernels(averages)
    whole_s = sum(each.self_s for each in found)
    trace = folder / f"step_{step:08d}_rank_{rank:04d}.json.gz"
    table = ProfileTable(
        step=step, rank=rank, whole_s=whole_s, trace=trace.name, operators=found[:_MOST]
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(trace))
        write_table(folder / PROFILE_TABLE, table)
    except (OSError, RuntimeError) as error:
        log.warning(f"the profile of step {step} cannot be written: {error}")
        return
    for line in table_lines(table):
        log.info(line)
    log.info(f"trace     {trace} (open it at https://ui.perfetto.dev)")


def operators(averages: Iterable[Any]) -> tuple[Operator, ...]:
    """Return the CPU's operators of torch's `key_averages`, the slowest first."""
    found = (
        Operator(
            name=_name(each),
            calls=each.count,
            self_s=max(0.0, each.self_cpu_time_total / 1e6),
            total_s=max(0.0, each.cpu_time_total / 1e6),
        )
        for each in averages
    )
    return tuple(sorted(found, key=lambda each: -each.self_s))


def kernels(averages: Iterable[Any]) -> tuple[Operator, ...]:
    """Return the GPU's kernels and copies of torch's `key_averages`, the slowest first."""
    found = (
        Operator(name=_name(each), calls=each.count, self_s=seconds, total_s=seconds)
        for each in averages
        # An annotation covers the kernels that it names.
        if each.device_type != DeviceType.CPU and not each.is_user_annotation
        for seconds in (max(0.0, each.self_device_time_total / 1e6),)
    )
    return tuple(sorted(found, key=lambda each: -each.self_s))


def _name(average: Any) -> str:
    return str(average.key)[:200]
