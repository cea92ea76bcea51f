"""Records with all optional values, as written by the code.

In a short run without failures these are null or empty: an error, a cost, a slow rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from payload.run_record.run_files import (
    RankExit,
    RankProgress,
    Record,
    RunEvent,
    RunJob,
    RunState,
    StopRequest,
    Summary,
    to_json,
)
from payload.run_record.run_samples import Sample, write_samples
from payload.run_record.store_state import StoreState
from payload.run_record.stragglers import Straggler
from tests.formats.recorded import read_json

_STORE = StoreState(
    address="/results/run",
    checkpoint="step_00000004",
    sent_bytes=1,
    sent_unix=1.0,
    problem="no answer",
    failing_since_unix=1.0,
    token="0" * 32,
    updated_unix=1.0,
)
_STATE = RunState(
    run_id="run",
    status="failed",
    exit_class="lost",
    error="rank 1 was killed",
    failed_rank=1,
    supervisor_pid=1,
    node="node-0",
    started_unix=1.0,
    updated_unix=2.0,
    note="restarted from step 4",
    cost_usd=0.5,
    events=(RunEvent(kind="failure", time_unix=1.0, text="rank 1 was killed"),),
    store=_STORE,
)
_SUMMARY = Summary(
    run_id="run",
    status="failed",
    exit_class="lost",
    world_size=2,
    nodes=1,
    missing_metrics=((3, 4),),
    first_loss=2.0,
    final_loss=1.5,
    best_val_loss=1.5,
    final_val_loss=1.5,
    final_val_step=4,
    best_checkpoint="step_00000004",
    is_better_than_untrained=True,
    val_metrics={"accuracy": 0.5, "macro_f1": 0.5},
    val_confusion=((1, 1), (1, 1)),
    tokens_per_s=1.0,
    mfu=0.5,
    peak_flops_per_s=1.0,
    dequantized_per_s=1.0,
    predicted_step_s=1.0,
    ready_unix=1.0,
    start_s={"imports": 1.0},
    stragglers=(Straggler(rank=1, first_step=3, last_step=9, work_s=1.0, others_s=0.5),),
    cost_usd=0.5,
    usd_per_million_tokens=0.5,
    store=_STORE,
    error="rank 1 was killed",
    versions={"torch": "2.13.0"},
)
_HEARTBEAT = RankProgress(
    rank=0,
    node="node-0",
    pid=1,
    step=3,
    phase="step",
    time_unix=1.0,
    micro_step=1,
    micro_steps=2,
    rss_bytes=1,
)
_EXIT = RankExit(rank=0, node="node-0", exit_code=137, signal=9, error="was killed", time_unix=1.0)
_RECORDS: dict[str, Record] = {
    "state": _STATE,
    "summary": _SUMMARY,
    "storage": _STORE,
    "heartbeat": _HEARTBEAT,
    "exit": _EXIT,
    "stop": StopRequest(pids=(1,), grace_s=60.0),
    "job": RunJob(site="slurm", job_id="7", pid=1),
}


def filled(name: str) -> Any:
    """Return the document of the record `name` with every value."""
    return json.loads(to_json(_RECORDS[name]))


def filled_samples(folder: Path) -> Any:
    """Return the document of samples that a script has written."""
    path = folder / "samples.json"
    write_samples(path, [Sample(prompt="a", before="b", after="c")])
    return read_json(path)
