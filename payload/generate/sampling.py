"""Draw tokens from a model, one after another, with a key-value cache."""

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
    """How the next token is chosen."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    """Logits are divided by it; 0 = always the likeliest token."""
    top_k: int | None = 200
    """Choose among this many likeliest tokens only; None = among all."""
    num_samples: int = 3
    seed: int = 1337
    """Sample i draws from a generator of its own, seeded with seed + i."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the text has already are divided by it where they are positive, else
    multiplied (CTRL, arXiv:1909.05858); 1 = no penalty."""


class Sampler:
    """Continues several prompts together; the samples of prompt i are rows i * num_samples onwards.

    Rows begin side by side: where one prompt is longer than another, its own tokens are read while
    the other's are drawn. So no row has padding, and each gets the tokens that it would get alone.
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
        """Prepare to draw tokens below `num_tokens`: an embedding may have rows without a meaning.

        A row ends before a token of `stop_tokens`. Without `use_cache` every step reads everything
        again, with the same result. `reader` goes on from the texts that it has read before.
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
        """Draw no more tokens for this row."""
        self._ended[row] = True

    @torch.inference_mode()
    def tokens(self) -> Iterator[list[int | None]]:
        """Yield each row's next token, again and again; None where a row has none this time.

        It has none after its end, and as long as the model still reads its prompt.
        """
        place = int(self._lengths.min())
        last = int(self._lengths.max()) + self._options.max_new_tokens
        while place < last:
            logits = self._reader.next_logits(self._texts[:, :place])[:, : self._num_tokens]
            drawn = self._place(self._choose(logits, place), place)
            place += 1
            if bool(self._ended.all()):
                return
            chosen = self._texts[:, place - 1].tolist()
            yield [
                token if is_drawn and not is_over else None
                for token, is_drawn, is_over in zip(
                    chosen, drawn.tolist(), self._ended.tolist(), strict=True
                )
            ]
            self._ended |= place - self._lengths >= self._options.max_new_tokens

    def _choose(self, logits: Tensor, place: int) -> Tensor:
        """Draw a token for each row; a row within its prompt must not use its generator."""
        options = self._options
        if options.repetition_penalty != 1.0:
            seen = self._texts[:, :place]
            logits = penalised(logits, seen, penalty=options.repetition_penalty)
        drawing = self._lengths <= place
        if bool(drawing.all()):
            return choose(logits, options=options, generators=self._generators)
        rows = drawing.nonzero().flatten().tolist()
        chosen = torch.zeros(len(logits), dtype=torch.int64)
        generators = [self._generators[row] for row in rows]
        chosen[rows] = choose(logits[rows], options=options, generators=generators)
        return chosen

    def _place(self, chosen: Tensor, place: int) -> Tensor:
        """Write the tokens that come at `place`; return which rows' were drawn."""
        drawn = self._lengths <= place
        if place < self._texts.shape[1]:
            chosen = torch.where(drawn, chosen, self._texts[:, place])
            self._texts[:, place] = chosen
        else:
            self._texts = torch.cat((self._texts, chosen[:, None]), dim=1)
        self._ended |= drawn & torch.isin(chosen, self._stop_tokens)
        return drawn


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
    """Append to each sample its token."""
    for made, token in zip(samples, tokens, strict=True):
        if token is not None:
            made.append(token)


def penalised(logits: Tensor, seen: Tensor, *, penalty: float) -> Tensor:
    """Return (B, V) logits with those of the tokens in (B, T) `seen` made less likely."""
    found = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(found < 0, found * penalty, found / penalty))


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


class Reader:
    """Feeds a growing text to the model: the new tokens only, as long as they fit the context.

    Where the text outgrows the context, the model reads on from the last half of it.
    """

    def __init__(self, model: CausalLM, *, use_cache: bool = True) -> None:
        model.eval()
        self._model = model
        self._use_cache = use_cache
        self._caches: Sequence[Any] = []
        self._start = 0
        """Where in the text the model's context begins."""
        self._read = torch.zeros((0, 0), dtype=torch.int64)
        """The part of the text that the caches hold, counted from the text's begin."""

    def next_logits(self, texts: Tensor) -> Tensor:
        """(B, V) for the token after (B, T) `texts`; what they share with the last is not read."""
        context, length = self._model.spec.context(), texts.shape[1]
        first = not self._continues(texts)
        if first:
            self._start = 0
        if length - self._start > context:
            self._start = length - (context if first else max(1, context // 2))
            first = True
        if first or not self._use_cache:
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
