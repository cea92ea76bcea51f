"""The registry of export engines, and the description of a run that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.core.python_processes import SAFE_PATH
from payload.estimates.network import LOCAL_LINK
from payload.estimates.run_estimate import estimate_run
from payload.launch.environment import malloc_environment
from payload.launch.exports import dstack, mpijob, sbatch, skypilot, trainjob
from payload.launch.exports.base import Engine, ExportJob
from payload.launch.ranks import place_ranks
from payload.machines.inventory import Node
from payload.machines.machine import Domain
from payload.machines.process_variables import spin_environment
from payload.models.spec import ModelSpec

ENGINES: Mapping[str, Engine] = {
    module.ENGINE.name: module.ENGINE for module in (sbatch, mpijob, trainjob, skypilot, dstack)
}


def export_job(
    config: RunConfig,
    *,
    run_id: str,
    spec: ModelSpec,
    machines: Sequence[Node],
    domains: Mapping[str, tuple[Domain, ...]],
    nodes: int | None,
    image: str | None,
    storage: str | None,
) -> ExportJob:
    """Return the job for `nodes` machines like the first of `machines`.

    If `nodes` is omitted, the job uses all of `machines`.

    Raises ConfigError if ranks cannot be placed or would share the batch unevenly.
    """
    if config.launch.malloc == "tcmalloc":
        raise ConfigError(
            "launch.malloc = 'tcmalloc' cannot be exported: the library's path on the machines "
            "that will run the job is unknown. Use launch.malloc = 'tuned' or 'default'."
        )
    alike = machines if nodes is None else machines[:1]
    placement = place_ranks(alike, config.launch, device=config.device, domains=domains)
    num_nodes = nodes or len(machines)
    arithmetic = estimate_run(
        config,
        spec=spec,
        world_size=num_nodes * placement.ranks_per_node,
        link=LOCAL_LINK,
    )
    threads = min(rank.threads for rank in placement.ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **SAFE_PATH,
        **malloc_environment(config.malloc()),
        **spin_environment(),
    }
    return ExportJob(
        run_id=run_id,
        config=config.to_toml(),
        nodes=num_nodes,
        ranks_per_node=placement.ranks_per_node,
        threads_per_rank=threads,
        memory_bytes_per_node=arithmetic.memory_bytes_per_rank * placement.ranks_per_node,
        environment=environment,
        max_restarts=config.limits.max_restarts,
        max_hours=config.limits.max_hours,
        slurm=config.slurm,
        image=image,
        storage=storage,
    )
