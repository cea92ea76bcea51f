"""Draw tokens from a model, one after another, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from payload.errors import CheckpointError
from payload.train.models.base import Cache, CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    """Logits are divided by it; 0 = always the likeliest token."""
    top_k: int | None = 200
    """Choose among this many likeliest tokens only; None = among all."""
    num_samples: int = 3
    seed: int = 1337
    """Sample i draws from a generator of its own, seeded with seed + i."""


@torch.inference_mode()
def stream(
    model: CausalLM,
    prompt: Sequence[int],
    *,
    options: SamplingOptions,
    end_token: int,
    num_tokens: int,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of each sample, again and again; None for a sample that has ended.

    A sample ends before `end_token`. Only tokens below `num_tokens` are drawn: a model's embedding
    may have rows that stand for nothing. Where the text outgrows the model's context, the model
    reads on from the last half of it. Without `use_cache` every step reads everything again, with
    the same result.
    """
    model.eval()
    texts = torch.tensor([list(prompt)] * options.num_samples, dtype=torch.int64)
    generators = [
        torch.Generator().manual_seed(options.seed + i) for i in range(options.num_samples)
    ]
    ended = torch.zeros(options.num_samples, dtype=torch.bool)
    reader = _Reader(model, use_cache=use_cache)
    for _ in range(options.max_new_tokens):
        logits = reader.next_logits(texts)[:, :num_tokens]
        chosen = choose(logits, options=options, generators=generators)
        texts = torch.cat((texts, chosen[:, None]), dim=1)
        ended |= chosen == end_token
        if bool(ended.all()):
            return
        yield [
            None if is_over else token
            for token, is_over in zip(chosen.tolist(), ended.tolist(), strict=True)
        ]


def sample(
    model: CausalLM,
    prompt: Sequence[int],
    *,
    options: SamplingOptions,
    end_token: int,
    num_tokens: int,
    use_cache: bool = True,
) -> list[list[int]]:
    """Return all that `stream` yields, sample by sample."""
    samples: list[list[int]] = [[] for _ in range(options.num_samples)]
    for tokens in stream(
        model,
        prompt,
        options=options,
        end_token=end_token,
        num_tokens=num_tokens,
        use_cache=use_cache,
    ):
        add_tokens(samples, tokens)
    return samples


def add_tokens(samples: Sequence[list[int]], tokens: Sequence[int | None]) -> None:
    """Append to each sample its token."""
    for made, token in zip(samples, tokens, strict=True):
        if token is not None:
            made.append(token)


def choose(
    logits: Tensor, *, options: SamplingOptions, generators: Sequence[torch.Generator]
) -> Tensor:
    """Draw one token for each row of (B, V) logits, with that row's generator.

    Raises CheckpointError when a logit is not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            "the model gives NaN or infinity instead of logits: training diverged before these "
            "weights were saved, or they are damaged. Use another checkpoint."
        )
    if options.temperature == 0.0:
        return logits.argmax(dim=1)
    # The largest becomes 0, so that no temperature is too small to divide by.
    shifted = logits.double() - logits.max(dim=1, keepdim=True).values
    scaled = shifted / options.temperature
    if options.top_k is not None and options.top_k < scaled.shape[1]:
        lowest = scaled.topk(options.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    chances = scaled.softmax(dim=1)
    draws = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(chances, generators, strict=True)
    ]
    return torch.cat(draws)


class _Reader:
    """Feeds a growing text to the model: the new tokens only, as long as they fit the context."""

    def __init__(self, model: CausalLM, *, use_cache: bool) -> None:
        self._model = model
        self._use_cache = use_cache
        self._caches: Sequence[Cache] = ()
        self._start = 0
        """Where in the text the model's context begins."""
        self._read = 0
        """How much of the text the caches hold, counted from the text's begin."""

    def next_logits(self, texts: Tensor) -> Tensor:
        """(B, V) for the token after (B, T) `texts`, which continue those of the last call."""
        context, length = self._model.spec.context(), texts.shape[1]
        first = not self._caches
        if length - self._start > context:
            self._start = length - (context if first else max(1, context // 2))
            first = True
        if first or not self._use_cache:
            self._caches = self._model.new_caches()
            self._read = self._start
        hidden = self._model.hidden(texts[:, self._read :], self._caches)
        self._read = length
        return self._model.logits(hidden[:, -1])
