"""Evaluates a model on preference pairs: loss, accuracy, margin and rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from payload.config.run_config import parse_run_config
from payload.config.training_sections import TaskSection
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError, DataError
from payload.data.reading.pairs import Pairs, open_pairs
from payload.formats.checkpoint_listing import checkpoint_config
from payload.formats.data_folder import DataMeta
from payload.run_record.preference import PreferenceMetrics
from payload.train.losses.preference import Dpo
from payload.train.models.base import CausalLM
from payload.train.ranks.world import World
from payload.train.tasks.evaluate import EvalPass
from payload.train.tasks.pair_evaluation import evaluate_pairs
from payload.train.tasks.preference import stored_reference

_BATCH_PAIRS = 8
"""Pairs in a batch. The number is fixed, so that results do not depend on the number of ranks."""


def open_both(
    folder: Path, meta: DataMeta, model: CausalLM, *, dtype: Dtype
) -> tuple[Pairs, Tensor, str]:
    """Return the validation pairs, their reference log-probabilities, and the name of the reference
    model.

    Raises DataError, and ConfigError for pairs that are longer than the model's context.
    """
    assert meta.preference is not None
    length, context = meta.preference.sequence_length, model.spec.context()
    if length > context:
        raise ConfigError(
            f"{folder}: the data was prepared for conversations of {length} tokens, but the "
            f"model's context is {context}. Prepare the data with --sequence-length {context}."
        )
    if meta.vocab_size > model.spec.vocab_size:
        raise DataError(
            f"{folder}: its tokenizer ({meta.tokenizer}) has {meta.vocab_size:,} tokens, but the "
            f"model's embedding has {model.spec.vocab_size:,} rows. Prepare the pairs with the "
            "model's tokenizer."
        )
    found, origin, values = stored_reference(folder, meta, dtype=dtype)
    pairs = open_pairs(folder, split="val", sequence_length=length)
    return pairs, values, f"{found.model.name()} ({origin})"


def beta_of(weights: Path) -> float:
    """Return the beta that the checkpoint was trained with, or the default."""
    text = checkpoint_config(weights)
    if text is None:
        return TaskSection().beta
    task = parse_run_config(text, where=f"{weights}'s config").task
    return task.beta if task.data() == "preference" else TaskSection().beta


def measure(
    model: CausalLM,
    pairs: Pairs,
    reference: Tensor,
    world: World,
    *,
    beta: float,
    max_tokens: int | None,
    autocast: Callable[[], AbstractContextManager[Any]],
    progress: Callable[[int, int], bool],
) -> PreferenceMetrics:
    """Return the metrics of the pairs, bitwise equal for any number of ranks."""
    eval_pass = EvalPass(
        world=world,
        step=0,
        micro_batch_size=_BATCH_PAIRS,
        max_tokens=max_tokens,
        autocast=autocast,
        should_stop=progress,
    )
    found = evaluate_pairs(model, pairs, reference, eval_pass, Dpo(beta))
    assert isinstance(found, PreferenceMetrics), "should_stop is never True here"
    return found


def as_json(result: PreferenceMetrics, **more: object) -> str:
    """Return the result as one line of JSON."""
    row = {
        "val_loss": result.val_loss,
        "val_pairs": result.val_pairs,
        "val_tokens": result.val_tokens,
        "accuracy": result.val_accuracy,
        "margin": result.val_margin,
        "chosen_reward": result.val_chosen_reward,
        "rejected_reward": result.val_rejected_reward,
    }
    return json.dumps({**more, **row})


def as_text(result: PreferenceMetrics, *, beta: float) -> list[str]:
    """Return the result as lines of text."""
    return [
        f"pairs       {result.val_pairs:,} of the validation set",
        f"loss        {result.val_loss:.6f} nats a pair (beta {beta:g})",
        f"accuracy    {result.val_accuracy:.2%} of the chosen answers have the higher reward",
        f"margin      {result.val_margin:.4f}",
        f"rewards     {result.val_chosen_reward:+.4f} of the chosen answers, "
        f"{result.val_rejected_reward:+.4f} of the rejected answers",
    ]
