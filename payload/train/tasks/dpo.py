"""The arithmetic of direct preference optimization: rewards, margins, the loss, its evaluation.

The loss is that of TRL's DPOTrainer with its defaults: the negative log of the sigmoid of a pair's
margin. Source: Rafailov et al., Direct Preference Optimization, 2023 (arXiv:2305.18290).
P pairs, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from payload.data.reading.blocks import Indices
from payload.data.reading.pairs import Pairs
from payload.run_record.preference import PreferenceMetrics
from payload.train.models.base import CausalLM
from payload.train.tasks.evaluate import EvalPass


class DpoLoss:
    """The loss of pairs, from the losses of their answers' tokens."""

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._sums = torch.zeros(2, dtype=torch.float64)

    def __call__(self, losses: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean loss of P pairs, from (2P, T) losses and the reference's (P, 2)."""
        (reference,) = inputs
        gained = rewards(log_probs(losses), reference, beta=self.beta)
        margins = gained[:, 0] - gained[:, 1]
        with torch.no_grad():
            self._sums += torch.stack(((margins > 0).sum(), margins.sum())).cpu()
        return -functional.logsigmoid(margins).mean().float()

    def take_sums(self) -> Tensor:
        """Return how many margins were above 0 since the last call, and the margins' sum."""
        taken, self._sums = self._sums, torch.zeros(2, dtype=torch.float64)
        return taken


def log_probs(losses: Tensor) -> Tensor:
    """Return the answers' log-probabilities (P, 2) float64 from their tokens' losses (2P, T)."""
    return -losses.sum(-1, dtype=torch.float64).view(2, -1).T


def rewards(found: Tensor, reference: Tensor, *, beta: float) -> Tensor:
    """Return the answers' rewards (P, 2)."""
    return beta * (found - reference)


def reference_log_probs(
    model: CausalLM, splits: tuple[Pairs, Pairs], how: EvalPass
) -> Tensor | None:
    """Return the log-probabilities of both splits' answers, one below the other.

    None when a rank was asked to stop.
    """
    found = []
    for pairs in splits:
        part = answer_log_probs(model, pairs, how)
        if part is None:
            return None
        found.append(part)
    return torch.cat(found)


def answer_log_probs(
    model: CausalLM, pairs: Pairs, how: EvalPass, *, most: int | None = None
) -> Tensor | None:
    """Return log-probabilities (N, 2) float64 of the first N pairs' answers, on every rank.

    The ranks share batches that do not depend on their number, so the result is equal to the last
    bit. None when a rank was asked to stop.
    """
    size, (index, parts) = how.micro_batch_size, how.part()
    chosen = np.arange(pairs.num_pairs() if most is None else most)
    chosen = chosen[np.argsort(pairs.longest(chosen), kind="stable")]
    batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    found = torch.zeros(len(chosen), 2, dtype=torch.float64)
    passes = -(-len(batches) // parts)

    def token_losses(batch: Indices) -> Tensor:
        return model.token_losses(*(each.to(how.world.device) for each in pairs.gather(batch)))

    stopped = False
    model.eval()
    with how.computing():
        for done in range(passes):
            mine = done * parts + index
            # Every rank makes as many passes, the last perhaps with nothing to do.
            if mine < len(batches):
                losses = token_losses(batches[mine])
                found[torch.from_numpy(batches[mine])] = log_probs(losses).cpu()
            elif how.computes_together:
                token_losses(batches[0])
            stopped = how.should_stop(done + 1, passes)
            if stopped:
                break
    model.train()
    if stopped:
        return None
    how.sum(found)
    return found


def evaluate_pairs(
    model: CausalLM, pairs: Pairs, reference: Tensor, how: EvalPass, *, beta: float
) -> PreferenceMetrics | None:
    """Return the result over the first pairs that hold `how.max_tokens`, or all.

    Equal to the last bit for any number of ranks. None when a rank was asked to stop.
    """
    count = _num_pairs(pairs, how.max_tokens)
    found = answer_log_probs(model, pairs, how, most=count)
    if found is None:
        return None
    gained = rewards(found, reference[:count], beta=beta)
    margins = gained[:, 0] - gained[:, 1]
    chosen, rejected = gained.mean(0).tolist()
    return PreferenceMetrics(
        step=how.step,
        val_loss=float(-functional.logsigmoid(margins).mean()),
        val_tokens=pairs.num_tokens(np.arange(count)),
        val_pairs=count,
        val_accuracy=float((margins > 0).double().mean()),
        val_margin=float(margins.mean()),
        val_chosen_reward=chosen,
        val_rejected_reward=rejected,
    )


def _num_pairs(pairs: Pairs, max_tokens: int | None) -> int:
    """Return how many of the first pairs hold `max_tokens`, or all."""
    if max_tokens is None:
        return pairs.num_pairs()
    before = int(np.searchsorted(np.cumsum(pairs.lengths.sum(axis=1)), max_tokens))
    return min(before + 1, pairs.num_pairs())
