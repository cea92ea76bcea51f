"""The order in which a pipeline stage runs its micro-batches."""

from __future__ import annotations

from payload.train.strategies.pipeline import schedule_order


def test_1f1b_keeps_as_many_passes_as_stages_follow() -> None:
    first = [
        f"{kind[0]}{number}" for kind, number in schedule_order("1f1b", stage=0, stages=3, passes=5)
    ]
    assert first == ["f0", "f1", "f2", "b0", "f3", "b1", "f4", "b2", "b3", "b4"]
    last = [
        f"{kind[0]}{number}" for kind, number in schedule_order("1f1b", stage=2, stages=3, passes=3)
    ]
    assert last == ["f0", "b0", "f1", "b1", "f2", "b2"]
    gpipe = [
        f"{kind[0]}{number}"
        for kind, number in schedule_order("gpipe", stage=0, stages=2, passes=2)
    ]
    assert gpipe == ["f0", "f1", "b0", "b1"]
