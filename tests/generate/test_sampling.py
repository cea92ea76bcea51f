"""Sampling is equal to transformers when greedy, equal with and without the cache, repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.architecture_cases import CASES, make_folder, random_tokens
from payload.core.errors import CheckpointError
from payload.data.tokenizers.gpt2 import END_OF_TEXT, VOCAB_SIZE
from payload.generate.sampling import (
    Reader,
    Sampler,
    SamplingOptions,
    add_tokens,
    choose,
    penalise,
    sample,
)
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import load
from tests.generate.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

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
    """Return samples of a small random model."""
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
        stop_tokens=frozenset({END_OF_TEXT}),
        num_tokens=VOCAB_SIZE,
        use_cache=use_cache,
    )


def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    save_hf(make_model(), tmp_path)
    # Any: transformers' annotations do not allow calling `generate` on this class.
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
    long: dict[str, Any] = {"sequence_length": 8, "max_new_tokens": 30}
    with_cache = draw(**long)
    assert [len(tokens) for tokens in with_cache] == [30, 30, 30]
    assert with_cache == draw(use_cache=False, **long)


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_keys_with_longropes_short_factors_are_computed_again_for_a_long_text(
    kind: str, tmp_path: Path
) -> None:
    case = CASES["phi3, partial longrope"]
    if kind == "phimoe":
        rope = {
            **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 10.0},
            **{"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]},
            **{"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 12},
        }
        case = {**CASES["phimoe"], "rope_parameters": rope}
    reference = make_folder(case, tmp_path)
    model, (text, _) = load(tmp_path), random_tokens(1031)
    assert model.spec.rope_switch() == 12
    reader = Reader(model)
    with torch.no_grad():
        for length in (8, 11, 12, 13, 14, 20):
            expected = reference(input_ids=text[:, :length]).logits[:, -1]
            found = reader.next_logits(text[:, :length])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


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
    with pytest.raises(CheckpointError, match=r"logits are NaN or infinite.* another checkpoint"):
        choose(logits, options=options, generators=generators)


def test_a_sample_ends_before_the_end_of_text() -> None:
    (whole,) = draw(num_samples=1)
    stop = whole[5]
    options = SamplingOptions(max_new_tokens=20, temperature=1.0, top_k=None, num_samples=1, seed=7)
    stops = frozenset({stop})
    (cut,) = sample(make_model(), PROMPT, options=options, stop_tokens=stops, num_tokens=VOCAB_SIZE)
    assert cut == whole[: whole.index(stop)]


def test_rows_of_the_embedding_beyond_the_vocabulary_are_never_drawn() -> None:
    options = SamplingOptions(max_new_tokens=30, temperature=50.0, top_k=None, num_samples=4)
    drawn = sample(
        make_model(), PROMPT, options=options, stop_tokens=frozenset({END_OF_TEXT}), num_tokens=100
    )
    assert max(token for tokens in drawn for token in tokens) < 100


def continued(
    prompts: list[list[int]], *, num_samples: int = 2, **changes: float
) -> list[list[int]]:
    """Return every row when several prompts are continued together."""
    fields: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_k": None, "seed": 7}
    options = SamplingOptions(**fields | {"num_samples": num_samples} | changes)
    sampler = Sampler(
        make_model(),
        prompts,
        options=options,
        stop_tokens=frozenset(),
        num_tokens=VOCAB_SIZE,
    )
    rows: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
    for tokens in sampler.tokens():
        add_tokens(rows, tokens)
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_different_lengths_get_together_what_they_get_alone(temperature: float) -> None:
    prompts = [PROMPT[:2], PROMPT, [11, 12, 13, 14, 15, 16, 17], PROMPT[:1]]
    alone = [row for prompt in prompts for row in continued([prompt], temperature=temperature)]
    assert continued(prompts, temperature=temperature) == alone
    assert all(len(row) == 12 for row in alone)


def test_a_row_that_was_ended_gets_no_more_tokens() -> None:
    options = SamplingOptions(max_new_tokens=8, num_samples=2)
    sampler = Sampler(
        make_model(), [PROMPT], options=options, stop_tokens=frozenset(), num_tokens=VOCAB_SIZE
    )
    rows: list[list[int]] = [[], []]
    for tokens in sampler.tokens():
        add_tokens(rows, tokens)
        if len(rows[1]) == 3:
            sampler.end(1)
    assert [len(row) for row in rows] == [8, 3]


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    seen = torch.tensor([[1, 2, 2, 7], [0, 49, 3, 3]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())
    assert torch.equal(penalise(logits, seen, penalty=1.3), expected)


def test_a_repetition_penalty_makes_a_greedy_text_repeat_itself_less() -> None:
    (plain,), (varied,) = (
        continued([PROMPT], num_samples=1, temperature=0.0, max_new_tokens=60, **changes)
        for changes in ({}, {"repetition_penalty": 5.0})
    )
    assert len(set(varied)) > len(set(plain))


def test_a_reader_continues_its_text_and_starts_over_for_another_one() -> None:
    model = make_model()
    reader = Reader(model)
    first, longer = torch.tensor([PROMPT]), torch.tensor([[*PROMPT, 5, 6, 7]])
    other = torch.tensor([[9, *PROMPT]])
    with torch.inference_mode():
        for text in (first, longer, other, first):
            found = reader.next_logits(text)
            assert torch.allclose(found, Reader(model).next_logits(text), atol=1e-5)
