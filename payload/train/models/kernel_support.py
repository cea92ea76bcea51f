"""Decides which layers the kernels can compute.

The kernels compute only from parameters. A subclass, a hook, a wrapped parameter or a different
kind of adapter can add computation that the kernels would ignore. So the kernels accept only the
modules listed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from payload.kernels.linears import LowRank, Projection
from payload.train.models.base import LayerModule
from payload.train.models.lora import LoraLinear

_ADAPTER = ("lora_A", "lora_B")
_LORA_PARAMETERS = {"weight", "bias", *_ADAPTER}


def projection(linear: nn.Module, *, is_part: bool = False) -> Projection:
    """Return the parameters of a linear and of its adapter, as input for the kernels.

    With `is_part`, this rank has a part of the linear's inputs, and the bias is added after the sum
    over ranks.
    """
    assert isinstance(linear, nn.Linear | LoraLinear)
    if is_part:
        return Projection(linear.weight, None)
    adapter = None
    if isinstance(linear, LoraLinear):
        dropout = linear.dropout if linear.training else 0.0
        adapter = LowRank(linear.lora_A, linear.lora_B, linear.scale, dropout)
    return Projection(linear.weight, linear.bias, adapter)


def layer_refusals(body: nn.Module, *, known: Collection[type[nn.Module]]) -> Iterator[str]:
    """Yield the reasons why the kernels do not run the layers of `body`, one line each.

    `known` are the modules that the kernels implement; linears with LoRA are supported as well.
    """
    inner = [(name, each) for name, each in body.named_modules() if each is not body]
    recognised = {*known, LoraLinear}
    unknown = sorted({_kind(each).__name__ for _, each in inner if _kind(each) not in recognised})
    if unknown:
        yield f"modules of another kind: {', '.join(unknown)}"
    hooked = [name for name, each in inner if _has_hooks(each)]
    if hooked:
        yield f"hooks on {hooked[0]}, which the kernels would not call"
    adapted = [each for _, each in inner if isinstance(each, LoraLinear)]
    if any(set(each._parameters) - _LORA_PARAMETERS for each in adapted):
        yield "an adapter with more than LoRA's two matrices"
    if len({each.dropout for each in adapted}) > 1:
        yield "adapters with different dropout"
    yield from _parameter_refusals(inner, adapted=bool(adapted))


def _parameter_refusals(inner: list[tuple[str, nn.Module]], *, adapted: bool) -> Iterator[str]:
    parameters = [
        (f"{name}.{key}", module, each)
        for name, module in inner
        for key, each in module.named_parameters(recurse=False)
    ]
    placements = (each.placement for _, each in inner if isinstance(each, LayerModule))
    plain = {nn.Parameter, *(each.parameters for each in placements if each is not None)}
    wrapped = [(name, each) for name, _, each in parameters if type(each) not in plain]
    if wrapped:
        yield f"{len(wrapped)} weights of type {type(wrapped[0][1]).__name__}, {_first(wrapped)}"
    wrong = [
        (name, each)
        for name, _, each in parameters
        if each.requires_grad != (not adapted or name.endswith(_ADAPTER))
    ]
    if wrong and adapted:
        yield (
            f"{len(wrong)} weights with the wrong requires_grad: only the adapter's weights can be "
            "trained"
        )
    elif wrong:
        yield f"{len(wrong)} frozen weights, {_first(wrong)}"
    other = [
        (name, each)
        for name, module, each in parameters
        if each.dtype is not torch.float32 and not (adapted and _may_be_bf16(name, module, each))
    ]
    if other:
        yield f"{len(other)} weights that are not fp32, {_first(other)}"


def _may_be_bf16(name: str, module: nn.Module, parameter: Tensor) -> bool:
    """Return whether the parameter is a frozen linear's weight, which may be kept in bf16."""
    is_linear = isinstance(module, nn.Linear | LoraLinear) and name.endswith(".weight")
    return is_linear and parameter.dtype is torch.bfloat16 and not parameter.requires_grad


def _first(found: Sequence[tuple[str, Tensor]]) -> str:
    return f"such as {found[0][0]}"


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before a strategy wrapped it."""
    placement = module.placement if isinstance(module, LayerModule) else None
    return type(module) if placement is None else placement.built_as


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks other than a strategy's.

    `computed_by` does not run such hooks.
    """
    placement = module.placement if isinstance(module, LayerModule) else None
    around = len(module._forward_hooks) + len(module._forward_pre_hooks)
    if placement is not None:
        around -= placement.hooks
    return bool(around or module._backward_hooks or module._backward_pre_hooks)
