"""Computes log-probabilities of the answers in preference pairs, and evaluates pairs with them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from payload.data.reading.blocks import Indices
from payload.data.reading.pairs import Pairs
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Loss
from payload.train.losses.preference import log_probs
from payload.train.models.base import CausalLM
from payload.train.tasks.evaluate import EvalPass, compute_batches


def reference_log_probs(
    model: CausalLM, splits: tuple[Pairs, Pairs], eval_pass: EvalPass
) -> Tensor | None:
    """Return the log-probabilities of both splits' answers, concatenated.

    Return None after a request to stop.
    """
    found = []
    for pairs in splits:
        part = answer_log_probs(model, pairs, eval_pass)
        if part is None:
            return None
        found.append(part)
    return torch.cat(found)


def answer_log_probs(
    model: CausalLM, pairs: Pairs, eval_pass: EvalPass, *, most: int | None = None
) -> Tensor | None:
    """Return log-probabilities (N, 2) float64 of the first N pairs' answers, on every rank.

    Each rank computes some of the batches. The batches do not depend on the number of ranks, so the
    result is bitwise equal on any number of ranks. Return None after a request to stop.
    """
    size = eval_pass.micro_batch_size
    chosen = np.arange(pairs.num_pairs() if most is None else most)
    chosen = chosen[np.argsort(pairs.longest(chosen), kind="stable")]
    batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    found = torch.zeros(len(chosen), 2, dtype=torch.float64)

    def compute(batch: Indices) -> Tensor:
        inputs = (each.to(eval_pass.world.device) for each in pairs.gather(batch))
        return log_probs(model.token_losses(*inputs)).cpu()

    def keep(number: int, values: Tensor) -> None:
        found[torch.from_numpy(batches[number])] = values

    if not compute_batches(model, batches, eval_pass, compute, keep):
        return None
    eval_pass.sum(found)
    return found


def evaluate_pairs(
    model: CausalLM, pairs: Pairs, reference: Tensor, eval_pass: EvalPass, loss: Loss
) -> EvalMetrics | None:
    """Return the metrics over the first pairs, up to `eval_pass.max_tokens` tokens, or over all.

    The result is bitwise equal on any number of ranks. Return None after a request to stop.
    """
    count = _num_pairs(pairs, eval_pass.max_tokens)
    found = answer_log_probs(model, pairs, eval_pass, most=count)
    if found is None:
        return None
    tokens = pairs.num_tokens(np.arange(count))
    return loss.metrics(found, reference[:count], step=eval_pass.step, samples=count, tokens=tokens)


def _num_pairs(pairs: Pairs, max_tokens: int | None) -> int:
    """Return how many leading pairs together have `max_tokens` tokens; None = all pairs."""
    if max_tokens is None:
        return pairs.num_pairs()
    before = int(np.searchsorted(np.cumsum(pairs.lengths.sum(axis=1)), max_tokens))
    return min(before + 1, pairs.num_pairs())
