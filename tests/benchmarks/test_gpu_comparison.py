"""A model beside a peer on a GPU: the goals, and the page's section."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu.comparison import Comparison, Speed
from benchmarks.gpu.speed_cases import SPEED_CASES
from payload.run_record.profile_table import Operator

_GIB = 2**30
_KERNELS = tuple(
    Operator(name=f"kernel_{number}", calls=3, self_s=0.01, total_s=0.01) for number in range(7)
)


def speed(program: str, *, tokens_per_s: float, mfu: float | None, gib: float) -> Speed:
    return Speed(
        program=program,
        tokens_per_s=tokens_per_s,
        step_s=0.1,
        mfu=mfu,
        allocated_bytes=int(gib * _GIB),
        reserved_bytes=int(2 * gib * _GIB),
        kernels=_KERNELS if program == "Tileforge" else (),
    )


OURS = speed("Tileforge", tokens_per_s=1310.0, mfu=0.42, gib=30.0)
PEER = speed("TRL", tokens_per_s=1000.0, mfu=0.31, gib=30.0)
GOOD = Comparison(
    case=SPEED_CASES[0], peak_flops_per_s=7.88e14, ours=[OURS], peer=PEER, notes=["No compile."]
)


@pytest.mark.parametrize(
    ("ours", "reached"),
    [
        (OURS, True),
        (replace(OURS, tokens_per_s=1290.0), False),
        (replace(OURS, mfu=0.39), False),
        (replace(OURS, mfu=None), False),
        (replace(OURS, allocated_bytes=31 * _GIB), False),
    ],
)
def test_a_case_reaches_its_goals_by_speed_mfu_and_memory(ours: Speed, reached: bool) -> None:
    assert replace(GOOD, ours=[ours]).reaches_goals() is reached


def test_the_faster_of_our_runs_counts_and_both_are_shown() -> None:
    slow = replace(OURS, tokens_per_s=900.0, mfu=0.2)
    compiled = replace(OURS, program="Tileforge, engine.compile")
    both = replace(GOOD, ours=[slow, compiled])
    assert both.reaches_goals()
    assert both.summary().startswith("Tileforge, engine.compile: 1.31 times the tokens/s of TRL")
    section = both.section(rehearsal=False)
    assert "| Tileforge | 900 |" in section and "| Tileforge, engine.compile | 1,310 |" in section


def test_below_the_goals_the_page_has_the_five_longest_kernels() -> None:
    assert "kernel_0" not in GOOD.section(rehearsal=False)
    below = replace(GOOD, ours=[replace(OURS, tokens_per_s=1000.0)])
    shown = below.section(rehearsal=False)
    assert "| `kernel_0` | 3 | 10.00 | 10% |" in shown
    assert "kernel_4" in shown and "kernel_5" not in shown


def test_without_a_peer_our_numbers_stay_on_the_page() -> None:
    alone = replace(GOOD, peer=None, notes=["TRL failed: out of memory."])
    assert not alone.reaches_goals()
    assert alone.summary() == "no peer ran; Tileforge: 1,310 tokens/s"
    assert "- TRL failed: out of memory." in alone.section(rehearsal=False)
