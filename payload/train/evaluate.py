"""Validation loss over the whole validation set, shared by all ranks and summed exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from payload.data.blocks import IGNORED_TARGET, TokenBlocks
from payload.results import EvalMetrics
from payload.train.model import GPT
from payload.train.world import World


def evaluate(
    model: GPT,
    blocks: TokenBlocks,
    *,
    world: World,
    step: int,
    micro_batch_size: int,
    max_tokens: int | None,
    autocast: Callable[[], AbstractContextManager[None]],
) -> EvalMetrics:
    """Mean loss per token over the first `max_tokens` validation tokens, or all of them.

    Losses are added up in float64 and counted, so that neither the number of ranks nor a short
    last block weighs on the mean.
    """
    num_blocks = blocks.num_blocks()
    if max_tokens is not None:
        num_blocks = min(num_blocks, -(-max_tokens // blocks.sequence_length))
    mine = np.arange(world.rank, num_blocks, world.world_size, dtype=np.int64)
    total = torch.zeros(2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    with torch.inference_mode(), autocast():
        for start in range(0, len(mine), micro_batch_size):
            inputs, targets = blocks.gather(mine[start : start + micro_batch_size])
            losses = model.token_losses(inputs, targets)
            total[0] += losses.sum(dtype=torch.float64)
            total[1] += (targets != IGNORED_TARGET).sum()
    model.train(was_training)
    world.sum(total)
    return EvalMetrics(
        step=step, val_loss=float(total[0] / total[1]), val_tokens=int(total[1].item())
    )
