"""The optimizers of a run, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from payload.config.engine_packages import QUANTIZER_MODULE
from payload.config.training_sections import EngineSection, OptimizerSection
from payload.core.errors import CheckpointError
from payload.kernels.kernels import Kernels
from payload.optimizers.base import NamesState, Parameters
from payload.optimizers.registry import find
from payload.train.models.base import CausalLM, trainable
from payload.train.optimizers.uncompiled import eager
from payload.train.tensors.bitsandbytes_import import bitsandbytes_library


@dataclass(slots=True)
class Optimizers:
    """The optimizers of a run; each trainable parameter of `model` is in exactly one member."""

    model: nn.Module
    members: tuple[torch.optim.Optimizer, ...]
    kernels: Kernels | None = None
    """Kernels that clip and update with AdamW in one pass over memory; None = use torch."""
    parts: dict[str, nn.Parameter] | None = None
    """This rank's shards that `members` train, by name; None = the model's own parameters."""
    norm_over_ranks: Callable[[float], float] | None = None
    """Maps the norm of this rank's gradients to the norm over all ranks."""
    counts: Callable[[str], bool] | None = None
    """Returns whether a parameter's gradient counts in the norm; None = all count."""
    _grad_scale: float = field(default=1.0, init=False)
    """Factor that the next update applies to the gradients."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that `members` train, by name."""
        return dict(trainable(self.model)) if self.parts is None else self.parts

    def set_lr(self, lr: float) -> None:
        """Use this learning rate from the next update on."""
        for optimizer in self.members:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def clip(self, limit: float) -> Tensor:
        """Limit the norm of all gradients in the next update; return the norm before clipping.

        The norm is a scalar, on the gradients' device if no rank needs it on the host.
        """
        if self.kernels is None and self.norm_over_ranks is None:
            return nn.utils.clip_grad_norm_(self.trained().values(), limit)
        gradients = [
            each.grad
            for name, each in self.trained().items()
            if each.grad is not None and (self.counts is None or self.counts(name))
        ]
        if self.kernels is None:
            norm = float(nn.utils.get_total_norm(gradients))
        else:
            norm = self.kernels.norm(gradients)
        if self.norm_over_ranks is not None:
            norm = self.norm_over_ranks(norm)
        scale = limit / (norm + 1e-6)
        # Not min(), which would return 1 for NaN.
        self._grad_scale = 1.0 if scale > 1 else scale
        return torch.tensor(norm, dtype=torch.float64)

    def step(self) -> None:
        """Update all parameters once and drop all gradients."""
        for optimizer in self.members:
            if self.kernels is not None and isinstance(optimizer, torch.optim.AdamW):
                self.kernels.adamw(optimizer, grad_scale=self._grad_scale)
            else:
                self._scale_gradients(optimizer)
                optimizer.step()
        self._grad_scale = 1.0
        self.zero_grad()

    def make_state(self) -> None:
        """Allocate AdamW's missing state before the first step, if the kernels do the update.

        Otherwise the first update would allocate the state between the tensors of two
        micro-batches. This fragments the memory, so later micro-batches would need more memory.
        """
        for optimizer in self.members:
            if self.kernels is not None and isinstance(optimizer, torch.optim.AdamW):
                self.kernels.make_state(optimizer)

    def keep_bf16_gradients(self, of: Iterable[nn.Parameter]) -> None:
        """Keep the gradients of these parameters in bf16, if the kernels' AdamW trains them."""
        # torch 2.8, used by the extra `intel`, keeps gradients in the weight's dtype only.
        if self.kernels is None or not hasattr(Tensor, "grad_dtype"):
            return
        selected = set(of)
        for optimizer in self.members:
            if isinstance(optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    for parameter in selected.intersection(group["params"]):
                        parameter.grad_dtype = torch.bfloat16

    def _scale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._grad_scale == 1:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._grad_scale)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.members:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all state tensors by names of the form `state_key.parameter_name`."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.trained().items()}
        found = {}
        for optimizer in self.members:
            for parameter, state in optimizer.state.items():
                named = optimizer.named_state(parameter) if _names(optimizer) else state
                for key, value in named.items():
                    if isinstance(value, Tensor):
                        found[f"{key}.{names[parameter]}"] = value.detach()
        return found

    def load_state_tensors(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        """Set this rank's optimizer state, one tensor at a time, by the names of `state_tensors`.

        The optimizer keeps the given tensors without copying them. Raises CheckpointError if a
        tensor fits no parameter.
        """
        parameters = self.trained()
        owners = {
            parameter: optimizer
            for optimizer in self.members
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        for full_name, value in pairs:
            key, _, name = full_name.partition(".")
            parameter = parameters.get(name)
            if parameter is None or not _set_state(owners[parameter], parameter, key, value):
                raise state_mismatch(full_name, value)


def _names(optimizer: torch.optim.Optimizer) -> TypeGuard[NamesState]:
    return isinstance(optimizer, NamesState)


def _set_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, value: Tensor
) -> bool:
    """Set a tensor of a parameter's state; return False if it does not fit."""
    if _names(optimizer):
        return optimizer.set_state(parameter, key, value)
    is_count = key == "step" and value.dim() == 0
    if not is_count and value.shape != parameter.shape:
        return False
    optimizer.state[parameter][key] = value.to(parameter.device)
    return True


def state_mismatch(full_name: str, value: Tensor) -> CheckpointError:
    """Return the error for optimizer state that fits no parameter."""
    return CheckpointError(
        f"the optimizer state {full_name!r} of shape {tuple(value.shape)} fits no parameter of "
        "this model: the checkpoint belongs to another model. Resume from the run's own checkpoint."
    )


def build_optimizers(
    model: nn.Module,
    settings: OptimizerSection,
    engine: EngineSection | None = None,
    *,
    parts: dict[str, nn.Parameter] | None = None,
) -> Optimizers:
    """Create the optimizer `settings.name`; if it leaves out parameters, create a second optimizer.

    An engine that patches torch's optimizer classes gets exactly these classes, not subclasses.
    `parts` replaces the model's parameters if a rank holds only a shard of each. Raises
    ConfigError.
    """
    stock = engine is not None and (engine.compile or engine.kind != "native")
    chosen = find(settings.name)
    if chosen.package == QUANTIZER_MODULE:
        bitsandbytes_library(quantizes=False)
    mine: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trainable(model) if parts is None else parts.items():
        is_taken = chosen.beside is None or chosen.takes(
            is_layer_matrix=parameter.dim() >= 2 and cast(CausalLM, model).is_hidden_matrix(name)
        )
        (mine if is_taken else others).append(parameter)
    shares = [(chosen, mine)]
    if chosen.beside is not None:
        shares.append((chosen.beside, others))
    members = (
        each.build(_parameters(share), settings, prepare=_unchanged if stock else eager)
        for each, share in shares
    )
    return Optimizers(model, tuple(members), parts=parts)


def _parameters(trained: list[nn.Parameter]) -> Parameters:
    """Divide one optimizer's parameters into matrices (with weight decay) and vectors (without)."""
    return Parameters(
        matrices=[each for each in trained if each.dim() >= 2],
        vectors=[each for each in trained if each.dim() < 2],
    )


def _unchanged(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return kind
