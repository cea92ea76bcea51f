"""The output head and its loss in chunks of tokens, so that all logits never exist together.

It is used on devices without this project's kernels. The backward pass recomputes a chunk's logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from payload.formats.data_folder import IGNORED_TARGET
from payload.models.spec import logits_tokens


def mean_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over targets (B, T), a scalar, from hidden (B, T, C)."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, chunk_targets in _chunks(hidden, weight, targets):
        total = total + checkpoint(_sum_of_losses, rows, weight, chunk_targets, use_reentrant=False)
    return total / (targets != IGNORED_TARGET).sum()


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
    found = [
        _losses(rows, weight, chunk_targets)
        for rows, chunk_targets in _chunks(hidden, weight, targets)
    ]
    return torch.cat(found).view_as(targets)


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = logits_tokens(weight.shape[0])
    rows = torch.split(hidden.flatten(0, 1), size)
    return zip(rows, torch.split(targets.flatten(), size), strict=True)


def _losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="none")


def _sum_of_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _losses(hidden, weight, targets).sum()
