"""Computes the gradient norm and AdamW with the kernels, on torch's optimizer and its state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from payload.kernels.bf16_copies import Bf16Copies
from payload.kernels.library import Library, TensorUpdate, require_tensor


def norm(tensors: list[Tensor], library: Library) -> float:
    """Return the norm over all elements of all tensors."""
    return math.sqrt(library.sum_squares([each.contiguous() for each in tensors]))


@torch.no_grad()
def adamw(
    optimizer: torch.optim.AdamW, *, grad_scale: float, library: Library, copies: Bf16Copies
) -> None:
    """Run `optimizer.step()` with gradients times `grad_scale`, and also update `copies`.

    The state is kept in the optimizer, under torch's names.
    """
    for group in optimizer.param_groups:
        if group["amsgrad"] or group["maximize"]:
            raise ValueError("the kernels' AdamW supports neither amsgrad nor maximize")
        parameters = [each for each in group["params"] if each.grad is not None]
        if not parameters:
            continue
        gradients = [each.grad.contiguous() for each in parameters]
        updates = [
            _tensor_update(parameter, gradient, _state(optimizer, parameter), group, copies)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        library.adamw(updates, grad_scale=grad_scale, betas=group["betas"], eps=group["eps"])


def make_state(optimizer: torch.optim.AdamW) -> None:
    """Create the state of every parameter that lacks it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _state(optimizer, parameter)


def _state(optimizer: torch.optim.AdamW, parameter: Tensor) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def _tensor_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
    copies: Bf16Copies,
) -> TensorUpdate:
    state["step"] += 1
    step, lr, (beta1, beta2) = state["step"].item(), group["lr"], group["betas"]
    tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
    copy = copies.existing(parameter)
    is_rounded = gradient.dtype is torch.bfloat16
    # The C++ code checks nothing, and the state may come from a file.
    for each in tensors:
        require_tensor("an AdamW tensor", each, torch.float32, parameter.shape)
    grad_dtype = torch.bfloat16 if is_rounded else torch.float32
    require_tensor("a gradient", gradient, grad_dtype, parameter.shape)
    require_tensor("a bf16 copy", copy, torch.bfloat16, parameter.shape)
    return TensorUpdate(
        *(each.data_ptr() for each in tensors),
        None if is_rounded else gradient.data_ptr(),
        gradient.data_ptr() if is_rounded else None,
        None if copy is None else copy.data_ptr(),
        parameter.numel(),
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
    )
