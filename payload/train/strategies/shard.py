"""Each rank holds a shard of every weight, gradient and optimizer state: FSDP2 over gloo.

A layer's weights are gathered for the layer's forward pass, and again for the backward pass. The
layer's gradients are summed right after the backward pass. Only one layer and the weights outside
the layers (embeddings, last norm, head) are gathered at a time. Optimizers work on this rank's
shards as plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from payload.config.launch_sections import DistributedSection
from payload.machines.rank_mesh import Mesh
from payload.train.checkpoints.snapshot import checkpoint_weights
from payload.train.models.base import CausalLM, LayerModule, Placement, trainable
from payload.train.models.split import bounds
from payload.train.optimizers.optimizer import Optimizers
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.strategies.shard_comms import Buffers, CollectiveTimer, Gather, SumOfParts
from payload.train.strategies.shard_snapshot import ShardSnapshot
from payload.train.strategies.sync_check import RankState, inspect_each, require_one_model

# Methods of a model that run a forward pass, in addition to `forward`.
_ENTRIES = ("token_losses", "class_logits")


class Shard(Strategy):
    """Fully sharded data parallelism; with fewer shards than ranks, each group of ranks holds a
    replica.

    The ranks of a group are consecutive, so that a group is on one node if possible.
    """

    def __init__(self, settings: DistributedSection, world: World) -> None:
        super().__init__(settings, world)
        self._shards = self.mesh.shard
        self._mesh = _data_mesh(world, self.mesh)
        self._group = self._mesh.get_group("shard")
        self._saving: dist.ProcessGroup | None = None
        self._timer = CollectiveTimer()
        self._buffers = Buffers()
        self._pairs: list[tuple[DTensor, nn.Parameter]] = []
        """Each trained parameter of the model, with this rank's shard that the optimizers train."""

    def wrap(self, model: CausalLM) -> None:
        """Set this rank's shard of rank 0's weights, with one full layer in memory at a time.

        If all ranks can read the weights' files, each rank reads its shard, and nothing is sent.
        """
        self._saving = dist.new_group(list(range(self._shards)))
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        for module in (*model.layers(), model):
            for parameter in module.parameters():
                if model.deferred_weights is None and not isinstance(parameter, DTensor):
                    dist.broadcast(parameter.detach(), src=0)
            self._shard_module(module)
        if model.deferred_weights is not None:
            model.load_tensors(model.deferred_tensors(), where=str(model.deferred_weights))
            model.deferred_weights = None
        self._enter_by_hooks(model)

    def place(self, model: CausalLM) -> None:
        """Keep this rank's shard of weights that are equal on all ranks of its group."""
        for module in (*model.layers(), model):
            self._shard_module(module)
        self._enter_by_hooks(model)

    def _shard_module(self, module: nn.Module) -> None:
        # With bf16, gradients are rounded only for sending; on CPUs, each rank adds them in fp32.
        reduced = torch.bfloat16 if self.settings.grad_dtype == "bf16" else None
        before, kind = _num_hooks(module), type(module)
        fully_shard(module, mesh=self._mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
        if isinstance(module, LayerModule):
            module.placement = Placement(kind, DTensor, _num_hooks(module) - before)
            register_fsdp_forward_method(module, "computed_by")
        self._set_collectives(cast(FSDPModule, module))

    def _enter_by_hooks(self, model: CausalLM) -> None:
        for name in _ENTRIES:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)

    def parts(self, model: CausalLM) -> dict[str, nn.Parameter]:
        """Return this rank's shard of each trained parameter, a view of the parameter's memory."""
        found = {}
        for name, parameter in trainable(model):
            assert isinstance(parameter, DTensor)
            with torch.no_grad():
                found[name] = nn.Parameter(parameter.to_local())
            self._pairs.append((parameter, found[name]))
        return found

    def attach(self, model: CausalLM) -> None:
        """Make the kernels drop their copies of a layer's weights after each use."""
        if model.kernels is not None:
            model.kernels.keep_no_copies()

    def begin(self, tokens: Tensor) -> None:
        """Do nothing, because every micro-batch reduces its own gradients."""

    def finish(self) -> float:
        """Set the gradients of the optimizers' shards; return the seconds spent in collectives."""
        for whole, part in self._pairs:
            gradient = whole.grad
            if gradient is None:
                part.grad = torch.zeros_like(part)
            else:
                assert isinstance(gradient, DTensor)
                part.grad = gradient.to_local()
            whole.grad = None
        return self._timer.take()

    def holds_parts(self) -> bool:
        """Return True, because a rank holds only some rows of each weight."""
        return True

    def own_rows(self, num_rows: int) -> tuple[int, int]:
        """Return the (begin, end) of this rank's share of `num_rows` rows."""
        return bounds(num_rows, index=dist.get_rank(self._group), size=self._shards)

    def norm_over_ranks(self) -> Callable[[float], float]:
        """Return a function that combines the norms of all shards into one."""

        def whole(norm: float) -> float:
            squares = torch.tensor(norm**2, dtype=torch.float64, device=self.world.device)
            dist.all_reduce(squares, group=self._group)
            return math.sqrt(float(squares))

        return whole

    def without_gradients(self, model: CausalLM) -> AbstractContextManager[object]:
        """Return the context of an evaluation.

        Training can use weights that were gathered in this context.
        """
        del model
        return torch.no_grad()

    def computes_together(self) -> bool:
        """Return True, because a micro-batch needs the shards of all ranks."""
        return True

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight in full, gathered over the ranks of a group, one at a time."""
        # An evaluation leaves some weights gathered.
        cast(FSDPModule, model).reshard()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            with torch.no_grad():
                yield name, parameter.full_tensor()

    def local_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's rows of each weight, by name."""
        cast(FSDPModule, model).reshard()
        parameters = cast(Iterable[tuple[str, DTensor]], model.named_parameters())
        with torch.no_grad():
            return {name: each.to_local() for name, each in parameters}

    def check(self, optimizers: Optimizers, *, step: int, passed_step: int | None) -> None:
        """Compare the weights that each rank gathers, and the optimizer state of replicas.

        Optimizer state that only one rank holds cannot be compared.
        """
        weights, bad_weight = inspect_each(self.weights(optimizers.model))
        state, bad_state = inspect_each(optimizers.state_tensors().items())
        own = RankState(weights=weights, optimizer=state, not_finite=bad_weight or bad_state)
        states = self.world.gather(own, RankState)
        require_one_model(states, step=step, passed_step=passed_step, shards=self._shards)

    def snapshot(self, model: CausalLM, optimizers: Optimizers) -> ShardSnapshot:
        """Return this rank's shards of a checkpoint's tensors."""
        assert self._saving is not None, "wrap() comes first"
        cast(FSDPModule, model).reshard()
        owners = {part: whole for whole, part in self._pairs}
        names = optimizers.trained()
        state = {
            name: _as_part(value, owners[names[name.partition(".")[2]]])
            for name, value in optimizers.state_tensors().items()
        }
        return ShardSnapshot(
            checkpoint_weights(model),
            state,
            group=self._saving,
            takes_part=self.world.rank < self._shards,
        )

    def _set_collectives(self, module: FSDPModule) -> None:
        # gloo cannot average; our own reduce-scatter returns a sum.
        module.set_force_sum_reduction_for_comms(True)
        if not self.world.is_cpu:
            # NCCL's collectives overlap with the computation; our sends and receives would run in
            # order on one stream and not overlap.
            return
        # The weights outside the layers get no reused buffer: it would be as large as an embedding.
        buffers = None if isinstance(module, CausalLM) else self._buffers
        gather, sums = Gather(self._timer, buffers), SumOfParts(self._timer, buffers)
        # Both classes follow the interface of FSDP2's base classes, which are in a private module.
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(sums)  # type: ignore[arg-type]


def _data_mesh(world: World, mesh: Mesh) -> DeviceMesh:
    """Return torch's mesh of the ranks that replicate or shard the same part of the model."""
    sizes = {
        "pipeline": mesh.pipeline,
        "replicate": mesh.replicate,
        "shard": mesh.shard,
        "tensor": mesh.tensor,
    }
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    whole = init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    return whole[tuple(name for name in kept if name in ("replicate", "shard"))]


def _as_part(value: Tensor, owner: DTensor) -> Tensor:
    """Return a shard's optimizer state as a DTensor with the shape of the parameter `owner`."""
    if value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )


def _num_hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)
