"""Restores a checkpoint's optimizer state. Each rank keeps only its own shard.

If rank 0 has to send the tensors, each rank also holds one full tensor at a time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from payload.core.validation.fields import checked
from payload.formats.checkpoint_listing import OPTIMIZER_FILE
from payload.train.checkpoints.checkpoint import optimizer_tensors
from payload.train.optimizers.optimizer import Optimizers
from payload.train.strategies.base import Strategy
from payload.train.tensors.lazy_tensors import LazyTensors, path_on_all_ranks

log = logging.getLogger(__name__)

_DTYPE = re.compile("float64|float32|float16|bfloat16|int64|int32|uint8")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The name, shape and dtype that a rank must know to receive a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str = checked(pattern=_DTYPE, wanted="a dtype of torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forms:
    """The tensors in the order in which rank 0 sends them."""

    tensors: tuple[_Form, ...]


def restore_optimizer(
    optimizers: Optimizers, checkpoint: Path | None, *, strategy: Strategy
) -> None:
    """Load this rank's shard of the state in `checkpoint`; only rank 0 needs the path.

    Sharded ranks that all see the same file read their own shards. Otherwise rank 0 reads each
    tensor and sends it. Raises CheckpointError.
    """
    if strategy.world.world_size == 1:
        assert checkpoint is not None, "this is rank 0"
        optimizers.load_state_tensors(optimizer_tensors(checkpoint))
        return
    shared = None
    if strategy.holds_parts():
        shared = path_on_all_ranks(checkpoint and checkpoint / OPTIMIZER_FILE, strategy.world)
    if shared is None:
        optimizers.load_state_tensors(_sent_parts(checkpoint, strategy))
    else:
        log.info("optimizer each rank reads its own shard of the state")
        optimizers.load_state_tensors(_read_parts(optimizer_tensors(shared.parent), strategy))


def _read_parts(tensors: LazyTensors, strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shards of the state from a file that all ranks see."""
    for full_name in tensors:
        name = full_name.partition(".")[2]
        if not strategy.holds(name):
            continue
        # A scalar, such as AdamW's step count, is not sharded.
        is_number = not tensors.shape(full_name)
        yield (
            full_name,
            tensors[full_name] if is_number else strategy.read_part(tensors, full_name, name=name),
        )


def _sent_parts(checkpoint: Path | None, strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shards of the tensors that rank 0 reads and sends one by one."""
    world = strategy.world
    tensors = optimizer_tensors(checkpoint) if checkpoint else None
    forms = _forms(tensors) if tensors is not None else None
    for form in world.broadcast(forms, _Forms).tensors:
        if tensors is not None:
            whole = tensors[form.name].to(world.device)
        else:
            whole = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device=world.device)
        dist.broadcast(whole, src=0)
        name = form.name.partition(".")[2]
        if strategy.holds(name):
            part = strategy.own_part(name, whole) if whole.dim() else whole
            # Not a view: a view would keep the whole tensor in memory.
            yield form.name, part if part.numel() == whole.numel() else part.clone()


def _forms(tensors: LazyTensors) -> _Forms:
    """Describe the tensors to the ranks that receive them."""
    return _Forms(
        tensors=tuple(
            _Form(
                name=name,
                shape=tensors.shape(name),
                dtype=str(tensors.dtype(name)).removeprefix("torch."),
            )
            for name in tensors
        )
    )
