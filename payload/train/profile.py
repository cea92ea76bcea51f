"""Profiles one step on one rank with torch: a trace, and a table of operators by time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

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
def profiled(folder: Path, *, step: int, rank: int) -> Iterator[None]:
    """Profile the block; write the trace and the table into `folder`, and log the table.

    If the profile cannot be written, only log a warning: the step itself succeeded.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        yield
    found = sorted(recorded.key_averages(), key=lambda each: -each.self_cpu_time_total)
    whole_s = sum(each.self_cpu_time_total for each in found) / 1e6
    operators = tuple(
        Operator(
            name=str(each.key)[:200],
            calls=each.count,
            self_s=max(0.0, each.self_cpu_time_total / 1e6),
            total_s=max(0.0, each.cpu_time_total / 1e6),
        )
        for each in found[:_MOST]
    )
    trace = folder / f"step_{step:08d}_rank_{rank:04d}.json.gz"
    table = ProfileTable(
        step=step, rank=rank, whole_s=whole_s, trace=trace.name, operators=operators
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
