"""A real chat model learns which function to call, and calls it with values it has never seen."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.tool_requests import requests
from benchmarks.tools import compare
from tests.support.smollm2 import smollm2_folder

CONVERSATIONS, REQUESTS = 60, 12


@pytest.mark.seeds
@pytest.mark.slow
@pytest.mark.processes
def test_sixty_conversations_teach_more_right_calls_than_the_base_model_makes(
    large_folder: Path,
) -> None:
    arguments = Namespace(
        model=smollm2_folder(), conversations=CONVERSATIONS, requests=REQUESTS, epochs=1.0
    )
    base, tuned, _ = compare(arguments, work=large_folder / "tools")
    assert base.requests == tuned.requests == REQUESTS
    assert tuned.right_function > base.right_function


def test_held_out_requests_share_no_value_with_those_of_training() -> None:
    train, held_out = requests(500, 100)
    assert len(train) == 500 and len(held_out) == 100
    seen = {value for each in train for value in each.arguments.values()}
    assert seen.isdisjoint(value for each in held_out for value in each.arguments.values())
    assert {each.function for each in held_out} == {each.function for each in train}
    assert len({each.function for each in train}) == 3
    assert all(str(value) in each.text for each in train for value in each.arguments.values())
