"""Checkpoints of a model on a mesh of ranks. Rank 0 gathers a checkpoint tensor by tensor.

A tensor is on the ranks of one pipeline stage. It is split over the tensor ranks of this stage, and
each part is sharded over data ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from payload.machines.rank_mesh import Mesh, RankIndices
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.base import CausalLM
from payload.train.models.split import Split, Splits, bounds
from payload.train.tensors.tensor_file import in_file_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution of a parameter, or of its optimizer state, over the mesh."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: Split | None
    stage: int

    def placeholder(self, *, transposed: bool = False) -> Tensor:
        """Return a meta tensor with the full shape. A meta tensor uses no memory."""
        shape = reversed(self.shape) if transposed else self.shape
        return torch.empty(tuple(shape), dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """The parameter that a tensor of the checkpoint's file stores."""

    parameter: str
    transposed: bool


class Layout:
    """The layout of the full model's checkpoint, recorded before the model is split over ranks."""

    def __init__(self, model: CausalLM, splits: Splits, stages: Mapping[str, int]) -> None:
        """Record the model's parameters; `stages` maps names to pipeline stages (default 0)."""
        self.parameters = {
            name: Distribution(
                shape=tuple(each.shape),
                dtype=each.dtype,
                split=splits.parts.get(name),
                stage=stages.get(name, 0),
            )
            for name, each in model.named_parameters()
        }
        owners = {each.data_ptr(): (name, each) for name, each in model.named_parameters()}
        self.saved: dict[str, SavedTensor] = {}
        self.constants: dict[str, Tensor] = {}
        """Tensors of the file that are not parameters, such as biases that are zero."""
        for name, tensor in model.hf_tensors().items():
            if tensor.data_ptr() not in owners:
                self.constants[name] = tensor
                continue
            owner, parameter = owners[tensor.data_ptr()]
            is_transposed = tensor.dim() == 2 and tensor.stride() != parameter.stride()
            self.saved[name] = SavedTensor(parameter=owner, transposed=is_transposed)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A tensor that is not gathered yet."""

    whole: Tensor
    """The placeholder that identifies the tensor."""
    distribution: Distribution
    transposed: bool
    own: Tensor | None
    """This rank's part, or None if it has no part."""


class MeshSnapshot(Snapshot):
    """This rank's parts of a checkpoint.

    A thread on each rank gathers or sends the parts during training, over a separate process group:
    on rank 0 while the thread writes the file, on other ranks in `finish`. All ranks process the
    tensors in the order of the file.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        *,
        mesh: Mesh,
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        """Store this rank's parts: `parameters` by name and `state` by `key.name`.

        `group` consists of the ranks of the first replica.
        """
        self._mesh, self._rank, self._group = mesh, rank, group
        weights, pending = dict(layout.constants), {}
        for name, saved in layout.saved.items():
            distribution = layout.parameters[saved.parameter]
            weights[name] = distribution.placeholder(transposed=saved.transposed)
            own = parameters.get(saved.parameter)
            pending[id(weights[name])] = _Pending(
                weights[name], distribution, saved.transposed, own
            )
        optimizer = {}
        for key, sample in _by_key(state).items():
            for name, distribution in layout.parameters.items():
                full_name = f"{key}.{name}"
                if sample.dim() == 0:
                    optimizer[full_name] = sample
                    continue
                optimizer[full_name] = distribution.placeholder()
                pending[id(optimizer[full_name])] = _Pending(
                    optimizer[full_name], distribution, False, state.get(full_name)
                )
        super().__init__(weights, optimizer)
        ordered = [each for _, each in (*in_file_order(weights), *in_file_order(optimizer))]
        takes_part = mesh.place(rank).replicate == 0
        self._pending = deque(
            pending[id(each)] for each in ordered if takes_part and id(each) in pending
        )

    def is_shared(self) -> bool:
        """Return whether this rank holds parts that rank 0 writes."""
        return bool(self._pending)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all elements of a tensor, on rank 0."""
        if not tensor.is_meta:
            return tensor
        assert self._pending[0].whole is tensor, "tensors are gathered in the order of the file"
        return self._gather(self._pending.popleft())

    def finish(self) -> None:
        """Gather or send the remaining tensors."""
        while self._pending:
            self._gather(self._pending.popleft())

    def _gather(self, each: _Pending) -> Tensor:
        """Return the full tensor on rank 0; on other ranks, send this rank's part."""
        with torch.no_grad():
            own = each.own
            if self._rank:
                if own is not None and own.numel() and self._sends(each.distribution):
                    dist.send(own.detach().contiguous(), dst=0, group=self._group)
                return each.whole
            whole = torch.empty(each.distribution.shape, dtype=each.distribution.dtype)
            for tensor in range(self._mesh.tensor if each.distribution.split else 1):
                self._receive(each.distribution, whole, own, tensor=tensor)
            return whole.t() if each.transposed else whole

    def _sends(self, distribution: Distribution) -> bool:
        """Return whether rank 0 receives this rank's part; rank 0 receives only one of several
        equal copies."""
        place = self._mesh.place(self._rank)
        return place.pipeline == distribution.stage and (
            distribution.split is not None or place.tensor == 0
        )

    def _receive(
        self, distribution: Distribution, whole: Tensor, own: Tensor | None, *, tensor: int
    ) -> None:
        """Receive the part of one tensor rank into `whole`."""
        size = self._mesh.tensor
        part = (
            whole
            if distribution.split is None
            else distribution.split.part(whole, index=tensor, size=size)
        )
        for shard in range(self._mesh.shard):
            start, end = bounds(len(part), index=shard, size=self._mesh.shard)
            rows = part[start:end]
            place = RankIndices(
                pipeline=distribution.stage, replicate=0, shard=shard, tensor=tensor
            )
            source = self._mesh.rank(place)
            if not rows.numel():
                continue
            if source == 0:
                assert own is not None
                rows.copy_(own)
            else:
                dist.recv(rows, src=source, group=self._group)
        if distribution.split is not None:
            distribution.split.put(part, whole, index=tensor, size=size)


def _by_key(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one tensor for each kind of state: AdamW's step count and its two moments."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        found.setdefault(name.partition(".")[0], value)
    return found
