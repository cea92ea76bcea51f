"""Every chat template of trl, llama.cpp and vllm trains what a server would have to produce."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chat_templates.conversations import ROWS
from tests.chat_templates.sources import all_templates, trl_templates
from tests.chat_templates.table import BOTH_REFUSE, RIGHT, WRONG, outcomes

pytestmark = pytest.mark.processes

_FEW = ("trl/gptoss", "trl/qwen3_5_think", "trl/glm4moe")
"""Templates of three kinds: harmony, a prompt that opens the thoughts, a stop token that only the
next message writes."""
_LEAST_RIGHT = {"one turn": 147, "three turns": 141, "tools": 114, "thoughts": 50}
"""The number of templates that train each row."""


@pytest.mark.slow
@pytest.mark.parametrize("name", _FEW)
def test_a_few_templates_train_what_a_server_would_have_to_produce(name: str) -> None:
    found = outcomes(trl_templates()[name])
    assert {row: (each.kind, each.detail) for row, each in found.items()} == {
        row: (RIGHT, "") for row in ROWS
    }


@pytest.mark.seeds
@pytest.mark.timeout(3600)
def test_every_template_trains_what_a_server_would_have_to_produce() -> None:
    """Also the command `python -m tests.chat_templates`, which prints the table."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for name, text in all_templates().items():
        for row, outcome in outcomes(text).items():
            counts[row, outcome.kind] += 1
            if outcome.kind == WRONG:
                wrong.append(f"{name}, {row}: {outcome.detail}")
    assert not wrong, "\n".join(wrong)
    # Most templates take a conversation of plain turns; a table of refusals would prove nothing.
    assert all(counts[row, RIGHT] >= least for row, least in _LEAST_RIGHT.items())
    assert all(counts[row, BOTH_REFUSE] < 25 for row in ROWS)
