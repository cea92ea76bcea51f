"""The texts of `finetune` and of a run's end are true for short runs and small disks."""

from __future__ import annotations

import math

import pytest

from payload.estimates.disk_room import disk_words
from payload.finetune.setting_rules import schedule
from payload.run_record.metrics_log import is_better_than_untrained, untrained_is_best


@pytest.mark.parametrize("num_steps", [2, 8, 12, 60, 1000])
def test_the_reasons_of_the_schedule_are_those_of_its_values(num_steps: int) -> None:
    found = {each.key: each for each in schedule("chat", num_steps, method="lora", lr=1e-4)}
    warmup, log, evaluate = (
        found[key] for key in ("schedule.warmup_steps", "train.log_every", "train.eval_every")
    )
    assert warmup.reason == f"{100 * warmup.value / num_steps:.0f} % of the steps"
    assert log.reason == f"about {math.ceil(num_steps / log.value)} lines"
    assert evaluate.reason.endswith(f": {math.ceil(num_steps / evaluate.value)}")


def test_the_estimate_of_the_disk_warns_if_the_checkpoints_do_not_fit() -> None:
    sizes = {"checkpoints": 4, "checkpoint_bytes": 10**9, "state_bytes": 0}
    assert "lower train.keep_checkpoints" in disk_words(**sizes, free_bytes=4 * 10**9 - 1)
    assert "refuse" not in disk_words(**sizes, free_bytes=4 * 10**9)


def test_a_run_that_made_the_model_worse_is_noted() -> None:
    note = untrained_is_best({0: 1.62, 8: 1.9, 16: 1.8653})
    assert note is not None and "the untrained model (1.6200 at step 0). Lower" in note
    assert untrained_is_best({0: 1.62, 8: 1.6}) is None
    assert is_better_than_untrained({0: 1.62, 8: 1.9}) is False
    assert is_better_than_untrained({0: 1.62, 8: 1.6}) is True
    assert is_better_than_untrained({8: 1.6}) is None
    assert untrained_is_best({8: 1.6}) is None and untrained_is_best({0: 1.62}) is None
