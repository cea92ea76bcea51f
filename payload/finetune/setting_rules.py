"""Chooses every setting of a fine-tuning run by rules, and gives the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from payload.config.settings import toml_value
from payload.core.errors import ConfigError
from payload.core.printable_text import PLAIN_TEXT, counted, shown
from payload.core.tasks import TaskKind
from payload.models.spec import ModelSpec

Method = Literal["full", "lora", "nf4"]

MAX_TOKENS = 8192
"""Highest sequence length that is chosen. `--set data.sequence_length` can set a higher value."""
_UNTRUNCATED_SHARE = 0.99
"""Fraction of the texts that must fit into the chosen sequence length without truncation."""
_MIN_TOKENS: Mapping[TaskKind, int] = {"classify": 32, "chat": 256}
_TEXT_TOKENS = 1024
_STEP_TOKENS = 16384
"""Highest number of tokens per step. It is common for LoRA and full fine-tuning of small models."""
_TARGET_STEPS = 100
_MIN_EPOCHS: Mapping[TaskKind, int] = {"classify": 2}
"""Minimum number of epochs by task. Two epochs with a decaying learning rate from 1e-4 reached an
accuracy of 81.8 % on 8,000 labelled texts.

Source: benchmarks/results/2026-11-25_classify_epyc-2-cores.md. One epoch was not measured under the
same conditions.
"""
_MAX_EPOCHS = 3
_EVALUATIONS = 5
_LINES = 50
_SMALL, _LARGE = 500_000_000, 20_000_000_000
_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting of run.toml."""

    key: str
    """Name of the setting, as `section.name`."""
    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """Size of the training data."""

    sequences: int
    """Number of samples in an epoch: texts for `classify`, otherwise blocks of the sequence
    length."""
    tokens: int


def sequence_length(
    task: TaskKind, lengths: Sequence[int], *, tokens: int, context: int
) -> tuple[int, str]:
    """Return data.sequence_length and the reason.

    `lengths` are the token counts of the first texts or conversations. `tokens` is the total token
    count of plain text.
    """
    limit = min(context, MAX_TOKENS)
    if not lengths:
        size = min(_TEXT_TOKENS, limit)
        while size > 64 and tokens < 64 * size:
            size //= 2
        return size, f"plain text of about {tokens:,} tokens; the model's context is {context:,}"
    ordered = sorted(lengths)
    target = ordered[min(len(ordered) - 1, int(_UNTRUNCATED_SHARE * len(ordered)))]
    size = _MIN_TOKENS.get(task, 256)
    while size < target and size < limit:
        size *= 2
    size = min(size, limit)
    whole = sum(length <= size for length in ordered) / len(ordered)
    what = "texts" if task == "classify" else "conversations"
    return size, (
        f"{whole:.1%} of the first {len(ordered):,} {what} fit whole (median "
        f"{ordered[len(ordered) // 2]:,} tokens, longest {ordered[-1]:,})"
    )


def data_size(task: TaskKind, *, tokens: int, documents: int | None, length: int) -> DataSize:
    """Return the size of an epoch from the counts of `prepare --dry-run`."""
    if task == "classify" or _is_preference(task):
        return DataSize(sequences=max(1, round(0.9 * (documents or 1))), tokens=tokens)
    return DataSize(sequences=max(1, tokens // length), tokens=tokens)


def _is_preference(task: str) -> bool:
    """Return True if samples are pairs of answers. Pairs need a lower learning rate."""
    return task == "preference"


def batch(task: TaskKind, found: DataSize, *, length: int, ranks: int) -> Choice:
    """Return batch.global_batch_size: a power of two times the number of ranks."""
    limit = 64 if task == "classify" else max(1, _STEP_TOKENS // length)
    size = 1
    while 2 * size * ranks <= limit and found.sequences // (2 * size * ranks) >= _TARGET_STEPS // 3:
        size *= 2
    steps = max(1, found.sequences // (size * ranks))
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    return Choice(
        key="batch.global_batch_size",
        value=size * ranks,
        reason=(
            f"an epoch has {counted(found.sequences, 'sequence')} in {counted(steps, 'step')}"
            f"{shared}"
        ),
    )


def steps(task: TaskKind, found: DataSize, *, batch_size: int, requested: int | None) -> Choice:
    """Return train.steps, from the fewest epochs (one to three) that give at least a hundred steps.

    With labelled texts, the run has at least two epochs.
    """
    steps_per_epoch = max(1, found.sequences // batch_size)
    if requested is not None:
        return Choice(
            key="train.steps",
            value=requested,
            reason=f"--steps; {requested / steps_per_epoch:.2g} epochs",
        )
    tried = range(_MIN_EPOCHS.get(task, 1), _MAX_EPOCHS)
    epochs = next((each for each in tried if each * steps_per_epoch >= _TARGET_STEPS), _MAX_EPOCHS)
    plural = "s" if epochs > 1 else ""
    return Choice(
        key="train.steps", value=epochs * steps_per_epoch, reason=f"{epochs} epoch{plural}"
    )


def rate(task: TaskKind, method: Method, *, params: int) -> Choice:
    """Return optimizer.lr for the method and the size of the model."""
    if method == "full":
        by_size = (5e-5, 2e-5, 1e-5)
        by_size = (1e-4, 2e-5, 1e-5) if task == "classify" else by_size
        by_size = (5e-6, 1e-6, 5e-7) if _is_preference(task) else by_size
        why = "common for full fine-tuning of a model of this size"
    else:
        by_size = (2e-4, 5e-5, 1e-5) if _is_preference(task) else (1e-3, 2e-4, 1e-4)
        why = "an adapter needs a higher rate than full fine-tuning"
    value = by_size[(params >= _SMALL) + (params >= _LARGE)]
    return Choice(key="optimizer.lr", value=value, reason=f"{why} ({_count(params)})")


def method_choices(method: Method, spec: ModelSpec) -> list[Choice]:
    """Return the settings of a method: full, LoRA, or LoRA with a 4-bit base."""
    if method == "full":
        return []
    widths = [min(each.inputs, each.outputs) for each in spec.linears()]
    rank = min(_RANK, max(widths, default=_RANK))  # As AdaptedSpec.of requires.
    found = [
        Choice(
            key="adapter.kind",
            value="lora",
            reason="full fine-tuning does not fit into memory, an adapter does",
        ),
        Choice(key="adapter.rank", value=rank, reason="enough for most tasks"),
        Choice(key="adapter.alpha", value=2.0 * rank, reason="twice the rank"),
    ]
    if method == "nf4":
        why = (
            "a 16-bit base does not fit into memory; a 4-bit base is slower, because each "
            "micro-batch dequantises it"
        )
        found.append(Choice(key="model.quantize", value="nf4", reason=why))
    return found


def schedule(task: TaskKind, num_steps: int, *, method: Method, lr: float) -> list[Choice]:
    """Return the settings of warm-up, decay, evaluation and checkpoints."""
    every, log_every = max(1, num_steps // _EVALUATIONS), max(1, num_steps // _LINES)
    warmup = min(num_steps - 1, max(1, round(0.03 * num_steps)))
    # The last step is always evaluated and logged.
    evaluations, lines = (math.ceil(num_steps / each) for each in (every, log_every))
    # Rounded, because division by ten leaves digits such as 2.9999999999999997e-05.
    last, what = float(f"{lr / 10:g}"), "a tenth of optimizer.lr"
    if task == "classify":
        last, what = 0.0, "zero, as in the recipe classify.toml"
    return [
        Choice(key="optimizer.min_lr", value=last, reason=what),
        Choice(
            key="optimizer.weight_decay",
            value=0.01 if method == "full" else 0.0,
            reason="low, as the run is short",
        ),
        Choice(
            key="schedule.warmup_steps",
            value=warmup,
            reason=f"{100 * warmup / num_steps:.0f} % of the steps",
        ),
        Choice(key="train.log_every", value=log_every, reason=f"about {lines} lines"),
        Choice(
            key="train.eval_every",
            value=every,
            reason=f"evaluations during the run: {evaluations}",
        ),
        Choice(key="train.checkpoint_every", value=every, reason="one for each evaluation"),
    ]


def render(choices: Iterable[Choice], *, head: Sequence[str]) -> str:
    """Render run.toml: sections in order of appearance, each setting with its reason.

    Raises ConfigError for a control character in `head`, because after a line break in a name, TOML
    would read the rest as settings.
    """
    for line in head:
        if not PLAIN_TEXT.fullmatch(line):
            raise ConfigError(
                f"{shown(line)} has a control character, such as a line break. Rename the file or "
                "folder."
            )
    sections: dict[str, list[Choice]] = {}
    for each in choices:
        sections.setdefault(each.key.partition(".")[0], []).append(each)
    lines = [f"# {line}".rstrip() for line in head]
    for section, found in sections.items():
        lines += ["", f"[{section}]"]
        texts = [f"{each.key.partition('.')[2]} = {toml_value(each.value)}" for each in found]
        width = max(map(len, texts))
        lines += [
            f"{text:<{width}}  # {each.reason}" for text, each in zip(texts, found, strict=True)
        ]
    return "\n".join(lines) + "\n"


def _count(params: int) -> str:
    return f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.0f}M"
