"""Sampling: equal to transformers when greedy, equal with and without the cache, repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from payload.data.tokenizer import END_OF_TEXT, VOCAB_SIZE
from payload.errors import CheckpointError
from payload.generate.sampling import SamplingOptions, choose, sample
from payload.train.weights import save_hf
from tests.generate.models import make_model

PROMPT = [464, 2068, 7586, 21831]


def draw(
    *,
    prompt: list[int] | None = None,
    use_cache: bool = True,
    sequence_length: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    num_samples: int = 3,
    seed: int = 7,
    max_new_tokens: int = 20,
) -> list[list[int]]:
    """Samples of a small random model."""
    options = SamplingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        num_samples=num_samples,
        seed=seed,
    )
    return sample(
        make_model(sequence_length=sequence_length),
        PROMPT if prompt is None else prompt,
        options=options,
        end_token=END_OF_TEXT,
        num_tokens=VOCAB_SIZE,
        use_cache=use_cache,
    )


def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    save_hf(make_model(), tmp_path)
    # Any: transformers' own annotations do not let `generate` be called on this class.
    reference: Any = GPT2LMHeadModel.from_pretrained(tmp_path)
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, pad_token_id=END_OF_TEXT
    )[0, len(PROMPT) :].tolist()

    (tokens,) = draw(temperature=0.0, num_samples=1, max_new_tokens=40)

    assert len(set(expected)) > 3, "a model that repeats itself shows nothing"
    assert tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_changes_nothing(temperature: float) -> None:
    assert draw(temperature=temperature) == draw(temperature=temperature, use_cache=False)


def test_the_cache_changes_nothing_where_the_text_outgrows_the_context() -> None:
    long = {"sequence_length": 8, "max_new_tokens": 30}
    with_cache = draw(**long)  # type: ignore[arg-type]
    assert [len(tokens) for tokens in with_cache] == [30, 30, 30]
    assert with_cache == draw(use_cache=False, **long)  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_context_is_read_from_its_end() -> None:
    head, tail = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18]
    short = draw(prompt=tail, sequence_length=8, max_new_tokens=1)
    assert draw(prompt=head + tail, sequence_length=8, max_new_tokens=1) == short


def test_a_context_of_one_token_still_generates() -> None:
    assert [len(tokens) for tokens in draw(sequence_length=1, max_new_tokens=5)] == [5, 5, 5]


def test_one_seed_gives_one_result_and_samples_differ() -> None:
    first = draw(seed=3)
    assert first == draw(seed=3)
    assert first != draw(seed=4)
    assert first[0] != first[1]


def test_sample_i_is_the_first_sample_of_seed_plus_i() -> None:
    assert draw(seed=3)[2] == draw(seed=5, num_samples=1)[0]


def test_top_k_of_one_is_greedy() -> None:
    assert draw(top_k=1) == draw(temperature=0.0)


def test_top_k_never_chooses_outside_of_the_likeliest() -> None:
    logits = torch.arange(10.0).repeat(200, 1)
    generators = [torch.Generator().manual_seed(i) for i in range(200)]
    options = SamplingOptions(temperature=5.0, top_k=3)
    chosen = choose(logits, options=options, generators=generators)
    assert set(chosen.tolist()) == {7, 8, 9}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert draw(temperature=1e-6) == draw(temperature=0.0)


def test_the_smallest_temperature_there_is_is_greedy() -> None:
    assert draw(temperature=5e-324) == draw(temperature=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_of_the_checkpoint(
    temperature: float, bad: float
) -> None:
    logits = torch.tensor([[0.0, 1.0], [bad, 1.0]])
    options = SamplingOptions(temperature=temperature, num_samples=2)
    generators = [torch.Generator() for _ in range(2)]
    with pytest.raises(CheckpointError, match=r"gives NaN or infinity .* another checkpoint"):
        choose(logits, options=options, generators=generators)


def test_a_sample_ends_before_the_end_of_text() -> None:
    (whole,) = draw(num_samples=1)
    stop = whole[5]
    options = SamplingOptions(max_new_tokens=20, temperature=1.0, top_k=None, num_samples=1, seed=7)
    (cut,) = sample(make_model(), PROMPT, options=options, end_token=stop, num_tokens=VOCAB_SIZE)
    assert cut == whole[: whole.index(stop)]


def test_rows_of_the_embedding_beyond_the_vocabulary_are_never_drawn() -> None:
    options = SamplingOptions(max_new_tokens=30, temperature=50.0, top_k=None, num_samples=4)
    drawn = sample(make_model(), PROMPT, options=options, end_token=END_OF_TEXT, num_tokens=100)
    assert max(token for tokens in drawn for token in tokens) < 100
