"""Tensor and pipeline parallelism: each rank has a part of every layer, or some of the layers.

The rest of the mesh is data parallel: ranks with the same part of the model exchange the part's
gradients (`replicate`), or shard the part (`shard`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from payload.config.launch_sections import DistributedSection
from payload.machines.rank_mesh import Dimension
from payload.models.stages import stage_layers
from payload.train.models.base import CausalLM, trainable
from payload.train.models.split import SplitModule, Splits, TensorRanks
from payload.train.models.stage import OtherStageModule, Stage
from payload.train.optimizers.optimizer import Optimizers
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.strategies.groups import group_along, group_of_ends
from payload.train.strategies.mesh_loading import PartsReader, read_part
from payload.train.strategies.mesh_snapshot import Layout, MeshSnapshot
from payload.train.strategies.mesh_sync_check import require_one_mesh
from payload.train.strategies.replicate import Replicate
from payload.train.tensors.lazy_tensors import LazyTensors


class ModelParallel(Strategy):
    """Splits layers over tensor ranks and pipeline stages, and adds data parallelism."""

    def __init__(self, settings: DistributedSection, world: World) -> None:
        super().__init__(settings, world)
        self._place = self.mesh.place(world.rank)
        timeout_s = settings.timeout_s
        position = (self.mesh, world.rank)
        self._data = _data_strategy(settings, world)
        self._tensor = TensorRanks(
            group_along(*position, "tensor", timeout_s=timeout_s),
            index=self._place.tensor,
            size=self.mesh.tensor,
        )
        self._line = group_along(*position, "pipeline", timeout_s=timeout_s)
        self._ends = group_of_ends(*position, timeout_s=timeout_s)
        self._stage: Stage | None = None
        self._tied: str | None = None
        """The name of the embedding if the last stage has a copy of it as output head."""
        of_model: tuple[Dimension, ...] = ("pipeline", "shard", "tensor")
        self._model = group_along(*position, *of_model, timeout_s=timeout_s)
        """The ranks that hold one copy of the model."""
        self._saving = group_along(*position, *of_model, timeout_s=timeout_s)
        """A second group of the ranks in `_model`, for the thread that writes checkpoints."""
        self._splits = Splits({})
        self._layout: Layout
        self._trained: dict[str, nn.Parameter] = {}

    def wrap(self, model: CausalLM) -> None:
        """Set this rank's part of rank 0's weights, with one full parameter in memory at a time.

        If all ranks can read the weights' files, each rank reads its part, and nothing is sent.
        """
        splits = model.splits()
        assert splits is not None, "require_split rejects every other model"
        self._splits = splits = splits if self._tensor.size > 1 else Splits({})
        stages = self._stages(model)
        self._layout = Layout(model, splits, stages)
        reader = (
            None if model.deferred_weights is None else PartsReader(model, model.deferred_weights)
        )
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        for path, module in model.named_modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if reader is None:
                    dist.broadcast(parameter.detach(), src=0)
                name = f"{path}.{key}"
                if not self._is_on_stage(name, stages):
                    module.register_parameter(key, None)
                elif name in splits.parts:
                    part = self._tensor_part(name, parameter, is_read=reader is None)
                    module.register_parameter(key, nn.Parameter(part))
            if isinstance(module, SplitModule) and self._tensor.size > 1:
                module.ranks = self._tensor
        if self.mesh.pipeline > 1:
            self._drop_other_stages(model)
        self._data.place(model)
        if reader is not None:
            reader.read(model, splits.parts, index=self._tensor.index, size=self._tensor.size)
            model.deferred_weights = None

    def _tensor_part(self, name: str, whole: Tensor, *, is_read: bool) -> Tensor:
        """Return this tensor rank's part of a parameter, or uninitialised memory for that part."""
        split, index, size = self._splits.parts[name], self._tensor.index, self._tensor.size
        if is_read:
            return split.part(whole.detach(), index=index, size=size)
        return whole.new_empty(split.part_shape(tuple(whole.shape), index=index, size=size))

    def _stages(self, model: CausalLM) -> dict[str, int]:
        """Return each parameter's pipeline stage by name, and record the tied embedding."""
        if self.mesh.pipeline == 1:
            return {}
        of_layers, outer = stage_layers(model.spec, self.mesh.pipeline), model.outer_modules()
        last = self.mesh.pipeline - 1
        found = {}
        for name, parameter in model.named_parameters():
            if name.startswith(f"{outer.layers}."):
                number = int(name.removeprefix(f"{outer.layers}.").partition(".")[0])
                found[name] = next(i for i, each in enumerate(of_layers) if number in each)
            else:
                found[name] = last if name.rpartition(".")[0] in outer.last else 0
            if parameter is model.tied_weight():
                self._tied = name
        self._stage = Stage(
            index=self._place.pipeline,
            stages=self.mesh.pipeline,
            layers=of_layers[self._place.pipeline],
            ranks=self.mesh.along(self.world.rank, "pipeline"),
            group=self._line,
            width=model.spec.width(),
            device=self.world.device,
        )
        return found

    def _is_on_stage(self, name: str, stages: Mapping[str, int]) -> bool:
        """Return whether this stage has a parameter; the last stage also has the tied weights."""
        if self._stage is None:
            return True
        is_head = name == self._tied and self._stage.is_last()
        return stages[name] == self._stage.index or is_head

    def _drop_other_stages(self, model: CausalLM) -> None:
        """Replace the modules of other stages with placeholders."""
        stage, outer = self._stage, model.outer_modules()
        assert stage is not None
        tied = None if self._tied is None else self._tied.rpartition(".")[0]
        for path in (*outer.first, *outer.last):
            is_here = stage.is_first() if path in outer.first else stage.is_last()
            if not is_here and not (path == tied and stage.is_last()):
                model.set_submodule(path, OtherStageModule())
        for number in range(model.spec.num_layers()):
            if number not in stage.layers:
                model.set_submodule(f"{outer.layers}.{number}", OtherStageModule())
        model.stage = stage

    def stage(self) -> Stage | None:
        """Return this rank's pipeline stage, or None if a rank computes all layers."""
        return self._stage

    def holds(self, name: str) -> bool:
        """Return whether this rank has the parameter `name`, or a part of it."""
        return name in self._trained or name not in self._layout.parameters

    def parts(self, model: CausalLM) -> dict[str, nn.Parameter] | None:
        """Return this rank's part of the model, by parameter name.

        The rank's optimizers train this part.
        """
        found = self._data.parts(model)
        self._trained = dict(trainable(model)) if found is None else found
        return found

    def attach(self, model: CausalLM) -> None:
        """Prepare to average the gradients over the ranks that hold the same part of the model."""
        self._data.attach(model)

    def begin(self, tokens: Tensor) -> None:
        """Exchange the gradients of the next backward pass.

        `tokens` (B, T) are the tokens of that pass's micro-batch.
        """
        self._data.begin(tokens)

    def finish(self) -> float:
        """Set the mean gradients; return the seconds that this rank waited for others."""
        waited_s = self._data.finish()
        self._add_tied()
        if self._tensor.size > 1:
            self._agree_on_whole()
        waited_s, self._tensor.seconds = waited_s + self._tensor.seconds, 0.0
        if self._stage is not None:
            waited_s, self._stage.seconds = waited_s + self._stage.seconds, 0.0
        return waited_s

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a full tensor that belongs to the parameter `name`."""
        split = self._splits.parts.get(name)
        if split is not None:
            tensor = split.part(tensor, index=self._tensor.index, size=self._tensor.size)
        return self._data.own_part(name, tensor)

    def holds_parts(self) -> bool:
        """Return True, because a rank holds only its stage's layers or its part of each layer."""
        return True

    def read_part(self, tensors: LazyTensors, stored: str, *, name: str) -> Tensor:
        """Read this rank's part of the parameter `name`.

        `stored` is the tensor's name in the files.
        """
        return read_part(
            tensors,
            stored,
            self._splits.parts.get(name),
            index=self._tensor.index,
            size=self._tensor.size,
            own_rows=self._data.own_rows,
        )

    def has_results(self) -> bool:
        """Return whether this is the first of the ranks that compute the same losses."""
        return self._place.tensor == 0 and self._place.pipeline == self.mesh.pipeline - 1

    def counts(self) -> Callable[[str], bool]:
        """Return a function that returns whether a parameter's gradient counts in this rank's norm.

        If several ranks in one copy of the model hold the same part of a parameter, only one of
        them counts the gradient.
        """

        def is_counted(name: str) -> bool:
            if name == self._tied and self._place.pipeline:
                return False
            return name in self._splits.parts or self._place.tensor == 0

        return is_counted

    def norm_over_ranks(self) -> Callable[[float], float]:
        """Return a function that combines the norms of all parts into one."""

        def whole(norm: float) -> float:
            squares = torch.tensor(norm**2, dtype=torch.float64, device=self.world.device)
            dist.all_reduce(squares, group=self._model)
            return math.sqrt(float(squares))

        return whole

    def without_gradients(self, model: CausalLM) -> AbstractContextManager[object]:
        """Return the context in which the model is evaluated."""
        return self._data.without_gradients(model)

    def computes_together(self) -> bool:
        """Return True, because the ranks of a model run a micro-batch together."""
        return True

    def check(self, optimizers: Optimizers, *, step: int, passed_step: int | None) -> None:
        """Compare the copies of each part, and the unsplit parameters over tensor ranks."""
        require_one_mesh(
            self.world,
            self.mesh,
            weights=self._data.weights(optimizers.model),
            state=optimizers.state_tensors(),
            split=self._splits.parts,
            tied=self._tied,
            step=step,
            passed_step=passed_step,
        )

    def snapshot(self, model: CausalLM, optimizers: Optimizers) -> MeshSnapshot:
        """Return this rank's parts of a checkpoint's tensors."""
        return MeshSnapshot(
            self._layout,
            self._data.local_weights(model),
            optimizers.state_tensors(),
            mesh=self.mesh,
            rank=self.world.rank,
            group=self._saving,
        )

    def _add_tied(self) -> None:
        """Add the gradients of the tied embedding and output head.

        The two are on different stages.
        """
        stage = self._stage
        if stage is None or self._tied is None:
            return
        if stage.is_first() or stage.is_last():
            gradient = self._trained[self._tied].grad
            assert gradient is not None
            dist.all_reduce(gradient, group=self._ends)

    def _agree_on_whole(self) -> None:
        """Make the gradients of unsplit parameters equal on the tensor ranks.

        The ranks have computed the same gradient, but rounding can differ with the thread count.
        For the norms of attention heads, the gradient is the sum over the ranks, which have
        different heads.
        """
        found = list(self._not_split())
        if not found:
            return
        flat = torch.cat([gradient.flatten() for _, gradient in found])
        parts = torch.split(flat, [gradient.numel() for _, gradient in found])
        if self._tensor.index:
            for (name, _), part in zip(found, parts, strict=True):
                if name not in self._splits.partial:
                    part.zero_()
        self._tensor.sum(flat)
        for (_, gradient), part in zip(found, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _not_split(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trained.items():
            if name not in self._splits.parts and parameter.grad is not None:
                yield name, parameter.grad


def _data_strategy(settings: DistributedSection, world: World) -> Strategy:
    """Return the strategy of ranks that have the same part of the model."""
    if settings.strategy == "shard":
        # Imported here: FSDP2 takes a second to import.
        from payload.train.strategies.shard import Shard

        return Shard(settings, world)
    timeout_s = settings.timeout_s
    mesh = settings.mesh(world.world_size)
    replicas = group_along(mesh, world.rank, "replicate", timeout_s=timeout_s)
    return Replicate(settings, world, group=replicas)
