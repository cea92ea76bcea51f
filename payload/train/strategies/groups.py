"""The process groups of a mesh of ranks."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from payload.machines.rank_mesh import Dimension, Mesh


def group_along(
    mesh: Mesh, rank: int, *dimensions: Dimension, timeout_s: float
) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from `rank` only in these dimensions.

    Creating a group is a collective operation, so all ranks must make these calls in the same
    order.
    """
    every = [mesh.along(each, *dimensions) for each in range(mesh.world_size)]
    found = _own_group(every, rank, timeout_s=timeout_s)
    assert found is not None, "every rank is in one of the groups"
    return found


def group_of_ends(mesh: Mesh, rank: int, *, timeout_s: float) -> dist.ProcessGroup | None:
    """Return the group of a pipeline's first and last rank, or None on a rank in between.

    Creating a group is a collective operation, so all ranks must make these calls in the same
    order.
    """
    lines = [mesh.along(each, "pipeline") for each in range(mesh.world_size)]
    return _own_group([(line[0], line[-1]) for line in lines], rank, timeout_s=timeout_s)


def _own_group(
    every: list[tuple[int, ...]], rank: int, *, timeout_s: float
) -> dist.ProcessGroup | None:
    found: dist.ProcessGroup | None = None
    for members in dict.fromkeys(every):
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(sorted(set(members)), timeout=timeout)
        if rank in members:
            found = group
    return found
