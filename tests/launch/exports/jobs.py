"""Jobs for exported files: the tiny run on two nodes."""

from __future__ import annotations

from dataclasses import replace

from payload.config.run_config import parse_run_config
from payload.launch.exports.base import Engine, ExportJob
from payload.launch.exports.registry import export_job
from tests.launch.inventories import make_inventory
from tests.support.launching import TINY_RUN

DATA = "data/tiny"
"""The data folder, relative to the storage."""
_IMAGE = "registry.example/tileforge:1"
_STORAGE = {"skypilot": "gs://acme-runs", "dstack": "/mnt/nfs"}


def job_for(
    engine: Engine,
    *overrides: str,
    run_id: str = "tiny-1",
    name: str = "run",
    nodes: int = 2,
    ranks_per_node: int = 2,
    storage: str | None = None,
) -> ExportJob:
    """Return the run on `nodes` nodes, with a thread for each rank."""
    config = parse_run_config(TINY_RUN.format(data=DATA), overrides=overrides, where="test")
    config = replace(
        config,
        run=replace(config.run, name=name),
        launch=replace(config.launch, ranks_per_node=ranks_per_node, threads_per_rank=1),
    )
    return export_job(
        config,
        run_id=run_id,
        spec=config.model.spec(sequence_length=32, vocab_size=1000),
        machines=make_inventory().nodes,
        domains={},
        nodes=nodes,
        image=_IMAGE if engine.takes_image else None,
        storage=storage or _STORAGE.get(engine.name),
    )
