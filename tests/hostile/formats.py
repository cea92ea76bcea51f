"""Every format that Tileforge reads from a node, a run folder, an inventory, data or the cloud.

The samples are written by the program itself, so they include new fields.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from payload.config.run_config import load_run_config
from payload.data.sources.source_flags import SourceKind, SourceRequest
from payload.data.tasks.text_source import build_source
from payload.formats.checkpoint_listing import manifest_problems
from payload.formats.data_folder import load_meta
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import load_ranks
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.machines.speed_cache import read_speed, speed_path, write_speed
from payload.orchestrate.findings.trial import Measured, NodeSpeed, Record, read_record
from payload.orchestrate.runs.mirror import Mirrored, read_mirrored, write_mirrored
from payload.orchestrate.runs.run_input_checks import check_data
from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import (
    RankExit,
    RankProgress,
    RunPaths,
    RunState,
    StopRequest,
    Summary,
    read_json,
    write_json,
)
from payload.supervise.heartbeat import heartbeat
from payload.supervise.heartbeat_receiver import parse_message
from payload.train.checkpoints.checkpoint import (
    load_trainer_state,
    optimizer_tensors,
)
from payload.train.models.loading import load
from tests.supervise.planned import plan_stand_in
from tests.support.machine_speed import SPEED_KEY, make_speed
from tests.train.alone import train_alone

ALL_READS = 24_000
"""Number of damaged samples of all formats in the complete test."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format: a valid sample and its reader."""

    name: str
    sample: bytes
    read: Callable[[bytes], object]
    """The reader: returns the parsed value, or raises TileforgeError."""
    damages: int | None = None
    """Number of its samples in `ALL_READS`; None = the same as for the other formats."""

    def __str__(self) -> str:
        return self.name


INVENTORY = ClusterInventory(
    cluster="dev",
    source="file",
    ssh_user="trainer",
    access=Access(kind="iap", project="my-project"),
    bucket="my-bucket",
    project="my-project",
    nodes=(
        Node(
            name="node-0",
            address="10.0.0.2",
            external_address="192.0.2.7",
            host_keys=("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAA",),
            zone="us-central1-a",
            machine_type="c3-standard-8",
            physical_cores=4,
            numa_domains=1,
            memory_gib=32.0,
            hourly_usd=0.4,
            instance_id="1234567890",
        ),
    ),
)


def run_formats(folder: Path, config: Path) -> Iterator[Format]:
    """The files of a run and its checkpoint, written by real ranks and commands."""
    paths = plan_stand_in(folder / "run")
    trained = RunPaths(folder / "trained")
    train_alone(trained.root, config, "train.steps=4")
    shutil.copy(trained.metrics, paths.metrics)
    shutil.copytree(trained.checkpoints, paths.checkpoints)
    write_json(paths.summary, _SUMMARY)
    write_json(paths.state, _STATE)
    write_json(paths.stop_request, StopRequest(grace_s=60.0))
    write_json(paths.rank_progress(0), _PROGRESS)
    write_json(paths.rank_exit(0), _EXIT)
    write_mirrored(paths, Mirrored(alive=True, seen_unix=1.0, ssh_key="/home/trainer/.ssh/id"))
    record_classes: dict[Path, type[Any]] = {
        paths.summary: Summary,
        paths.state: RunState,
        paths.stop_request: StopRequest,
        paths.rank_progress(0): RankProgress,
        paths.rank_exit(0): RankExit,
    }
    for path, cls in record_classes.items():
        yield in_file(path, partial(read_json, cls, path))
    yield in_file(paths.metrics, lambda: read_metrics(paths.metrics))
    yield in_file(paths.plan, lambda: LaunchPlan.load(paths.plan))
    yield in_file(paths.ranks, lambda: load_ranks(paths.ranks))
    yield in_file(paths.config, lambda: load_run_config(paths.config))
    yield in_file(paths.root / "mirror.json", lambda: read_mirrored(paths))
    checkpoint = paths.checkpoint(4)
    yield in_file(checkpoint / "manifest.json", lambda: manifest_problems(checkpoint))
    yield in_file(checkpoint / "trainer.json", lambda: load_trainer_state(checkpoint))
    yield in_file(checkpoint / "config.json", lambda: load(checkpoint))
    yield in_file(checkpoint / "model.safetensors", lambda: load(checkpoint))
    yield in_file(checkpoint / "optimizer.safetensors", lambda: optimizer_tensors(checkpoint))


def input_formats(folder: Path, data: Path) -> Iterator[Format]:
    """Yield the formats from users and other machines: inventories, data folders, measurements."""
    folder.mkdir()
    inventory = folder / "inventory.json"
    inventory.write_text(INVENTORY.to_json(), encoding="utf-8")
    yield in_file(inventory, lambda: ClusterInventory.load(inventory))
    copy = shutil.copytree(data, folder / "data")
    yield in_file(copy / "meta.json", lambda: load_meta(copy))
    yield in_file(
        copy / "meta.json", lambda: check_data(copy, sequence_length=32), name="meta.json, in plan"
    )
    trial = folder / "trial.json"
    _RECORD.write(trial)
    yield in_file(trial, lambda: read_record(trial))
    write_speed(folder, SPEED_KEY, make_speed())
    speed = speed_path(folder, SPEED_KEY)
    yield in_file(speed, lambda: read_speed(folder, SPEED_KEY))
    yield Format(
        "a line of a worker's heartbeat",
        json.dumps({**heartbeat(RunPaths(folder)), "asked": 1, "ended": [2]}).encode(),
        lambda line: parse_message(line, now_unix=1.0, now_s=1.0),
    )


def text_formats(folder: Path) -> Iterator[Format]:
    """The kinds of files from which text is prepared."""
    folder.mkdir()
    lines = b"".join(b'{"text": "document %d", "n": 1}\n' % i for i in range(4))
    table = pa.table({"text": [f"document {i}" for i in range(4)]})
    (folder / "in.jsonl").write_bytes(lines)
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "in.txt").write_bytes("one\n\ntwo\x0cthree \u00e9\n".encode())
    pq.write_table(table, folder / "in.parquet")
    for name, kind in _TEXT_FILES.items():
        path = folder / name
        each = in_file(path, partial(documents, kind, path))
        # A process reads each parquet file; tests/data/test_parquet.py damages hundreds.
        yield replace(each, damages=40) if kind == "parquet" else each


_TEXT_FILES: dict[str, SourceKind] = {
    "in.jsonl": "jsonl",
    "in.jsonl.gz": "jsonl",
    "in.txt": "text",
    "in.parquet": "parquet",
}


def documents(kind: SourceKind, path: Path) -> int:
    """Read a complete source, as `prepare` does, and count its pieces."""
    source = build_source(SourceRequest(kind=kind, inputs=(str(path),)))
    source.identity()
    source.survey()
    return sum(len(batch.pieces) for batch in source.batches({}))


def in_file(path: Path, read: Callable[[], object], *, name: str | None = None) -> Format:
    """Return the format of the valid file at `path`."""
    sample = path.read_bytes()

    def read_instead(content: bytes) -> object:
        path.write_bytes(content)
        try:
            return read()
        finally:
            path.write_bytes(sample)

    folder = "" if path.parent.name in ("run", "input") else f"{path.parent.name}/"
    return Format(name or f"{folder}{path.name}", sample, read_instead)


_SUMMARY = Summary(
    run_id="run",
    status="finished",
    exit_class="ok",
    world_size=2,
    nodes=1,
    first_loss=2.0,
    tokens_per_s=3.0,
    start_s={"load": 0.5},
    error="zero",
    versions={"torch": "2.13.0"},
)
_STATE = RunState(
    run_id="run",
    status="running",
    error="one",
    failed_rank=0,
    supervisor_pid=4_194_000,
    node="node-0",
    started_unix=1.0,
    updated_unix=2.0,
    note="two",
    cost_usd=0.5,
)
_PROGRESS = RankProgress(rank=0, node="node-0", pid=4_194_001, step=3, phase="step", time_unix=2.0)
_EXIT = RankExit(rank=0, node="node-0", exit_code=137, signal=9, error="three", time_unix=2.0)
_SPEED = NodeSpeed(bf16_flops_per_s=1e12, fp32_flops_per_s=5e11, received_bytes_per_s=1e9)
_RECORD = Record(
    nodes_sha="0" * 64,
    code="1" * 64,
    time_unix=1.0,
    interfaces={"node-0": "eth0"},
    measured=Measured(
        world_size=1, nodes={"node-0": _SPEED}, all_reduce_bytes_per_s=1e9, latency_s=1e-4
    ),
)
