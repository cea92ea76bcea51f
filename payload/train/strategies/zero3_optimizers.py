"""Implements the interface of `Optimizers` with DeepSpeed's update and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from payload.train.optimizers.optimizer import Optimizers, state_mismatch


class _Part(NamedTuple):
    """Position of a parameter's shard in one of DeepSpeed's flat tensors."""

    flat: Tensor
    first: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor with the layout of `flat`."""
        return tensor.narrow(0, self.first, self.size)


class Zero3Optimizers(Optimizers):
    """The run's optimizer on this rank's shards, which DeepSpeed keeps in a few flat tensors."""

    def __init__(
        self,
        model: nn.Module,
        members: tuple[torch.optim.Optimizer, ...],
        *,
        engine: Any,
        names: Mapping[nn.Parameter, str],
    ) -> None:
        """`names` maps each parameter that `members` train to its name."""
        super().__init__(model, members)
        self._engine = engine
        self._stage = engine.optimizer
        self._parts = dict(_parts(self._stage, names))

    def trained(self) -> dict[str, nn.Parameter]:
        """Return this rank's shard of each trained parameter."""
        return {
            name: nn.Parameter(part.of(part.flat.detach())) for name, part in self._parts.items()
        }

    def clip(self, limit: float) -> Tensor:
        """Limit the norm of all gradients in the next update; return the norm before clipping."""
        self._stage.clip_grad = 0.0 if math.isinf(limit) else limit
        norms = [float(each) for each in self._stage._get_norm_groups()]
        # DeepSpeed returns -1 for infinity or NaN, and skips the update.
        norm = math.hypot(*norms) if min(norms) >= 0 else math.nan
        return torch.tensor(norm, dtype=torch.float64)

    def step(self) -> None:
        """Update all parameters once and drop all gradients."""
        self._engine.step()
        self.zero_grad()

    def make_state(self) -> None:
        """Do nothing: state in flat tensors does not fragment memory."""

    def zero_grad(self) -> None:
        """Drop all gradients, and the buffer that DeepSpeed would reuse without new gradients."""
        self._stage.zero_grad(set_to_none=True)
        self._stage.grad_partitions_flat_buffer.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of all state, each tensor as `state_key.parameter_name`."""
        (optimizer,) = self.members
        return {
            f"{key}.{name}": part.of(value.detach()) if value.dim() else value.detach()
            for name, part in self._parts.items()
            for key, value in optimizer.state.get(part.flat, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state_tensors(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        """Set this rank's shards of the state. Raises CheckpointError."""
        (optimizer,) = self.members
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        for full_name, value in pairs:
            key, _, name = full_name.partition(".")
            part = self._parts.get(name)
            is_count = key == "step" and value.dim() == 0
            if part is None or not (is_count or value.numel() == part.size):
                raise state_mismatch(full_name, value)
            state = optimizer.state[part.flat]
            if is_count:
                state[key] = value
            else:
                part.of(state.setdefault(key, torch.zeros_like(part.flat.detach()))).copy_(value)


def _parts(stage: Any, names: Mapping[nn.Parameter, str]) -> Iterator[tuple[str, _Part]]:
    """Yield the name of each trained parameter and the position of this rank's shard."""
    for group, flat in zip(stage.fp16_groups, stage.fp32_partitioned_groups_flat, strict=True):
        first = 0
        for parameter in group:
            size = parameter.partition_numel()
            yield names[parameter], _Part(flat, first, size)
            first += size
