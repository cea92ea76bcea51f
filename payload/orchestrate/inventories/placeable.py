"""The checks that a run can be started and placed on the chosen machines."""

from __future__ import annotations

from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.estimates.run_estimate import Arithmetic
from payload.launch.launchers.registry import AUTO, candidates
from payload.launch.ranks import Placement
from payload.machines.inventory import ClusterInventory
from payload.machines.rank_mesh import require_tensor_ranks_on_a_node
from payload.orchestrate.inventories.chosen import Chosen

_GIB = 2**30


def require_one_machine(chosen: Chosen) -> None:
    """Raise ConfigError for nodes that are neither this machine alone nor a Slurm job's."""
    inventory = chosen.inventory
    access = inventory.access
    if not access.shares_folder or (access.is_this_machine and len(inventory.nodes) > 1):
        raise ConfigError(
            f"inventory ({chosen.why}): access kind {access.kind!r} with "
            f"{len(inventory.nodes)} node(s); 'local' is for one node, this machine. Use 'direct' "
            "or 'iap' for others."
        )


def require_launcher_of_jobs(config: RunConfig, *, nodes: int) -> None:
    """Raise ConfigError for a launcher that cannot start ranks in a Slurm job of so many nodes."""
    if config.launch.launcher == AUTO or nodes == 1:
        return
    launcher = candidates(config.launch.launcher)[0]
    if launcher.needs_ssh:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} reaches other nodes by SSH with the run's key, "
            f"which the {nodes} nodes of a Slurm job do not have. Use 'auto', 'srun' or 'torchrun'."
        )


def require_launcher(config: RunConfig, inventory: ClusterInventory) -> None:
    """Raise ConfigError for a launcher that is unknown, or cannot span the inventory's nodes."""
    if inventory.source == "slurm":
        require_launcher_of_jobs(config, nodes=len(inventory.nodes))
    launcher = candidates(config.launch.launcher)[0]
    if launcher.scheduler not in (None, inventory.source):
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} starts ranks in a Slurm job, and "
            f"{inventory.cluster} is none. Use 'auto', or submit a job with --site slurm."
        )
    if len(inventory.nodes) > 1 and not launcher.spans_nodes:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} is for one machine, and {inventory.cluster} has "
            f"{len(inventory.nodes)}. Use 'mpirun' here."
        )


def require_placeable(config: RunConfig, chosen: Chosen) -> Placement:
    """Return where the ranks go.

    Raises ConfigError for an unknown launcher, and for ranks that cannot be placed, would share the
    batch unevenly, or would not record what is wanted.
    """
    require_launcher(config, chosen.inventory)
    placement = chosen.place(config.launch, config.device)
    require_tensor_ranks_on_a_node(
        config.distributed.tensor_parallel, ranks_per_node=placement.ranks_per_node
    )
    config.require_even(placement.world_size)
    return placement


def memory_warning(
    arithmetic: Arithmetic, placement: Placement, *, free_bytes: int | None
) -> str | None:
    """Return a warning when the node's ranks likely need more memory than is free."""
    need = arithmetic.memory_bytes_per_rank * placement.ranks_per_node
    if free_bytes is None or need <= free_bytes:
        return None
    return (
        f"the ranks need about {need / _GIB:.1f} GiB ({placement.ranks_per_node} x "
        f"{arithmetic.memory_bytes_per_rank / _GIB:.1f}), {free_bytes / _GIB:.1f} GiB are free; "
        "lower batch.micro_batch_size or launch.ranks_per_node if ranks get killed"
    )
