"""Samples tokens from a model one after another, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from payload.core.errors import CheckpointError
from payload.train.models.base import CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Settings for sampling the next token."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    """Divisor of the logits. 0 means greedy decoding."""
    top_k: int | None = 200
    """A token is sampled from the `top_k` likeliest tokens. None means all tokens."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability. 1 means all
    tokens.

    Source: nucleus sampling, arXiv:1904.09751.
    """
    num_samples: int = 3
    seed: int = 1337
    """Random seed. Sample i has its own generator, with the seed `seed` + i."""
    repetition_penalty: float = 1.0
    """For tokens that are already in the text, positive logits are divided by this value, and
    negative logits are multiplied by it.

    1 means no penalty. Source: CTRL, arXiv:1909.05858.
    """


class Sampler:
    """Continues several prompts together; the rows of prompt i begin at i * num_samples.

    All rows start at position 0. After the end of a shorter prompt, tokens are sampled for this
    prompt while the rest of a longer prompt is read. So no row needs padding, and each row has the
    same tokens as without other rows.
    """

    def __init__(
        self,
        model: CausalLM,
        prompts: Sequence[Sequence[int]],
        *,
        options: SamplingOptions,
        stop_tokens: Set[int],
        num_tokens: int,
        use_cache: bool = True,
        reader: Reader | None = None,
    ) -> None:
        """Prepare to sample tokens with ids below `num_tokens`: an embedding can have unused rows.

        A row ends before a token of `stop_tokens`. Without `use_cache`, every step reads the whole
        text again, and the result is the same. With `reader`, the texts in the reader's cache are
        not read again.
        """
        self._options = options
        self._stop_tokens = torch.tensor(sorted(stop_tokens), dtype=torch.int64)
        self._num_tokens = num_tokens
        self._reader = reader or Reader(model, use_cache=use_cache)
        rows = [list(prompt) for prompt in prompts for _ in range(options.num_samples)]
        self._lengths = torch.tensor([len(row) for row in rows])
        self._texts = torch.zeros((len(rows), int(self._lengths.max())), dtype=torch.int64)
        for text, row in zip(self._texts, rows, strict=True):
            text[: len(row)] = torch.tensor(row, dtype=torch.int64)
        self._generators = [
            torch.Generator().manual_seed(options.seed + i)
            for _ in prompts
            for i in range(options.num_samples)
        ]
        self._ended = torch.zeros(len(rows), dtype=torch.bool)

    def end(self, row: int) -> None:
        """End a row."""
        self._ended[row] = True

    @torch.inference_mode()
    def tokens(self) -> Iterator[list[int | None]]:
        """For each step, yield the next token of each row, with None for a row without a new token.

        A row has no new token once it has ended, and while the model reads its prompt.
        """
        position = int(self._lengths.min())
        last = int(self._lengths.max()) + self._options.max_new_tokens
        while position < last:
            logits = self._reader.next_logits(self._texts[:, :position])[:, : self._num_tokens]
            sampled = self._append(self._choose(logits, position), position)
            position += 1
            if bool(self._ended.all()):
                return
            chosen = self._texts[:, position - 1].tolist()
            yield [
                token if is_drawn and not has_ended else None
                for token, is_drawn, has_ended in zip(
                    chosen, sampled.tolist(), self._ended.tolist(), strict=True
                )
            ]
            self._ended |= position - self._lengths >= self._options.max_new_tokens

    def _choose(self, logits: Tensor, position: int) -> Tensor:
        """Sample a token for each row.

        Rows that are still within their prompt do not use their generators.
        """
        options = self._options
        if options.repetition_penalty != 1.0:
            previous = self._texts[:, :position]
            logits = penalise(logits, previous, penalty=options.repetition_penalty)
        is_sampled = self._lengths <= position
        if bool(is_sampled.all()):
            return choose(logits, options=options, generators=self._generators)
        rows = is_sampled.nonzero().flatten().tolist()
        chosen = torch.zeros(len(logits), dtype=torch.int64)
        generators = [self._generators[row] for row in rows]
        chosen[rows] = choose(logits[rows], options=options, generators=generators)
        return chosen

    def _append(self, chosen: Tensor, position: int) -> Tensor:
        """Write the tokens at `position`. Return a mask of the rows with a sampled token."""
        sampled = self._lengths <= position
        if position < self._texts.shape[1]:
            chosen = torch.where(sampled, chosen, self._texts[:, position])
            self._texts[:, position] = chosen
        else:
            self._texts = torch.cat((self._texts, chosen[:, None]), dim=1)
        self._ended |= sampled & torch.isin(chosen, self._stop_tokens)
        return sampled


def sample(
    model: CausalLM,
    prompt: Sequence[int],
    *,
    options: SamplingOptions,
    stop_tokens: Set[int],
    num_tokens: int,
    use_cache: bool = True,
) -> list[list[int]]:
    """Return all tokens of each sample of one prompt."""
    sampler = Sampler(
        model,
        [prompt],
        options=options,
        stop_tokens=stop_tokens,
        num_tokens=num_tokens,
        use_cache=use_cache,
    )
    samples: list[list[int]] = [[] for _ in range(options.num_samples)]
    for tokens in sampler.tokens():
        add_tokens(samples, tokens)
    return samples


def add_tokens(samples: Sequence[list[int]], tokens: Sequence[int | None]) -> None:
    """Append the next token to each sample that has one."""
    for made, token in zip(samples, tokens, strict=True):
        if token is not None:
            made.append(token)


def penalise(logits: Tensor, previous: Tensor, *, penalty: float) -> Tensor:
    """Return (B, V) logits in which the tokens in `previous` (B, T) are less likely."""
    found = logits.gather(1, previous)
    return logits.scatter(1, previous, torch.where(found < 0, found * penalty, found / penalty))


def choose(
    logits: Tensor, *, options: SamplingOptions, generators: Sequence[torch.Generator]
) -> Tensor:
    """Sample one token for each row of (B, V) logits, with the row's generator.

    Raises CheckpointError if a logit is not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            "the model's logits are NaN or infinite: training diverged before these weights were "
            "saved, or the weights are damaged. Use another checkpoint."
        )
    if options.temperature == 0.0:
        return logits.argmax(dim=1)
    # The largest logit becomes 0, so that any temperature is large enough to divide by.
    shifted = logits.double() - logits.max(dim=1, keepdim=True).values
    scaled = shifted / options.temperature
    if options.top_k is not None and options.top_k < scaled.shape[1]:
        lowest = scaled.topk(options.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    chances = scaled.softmax(dim=1)
    if options.top_p < 1.0:
        chances = _nucleus(chances, top_p=options.top_p)
    draws = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(chances, generators, strict=True)
    ]
    return torch.cat(draws)


def _nucleus(chances: Tensor, *, top_p: float) -> Tensor:
    """Return (B, V) probabilities.

    The probabilities are 0 except for the likeliest tokens, which together have probability
    `top_p`.
    """
    ordered, places = chances.sort(dim=1, descending=True)
    # The token that reaches the sum is kept, so at least one token remains.
    is_after = ordered.cumsum(dim=1) - ordered >= top_p
    return chances.masked_fill(is_after.scatter(1, places, is_after), 0.0)


class Reader:
    """Feeds a growing text to the model: only new tokens, while the text fits into the context.

    When the text exceeds the context, the model continues with the last half of the context.
    """

    def __init__(self, model: CausalLM, *, use_cache: bool = True) -> None:
        model.eval()
        self._model = model
        self._use_cache = use_cache
        self._caches: Sequence[Any] = []
        self._start = 0
        """Offset in the text at which the model's context begins."""
        self._read = torch.zeros((0, 0), dtype=torch.int64)
        """The tokens that were read so far, from the start of the text."""

    def next_logits(self, texts: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after `texts` (B, T).

        Cached tokens are not read again.
        """
        context, length = self._model.spec.context(), texts.shape[1]
        first = not self._continues(texts)
        switch = self._model.spec.rope_switch()
        if first:
            self._start = 0
        if length - self._start > context:
            self._start = length - (context if first else max(1, context // 2))
            first = True
        cached = self._read.shape[1] - self._start
        switches = switch is not None and cached <= switch < length - self._start
        if first or switches or not self._use_cache:
            self._caches = self._model.new_caches()
            self._read = texts[:, : self._start]
        hidden = self._model.hidden(texts[:, self._read.shape[1] :], self._caches)
        self._read = texts.clone()
        return self._model.logits(hidden[:, -1])

    def _continues(self, texts: Tensor) -> bool:
        rows, length = self._read.shape
        if not self._caches or rows != texts.shape[0] or length >= texts.shape[1]:
            return False
        return torch.equal(texts[:, :length], self._read)
