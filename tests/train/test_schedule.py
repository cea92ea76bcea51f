"""The learning rate at the steps where the schedule changes."""

from __future__ import annotations

import pytest

from payload.config.run_config import parse_run_config
from payload.train.optimizers.schedule import lr_at


def rates(kind: str, *overrides: str) -> list[float]:
    base = (
        "optimizer.lr=1.0",
        "optimizer.min_lr=0.1",
        "train.steps=100",
        "batch.micro_batch_size=1",
    )
    config = parse_run_config(
        "", overrides=(*base, f"schedule.kind={kind}", *overrides), where="test"
    )
    return [lr_at(step, config) for step in range(101)]


def test_warm_up_is_linear_and_never_zero() -> None:
    warm = rates("cosine", "schedule.warmup_steps=4")
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_falls_from_lr_to_min_lr_over_the_run() -> None:
    cosine = rates("cosine")
    assert (cosine[0], cosine[50], cosine[100]) == pytest.approx((1.0, 0.55, 0.1))
    assert sorted(cosine, reverse=True) == cosine


def test_cosine_stays_at_min_lr_after_decay_steps() -> None:
    cosine = rates("cosine", "schedule.decay_steps=40")
    assert cosine[40:] == pytest.approx([0.1] * 61)


def test_constant_stays() -> None:
    assert set(rates("constant")) == {1.0}


def test_wsd_stays_and_then_falls_linearly_over_its_decay_steps() -> None:
    wsd = rates("wsd", "schedule.decay_steps=10")
    assert wsd[:91] == [1.0] * 91
    assert (wsd[95], wsd[99], wsd[100]) == pytest.approx((0.55, 0.19, 0.1))


def test_wsd_decays_over_a_fifth_of_the_run_by_default() -> None:
    wsd = rates("wsd")
    assert wsd[80] == 1.0
    assert wsd[81] < 1.0
