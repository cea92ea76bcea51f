"""Versions of torch's optimizers for updates that are not compiled.

torch.optim prepares its methods for torch.compile and imports the compiler on their first call:
over a second of CPU time on every rank.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


class _Eager(torch.optim.Optimizer):
    """The methods of torch's Optimizer without torch.compile's wrappers."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def eager(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a subclass of the optimizer class `kind` that never imports torch's compiler.

    Updates always run without autograd. Torch's own optimizers use autograd only if
    `differentiable` is set.
    """
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (_Eager, kind), {"step": step})
