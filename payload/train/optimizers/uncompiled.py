"""torch's optimizers for steps that are not compiled.

torch.optim prepares its methods for torch.compile, and imports the compiler at their first call:
over a second of CPU time for every rank.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


class _Eager(torch.optim.Optimizer):
    """Methods without the compiler's marks; they do the same."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def eager(kind: type[torch.optim.Optimizer]) -> Any:
    """The same optimizer, which never imports torch.compile's machinery.

    No gradient flows through its updates, as with torch's own unless it is `differentiable`.
    """
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (_Eager, kind), {"step": step})
