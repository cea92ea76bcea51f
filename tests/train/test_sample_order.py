"""The order of a step's samples: every sample once, by the seed and the position alone."""

from __future__ import annotations

import numpy as np
import pytest

from payload.data.reading.blocks import BlockOrder, Indices
from payload.train.tasks.sample_order import equal_tokens, similar_lengths

SAMPLES, BATCH = 50, 12
LENGTHS = np.clip(np.random.default_rng(1).lognormal(2.6, 0.6, SAMPLES), 1, 64).astype(np.int64)


def epochs(*, seed: int, micro_batch_size: int, steps: int) -> Indices:
    """Return the samples of the first steps, in the order in which the steps train on them."""
    order = BlockOrder(num_blocks=SAMPLES, seed=seed)
    found = []
    for step in range(steps):
        chosen = order.blocks(np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.int64))
        found.append(equal_tokens(chosen, LENGTHS[chosen], micro_batch_size=micro_batch_size))
    return np.concatenate(found)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_each_step_has_its_samples_once_also_at_the_end_of_an_epoch(size: int) -> None:
    steps = SAMPLES
    found = epochs(seed=3, micro_batch_size=size, steps=steps)
    order = BlockOrder(num_blocks=SAMPLES, seed=3)
    wanted = order.blocks(np.arange(steps * BATCH, dtype=np.int64))
    for step in range(steps):
        some = slice(step * BATCH, (step + 1) * BATCH)
        assert sorted(found[some]) == sorted(wanted[some])
    assert np.bincount(found).tolist() == [steps * BATCH // SAMPLES] * SAMPLES


def test_the_order_depends_on_the_seed_and_the_position_alone() -> None:
    one = epochs(seed=3, micro_batch_size=4, steps=9)
    assert np.array_equal(one, epochs(seed=3, micro_batch_size=4, steps=9))
    assert not np.array_equal(one, epochs(seed=4, micro_batch_size=4, steps=9))
    assert not np.array_equal(one[:BATCH], one[5 * BATCH : 6 * BATCH])


def test_micro_batches_have_about_the_same_number_of_tokens() -> None:
    chosen = np.arange(48, dtype=np.int64)
    dealt = LENGTHS[equal_tokens(chosen, LENGTHS[:48], micro_batch_size=12)].reshape(4, 12).sum(1)
    alike = LENGTHS[similar_lengths(chosen, LENGTHS[:48])].reshape(4, 12).sum(1)
    assert dealt.max() <= 1.15 * dealt.min() and alike.max() > 2 * alike.min()
