"""Plans a run that another engine (dstack, SkyPilot, Slurm, Kubeflow) will start."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime

from payload.config.run_config import RunConfig
from payload.core.errors import DataError, UsageError
from payload.formats.hub_names import HubName
from payload.launch.exports.base import ExportJob
from payload.launch.exports.registry import export_job
from payload.machines.inventory import Node
from payload.machines.machine import Domain
from payload.orchestrate.runs.run_input_checks import check_data, initial_spec, rate_warning
from payload.run_record.run_files import new_run_id
from payload.weights.source import SCRATCH


def plan_export(
    config: RunConfig,
    *,
    run_id: str | None,
    machines: Sequence[Node],
    domains: Mapping[str, tuple[Domain, ...]],
    nodes: int | None,
    image: str | None,
    storage: str | None,
) -> tuple[ExportJob, list[str]]:
    """Return the job to export to another engine, and notes for the user; writes nothing.

    Paths in the config are checked on this machine and must also exist in the engine's storage.
    Raises ConfigError and UsageError.
    """
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: must be 1 or more.")
    data, notes = config.data.folder(), []
    try:
        vocab_size: int | None = check_data(
            data, sequence_length=config.data.sequence_length, task=config.task.data()
        ).vocab_size
    except DataError as error:
        vocab_size = None
        notes.append(f"the data is not on this machine ({error})")
    spec, guess = initial_spec(config, vocab_size=vocab_size)
    job = export_job(
        config,
        run_id=run_id
        or new_run_id(config.run.name, now=datetime.now(), suffix=secrets.token_hex(2)),
        spec=config.adapted(spec),
        machines=machines,
        domains=domains,
        nodes=nodes,
        image=image,
        storage=storage,
    )
    notes.append(f"data.dir = {config.data.dir!r} must be in the engine's storage")
    if config.model.init != SCRATCH and HubName.parse(config.model.init) is None:
        notes.append(f"model.init = {config.model.init!r} must be in the engine's storage")
    return job, [*notes, *filter(None, (guess, rate_warning(config)))]
