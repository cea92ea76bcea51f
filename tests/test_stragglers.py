"""A slow rank is detected by its own work, with start and factor; noise is not reported."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from typing import Any

import pytest

from payload.run_record.metrics_log import TIMED_PARTS, rank_times
from payload.run_record.stragglers import (
    SlowRank,
    Straggler,
    StragglerNews,
    StragglerWatch,
    _others,
    by_rank,
    find_stragglers,
)


def row(step: int, forward: list[float], *, steps: int = 1) -> dict[str, Any]:
    times: dict[str, Any] = {part: [0.0] * len(forward) for part in TIMED_PARTS}
    # The others wait for the slowest, so all ranks take the same time.
    times |= {"forward": forward, "wait": [max(forward) - each for each in forward]}
    return {"step": step, "loss": 1.0, "ranks": {**times, "steps": steps}}


def test_a_rank_at_half_its_speed_is_named_within_seven_steps() -> None:
    watch = StragglerWatch()
    for step in range(1, 31):
        assert watch.add(row(step, [0.1, 0.11, 0.1])) == []
    named = [(step, watch.add(row(step, [0.1, 0.2, 0.1]))) for step in range(31, 51)]
    found = [(step, news) for step, news in named if news]
    assert len(found) == 1
    step, (straggler,) = found[0]
    assert step <= 37
    assert (straggler.rank, straggler.first_step, straggler.last_step) == (1, 31, None)
    assert straggler.words(node="b").startswith("rank 1 on b has been slow since step 31")


def test_a_rank_that_is_well_again_is_slow_no_more() -> None:
    rows = [row(step, [0.1, 0.2 if 10 < step <= 40 else 0.1]) for step in range(1, 80)]
    (found,) = find_stragglers(rows)
    assert found.rank == 1 and found.first_step == 11
    assert found.last_step is not None and 40 < found.last_step <= 48


def test_the_closing_note_tells_the_whole_episode_and_never_less_than_slow() -> None:
    """Steps of different lengths, and a slowness that fades: the last rows alone would give 1.1."""
    rows = []
    for step in range(1, 100):
        others = 0.4 if step % 3 == 0 else 0.1
        slow = 2.0 if 10 < step <= 40 else 1.2 if step <= 60 else 1.0
        rows.append(row(step, [others, others * (slow if step > 10 else 1.0)]))
    (found,) = find_stragglers(rows)
    assert found.last_step is not None and found.last_step > 60
    assert found.work_s / found.others_s == pytest.approx(2.0)
    assert "2.0 times as long" in found.words()


def test_single_slow_steps_and_the_first_ones_name_nobody() -> None:
    rows = [row(step, [0.1, 0.5 if step % 4 == 0 or step < 3 else 0.1]) for step in range(1, 100)]
    assert find_stragglers(rows) == ()


def test_differences_below_three_milliseconds_are_noise() -> None:
    rows = [row(step, [0.001, 0.002]) for step in range(1, 30)]
    assert find_stragglers(rows) == ()


def test_one_of_many_ranks_is_named_where_rows_have_means_of_several_steps() -> None:
    rows = [
        row(8 * number, [0.1] * 63 + [0.2 if number > 4 else 0.1], steps=8)
        for number in range(1, 10)
    ]
    (found,) = find_stragglers(rows)
    assert found.rank == 63 and found.last_step is None
    assert found.first_step == 33


def test_the_others_median_is_that_of_all_but_one() -> None:
    generator = random.Random(1)
    for _ in range(500):
        work = [generator.choice([1.0, 2.0, generator.random()]) for _ in range(2 + _ % 8)]
        expected = [statistics.median(work[:at] + work[at + 1 :]) for at in range(len(work))]
        assert _others(work) == pytest.approx(expected)


def test_a_rank_that_is_slow_again_is_slow_since_the_last_time() -> None:
    before = Straggler(rank=1, first_step=5, last_step=9, work_s=0.4, others_s=0.2)
    now = Straggler(rank=1, first_step=80, work_s=0.3, others_s=0.2)
    when = "rank 1 has been slow since step 80 (2 times since step 5): at worst its own work takes"
    assert SlowRank(before, now).words().startswith(f"{when} 0.4 s")


def test_a_rank_that_is_slow_once_is_told_when_it_begins_and_when_it_ends() -> None:
    news = StragglerNews()
    rows = [row(step, [0.1, 0.2 if 10 < step <= 40 else 0.1]) for step in range(1, 400)]
    told = [each.words() for each_row in rows for each in news.add(each_row)]
    assert len(told) == 2
    assert told[0].startswith("rank 1 has been slow since step 11: its own work takes 0.2 s")
    assert told[1].startswith("rank 1 was slow from step 11 to 4")


def test_a_rank_that_stays_slow_is_told_again_after_steps_that_double() -> None:
    news = StragglerNews()
    told = [step for step in range(1, 2000) if news.add(row(step, [0.1, 0.2]))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert gaps == [100, 200, 400, 800]


def test_a_busy_machine_s_turns_of_slowness_are_counted_and_no_line_calls_a_slow_rank_well() -> (
    None
):
    generator = random.Random(1)
    news, watch, told = StragglerNews(), StragglerWatch(), list[tuple[int, bool, str]]()
    last_says_slow, turns, slow_rank = {0: False, 1: False}, 0, 0
    for step in range(1, 20_001):
        if generator.random() < 0.05:
            slow_rank = generator.choice([0, 1, 2])
        times = row(step, [0.2 if rank == slow_rank else 0.1 for rank in (0, 1)])
        turns += sum(each.last_step is None for each in watch.add(times))
        for each in news.add(times):
            told.append((step, each.is_slow, each.words()))
            last_says_slow[each.rank] = each.is_slow
        assert all(last_says_slow[each.rank] for each in watch.slow())
    assert turns > 300
    assert len(told) < 50
    assert any(
        re.search(r"was slow from step \d+ to \d+ \(\d+ times\): at worst", words)
        for *_, words in told
    )


def test_the_end_of_a_run_tells_each_slow_rank_once_and_counts() -> None:
    found = by_rank(
        Straggler(rank=rank, first_step=first, last_step=last, work_s=work_s, others_s=0.2)
        for rank, first, last, work_s in [(1, 5, 9, 0.4), (0, 12, 20, 0.3), (1, 30, 42, 0.3)]
    )
    assert [each.words() for each in found] == [
        "rank 0 was slow from step 12 to 20: its own work took 0.3 s a step, 1.5 times as long as "
        "the work of the other ranks (0.2 s), which waited for this rank",
        "rank 1 was slow from step 5 to 42 (2 times): at worst its own work took 0.4 s a step, 2.0 "
        "times as long as the work of the other ranks (0.2 s), which waited for this rank",
    ]


def every_part(values: list[object]) -> dict[str, object]:
    return {part: values for part in TIMED_PARTS}


@pytest.mark.parametrize(
    "ranks",
    [
        *(None, [], {}, {"steps": 1}, {"steps": 0, **every_part([1.0])}),
        *({"steps": 1, **every_part([wrong])} for wrong in ("x", -1, 1e99, True)),
        {"steps": 1, **every_part([1.0]), "wait": [1.0, 2.0]},
    ],
)
def test_damaged_times_are_none(ranks: object) -> None:
    assert rank_times({"step": 9, "loss": 1.0, "ranks": ranks}) is None


def test_a_straggler_s_words_say_how_much() -> None:
    straggler = Straggler(rank=2, first_step=5, last_step=9, work_s=0.4, others_s=0.2)
    assert straggler.words() == (
        "rank 2 was slow from step 5 to 9: its own work took 0.4 s a step, 2.0 times as long as "
        "the work of the other ranks (0.2 s), which waited for this rank"
    )
