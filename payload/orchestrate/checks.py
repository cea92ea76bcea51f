"""Cheap checks before a run starts: better a line now than a rank's failure in a minute."""

from __future__ import annotations

from pathlib import Path

from payload.data_folder import TRAIN_NAME, load_meta, require_block_length, require_task
from payload.errors import ConfigError, DataError
from payload.inventory import ClusterInventory
from payload.launch.arithmetic import Arithmetic
from payload.launch.launchers.registry import candidates
from payload.launch.ranks import Placement, place_ranks
from payload.orchestrate.inventories import Chosen
from payload.run_config import RunConfig
from payload.tasks import TaskKind

_GIB = 2**30
# nanoGPT's rate for GPT-2 from scratch, 6e-4, made GPT-2's own weights worse.
_MOST_FINE_TUNING_RATE = 3e-4


def check_data(folder: Path, *, sequence_length: int, task: TaskKind = "text") -> int:
    """Return the vocabulary size of a data folder that is whole by its sizes.

    Raises DataError that says how to make the folder, and ConfigError for one that was prepared
    for another task or length.
    """
    meta = load_meta(folder)
    require_task(folder, meta, task=task)
    if meta.chat is not None:
        require_block_length(folder, meta.chat, sequence_length=sequence_length)
    # A block of text holds one token more than the sequence: the last one's target.
    if meta.task == "text" and meta.train_tokens <= sequence_length:
        raise DataError(
            f"{folder / TRAIN_NAME} has {meta.train_tokens:,} tokens, too few for one sequence "
            f"of data.sequence_length = {sequence_length}. Lower it, or prepare more text."
        )
    return meta.vocab_size


def require_launcher(config: RunConfig, inventory: ClusterInventory) -> None:
    """Raise ConfigError for a launcher that is unknown, or cannot span the inventory's nodes."""
    launcher = candidates(config.launch.launcher)[0]
    if len(inventory.nodes) > 1 and not launcher.spans_nodes:
        raise ConfigError(
            f"launch.launcher = {launcher.name!r} is for one machine, and {inventory.cluster} has "
            f"{len(inventory.nodes)}. Use 'mpirun' here."
        )


def require_placeable(config: RunConfig, chosen: Chosen) -> None:
    """Raise ConfigError for an unknown launcher, and for ranks that cannot be placed.

    The same holds for ranks that would share the batch unevenly.
    """
    require_launcher(config, chosen.inventory)
    placement = place_ranks(chosen.inventory, config.launch, domains=chosen.domains)
    config.batch.grad_accum_steps(placement.world_size)


def memory_warning(
    arithmetic: Arithmetic, placement: Placement, *, free_bytes: int | None
) -> str | None:
    """A warning when all ranks of the node are likely to need more memory than is free."""
    need = arithmetic.memory_bytes_per_rank * placement.ranks_per_node
    if free_bytes is None or need <= free_bytes:
        return None
    return (
        f"the ranks need about {need / _GIB:.1f} GiB ({placement.ranks_per_node} x "
        f"{arithmetic.memory_bytes_per_rank / _GIB:.1f}), {free_bytes / _GIB:.1f} GiB are free; "
        "lower batch.micro_batch_size or launch.ranks_per_node if ranks get killed"
    )


def rate_warning(config: RunConfig) -> str | None:
    """A warning when weights that are trained already would be trained at a rate for new ones."""
    rate, init = config.optimizer.lr, config.model.init
    if init == "scratch" or rate <= _MOST_FINE_TUNING_RATE:
        return None
    return (
        f"optimizer.lr = {rate:g} is a rate for training from scratch, and model.init = {init!r} "
        "has weights that are trained already; fine-tuning wants about 3e-5"
    )
