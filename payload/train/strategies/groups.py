"""The process groups of a mesh of ranks."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from payload.mesh import Dimension, Mesh


def group_along(
    mesh: Mesh, rank: int, *dimensions: Dimension, timeout_s: float
) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from `rank` in these dimensions at most.

    All ranks call this for all groups in one order.
    """
    found: dist.ProcessGroup | None = None
    seen: set[tuple[int, ...]] = set()
    for each in range(mesh.world_size):
        members = mesh.along(each, *dimensions)
        if members in seen:
            continue
        seen.add(members)
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(list(members), timeout=timeout)
        if rank in members:
            found = group
    assert found is not None, "every rank is in the group of its own place"
    return found
