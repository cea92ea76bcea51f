"""Each rank holds a shard of every weight, gradient and optimizer state: DeepSpeed's ZeRO stage 3.

DeepSpeed's hooks gather a module's weights and reduce-scatter gradients. DeepSpeed also clips the
gradients and calls the optimizer. DeepSpeed is called directly, without Accelerate: Accelerate's
plugin would update inside the backward pass, before a checkpoint's writer has read the weights, and
would convert the weights to bf16.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from payload.config.deepspeed_settings import deepspeed_config
from payload.config.launch_sections import DistributedSection
from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype
from payload.train.checkpoints.snapshot import checkpoint_weights
from payload.train.models.base import CausalLM, trainable
from payload.train.models.split import bounds
from payload.train.optimizers.optimizer import Optimizers, build_optimizers
from payload.train.ranks.world import World
from payload.train.strategies.base import Strategy
from payload.train.strategies.shard_snapshot import ShardSnapshot, rows_of
from payload.train.strategies.sync_check import RankState, inspect_each, require_one_model
from payload.train.strategies.zero3_optimizers import Zero3Optimizers
from payload.train.tensors.lazy_tensors import LazyTensors

log = logging.getLogger(__name__)

_ENTRIES = ("forward", "token_losses", "class_logits")
"""Methods of a model that run a forward pass."""


class _EntryModule(nn.Module):
    """A model's modules with a single entry point.

    DeepSpeed puts its hooks around this entry point.

    The model itself cannot be used, because other code calls several of its methods.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, entry: Callable[..., Any], *inputs: Any) -> Any:
        """Call one of the model's entry methods."""
        return entry(*inputs)


class Zero3(Strategy):
    """Shards the model over all ranks with ZeRO stage 3."""

    def __init__(self, settings: DistributedSection, world: World) -> None:
        super().__init__(settings, world)
        self._mesh = init_device_mesh(world.device.type, (world.world_size,))
        self._saving: dist.ProcessGroup = dist.new_group(list(range(world.world_size)))
        self._engine: Any = None

    def wrap(self, model: CausalLM) -> None:
        """Set rank 0's buffers on every rank; DeepSpeed sends the weights when it shards them."""
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def optimizers(self, model: CausalLM, config: RunConfig, *, dtype: Dtype) -> Optimizers:
        """Set this rank's shard of rank 0's weights; pass the run's optimizer to DeepSpeed."""
        if config.engine.wants_kernels():
            log.info("model     without our kernels: DeepSpeed gathers weights only around modules")
        made = build_optimizers(model, config.optimizer, config.engine)
        (optimizer,) = made.members
        names = {parameter: name for name, parameter in trainable(model)}
        self._engine = _initialize(
            _EntryModule(model), optimizer, deepspeed_config(config, dtype=dtype), self.world
        )
        for name in _ENTRIES:
            if hasattr(model, name):
                setattr(model, name, partial(self._engine, getattr(model, name)))
        return Zero3Optimizers(model, made.members, engine=self._engine, names=names)

    def attach(self, model: CausalLM) -> None:
        """Do nothing: `optimizers` has already distributed rank 0's weights."""

    def begin(self, tokens: Tensor) -> None:
        """Do nothing, because every micro-batch reduces its own gradients."""

    def finish(self) -> float:
        """Return 0: DeepSpeed waits in forward and backward, and sets the mean gradients."""
        return 0.0

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's range of a full tensor's elements, padded with zeros."""
        del name
        start, end, size = self._own_elements(tensor.numel())
        part = tensor.new_zeros(size)
        part[: end - start] = tensor.reshape(-1)[start:end]
        return part

    def holds_parts(self) -> bool:
        """Return True, because a rank holds only some elements of each weight."""
        return True

    def read_part(self, tensors: LazyTensors, stored: str, *, name: str) -> Tensor:
        """Read this rank's shard of a parameter. `stored` is the tensor's name in the files."""
        del name
        start, end, size = self._own_elements(math.prod(tensors.shape(stored)))
        part = torch.zeros(size, dtype=tensors.dtype(stored))
        tensors.copy_elements(stored, part[: end - start], first=start)
        return part

    def _own_elements(self, count: int) -> tuple[int, int, int]:
        """Return the (begin, end) of this rank's share of `count` elements, and the share's padded
        size."""
        ranks = self.world.world_size
        start, end = bounds(count, index=self.world.rank, size=ranks)
        return start, end, -(-count // ranks)

    def without_gradients(self, model: CausalLM) -> AbstractContextManager[object]:
        """Return the context of an evaluation.

        Training can use weights that were gathered in this context.
        """
        del model
        return torch.no_grad()

    def computes_together(self) -> bool:
        """Return True, because a micro-batch needs the shards of all ranks."""
        return True

    def check(self, optimizers: Optimizers, *, step: int, passed_step: int | None) -> None:
        """Compare the weights that each rank gathers.

        A shard of the optimizer state exists on only one rank, so it is only checked for NaN.
        """
        self._engine.empty_partition_cache()
        weights, bad_weight = inspect_each(_gathered(optimizers.model))
        state, bad_state = inspect_each(optimizers.state_tensors().items())
        own = RankState(weights=weights, optimizer=state, not_finite=bad_weight or bad_state)
        states = self.world.gather(own, RankState)
        require_one_model(states, step=step, passed_step=passed_step, shards=self.world.world_size)

    def snapshot(self, model: CausalLM, optimizers: Optimizers) -> ShardSnapshot:
        """Return this rank's rows of a checkpoint's tensors."""
        parameters = dict(model.named_parameters())
        saved = parameters if model.adapter is None else dict(trainable(model))
        rows = {each: self._rows(vars(each)["ds_tensor"], each) for each in saved.values()}
        with _replaced_parameters(model, rows):
            weights = checkpoint_weights(model)
        state = {
            name: self._rows(value, parameters[name.partition(".")[2]]) if value.dim() else value
            for name, value in optimizers.state_tensors().items()
        }
        return ShardSnapshot(weights, state, group=self._saving, takes_part=True)

    def _rows(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return this rank's rows of a tensor with the shape of `parameter`.

        `part` is the rank's shard.

        DeepSpeed shards by elements. If the number of rows is a multiple of the ranks, the rows are
        a view of `part`; otherwise all ranks gather the tensor briefly.
        """
        shape = torch.Size(vars(parameter)["ds_shape"])
        ranks, part = self.world.world_size, part.detach()
        if shape[0] % ranks == 0:
            local = part.view(shape[0] // ranks, *shape[1:])
        else:
            whole = part.new_empty(ranks * part.numel())
            dist.all_gather_single(whole, part)
            whole = whole[: shape.numel()].view(shape)
            local = rows_of(whole, rank=self.world.rank, ranks=ranks).clone()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self._mesh, [Rows(0)], run_check=False, shape=shape, stride=stride
        )


def _initialize(
    entry_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    world: World,
) -> Any:
    """Return DeepSpeed's engine for the modules."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    # DeepSpeed calls functions that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with _without_compile_decorators():
        return _deepspeed_engine(entry_module, optimizer, settings)


def _deepspeed_engine(
    entry_module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> Any:
    import deepspeed

    # DeepSpeed would warn about an unknown optimizer class: ours has no torch.compile wrappers.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # This all-reduce through shared memory is only for inference, and ranks would wait for it to
    # compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=entry_module, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine


@contextmanager
def _without_compile_decorators() -> Iterator[None]:
    """Disable torch.compile's decorators, and thus the import of the compiler.

    DeepSpeed applies these decorators to its hooks and its Muon; `engine.compile` is rejected with
    DeepSpeed. The import takes several seconds of CPU time per rank.
    """
    places: tuple[tuple[Any, str], ...] = ((torch, "compile"), (torch.compiler, "disable"))
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, _undecorated)
    try:
        yield
    finally:
        for (module, name), marked in zip(places, before, strict=True):
            setattr(module, name, marked)


def _undecorated(function: Any = None, **_: Any) -> Any:
    """Return the function unchanged, or a decorator that returns its function unchanged."""
    return (lambda each: each) if function is None else function


def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter gathered, one at a time."""
    from deepspeed.runtime.zero import GatheredParameters

    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]):
            yield name, parameter.detach()


@contextmanager
def _replaced_parameters(model: nn.Module, found: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Temporarily replace the model's parameters with the tensors in `found`."""
    places = list(_find_parameters(model, found))
    for parameters, name, parameter in places:
        parameters[name] = found[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _find_parameters(
    model: nn.Module, found: Mapping[nn.Parameter, Tensor]
) -> Iterable[tuple[dict[str, Any], str, nn.Parameter]]:
    """Yield the parameter dict, name and parameter of each parameter in `found`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in found:
                yield module._parameters, name, parameter
