"""Run folders as they are on an operator's machine and on nodes, for tests without training."""

from __future__ import annotations

from payload.launch.ranks import Rank, render_ranks
from payload.run_record.run_files import (
    RankExit,
    RankProgress,
    RunPaths,
    RunState,
    Summary,
    to_json,
)


def write_ranks(paths: RunPaths, *nodes: str) -> None:
    """Write ranks.json with one rank on each of `nodes`."""
    paths.root.mkdir(parents=True, exist_ok=True)
    ranks = [
        Rank(
            rank=i,
            node=node,
            node_rank=i,
            local_rank=0,
            numa_domain=None,
            cores=(0,),
            threads=1,
        )
        for i, node in enumerate(nodes)
    ]
    paths.ranks.write_text(render_ranks(ranks), encoding="utf-8")


def state_text(run_id: str, *, error: str | None = None) -> str:
    """Return a state.json."""
    return to_json(
        RunState(
            run_id=run_id,
            status="running",
            error=error,
            supervisor_pid=1,
            node="node-0",
            started_unix=1.0,
            updated_unix=1.0,
        )
    )


def summary_text(run_id: str) -> str:
    """Return a summary.json."""
    return to_json(
        Summary(run_id=run_id, status="finished", exit_class="ok", world_size=2, nodes=2)
    )


def progress_text(rank: int, *, node: str) -> str:
    """Return a rank's heartbeat."""
    return to_json(RankProgress(rank=rank, node=node, pid=1, step=3, phase="step", time_unix=1.0))


def exit_text(rank: int, *, node: str) -> str:
    """Return how a rank ended."""
    return to_json(end_of(rank, node=node))


def end_of(rank: int, *, node: str) -> RankExit:
    """Return the end of a rank that was killed."""
    return RankExit(rank=rank, node=node, exit_code=137, signal=9, time_unix=1.0)
