"""Checkpoints of a sharded model. Rank 0 gathers a checkpoint tensor by tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.split import bounds
from payload.train.tensors.tensor_file import in_file_order


class ShardSnapshot(Snapshot):
    """This rank's shards of a checkpoint.

    A thread on each rank gathers or sends the shards during training, over a separate process
    group: on rank 0 while the thread writes the file, on other ranks in `finish`. All ranks process
    the tensors in the order of the file.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup,
        takes_part: bool,
    ) -> None:
        """Store the tensors; `takes_part` is True if this rank is in rank 0's `group`."""
        super().__init__(weights, optimizer)
        ordered = [each for _, each in (*in_file_order(weights), *in_file_order(optimizer))]
        shared = [each for each in ordered if isinstance(each, DTensor)] if takes_part else []
        self._group = group
        self._pending = deque(shared)

    def is_shared(self) -> bool:
        """Return whether this rank holds shards that rank 0 writes."""
        return bool(self._pending)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all elements of a tensor, on rank 0."""
        if not isinstance(tensor, DTensor):
            return tensor
        assert self._pending[0] is tensor, "tensors are gathered in the order of the file"
        return self._gather(self._pending.popleft())

    def finish(self) -> None:
        """Gather or send the remaining tensors."""
        while self._pending:
            self._gather(self._pending.popleft())

    def _gather(self, tensor: DTensor) -> Tensor:
        """Return the full tensor on rank 0; on other ranks, send this rank's shard."""
        with torch.no_grad():
            dims = [each.dim for each in tensor.placements if isinstance(each, Shard)]
            if not dims:
                # A slice of weights that transformers merges in memory, such as an expert's, is not
                # sharded.
                return tensor.to_local()
            (dim,) = dims
            part = tensor.to_local().cpu().movedim(dim, 0)
            rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
            if rank:
                if part.numel():
                    dist.send(part.contiguous(), dst=0, group=self._group)
                return part
            rows = torch.empty(tensor.shape, dtype=tensor.dtype).movedim(dim, 0)
            whole = torch.empty(rows.shape, dtype=tensor.dtype)
            at = rows_of(whole, rank=0, ranks=ranks)
            at.copy_(part)
            for source in range(1, ranks):
                at = rows_of(whole, rank=source, ranks=ranks)
                if at.numel():
                    dist.recv(at, src=source, group=self._group)
            return whole.movedim(0, dim)


def rows_of(whole: Tensor, *, rank: int, ranks: int) -> Tensor:
    """Return a rank's rows of a tensor, divided as in FSDP2. The last ranks may have fewer rows."""
    start, end = bounds(whole.shape[0], index=rank, size=ranks)
    return whole[start:end]
