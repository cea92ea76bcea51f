"""The tutorials that train a model on this machine reach their goal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorials.conftest import RunPage
from tests.tutorials.pages import TUTORIALS, missing_lines, read_page
from tests.tutorials.substitutions import TABLE

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("chat_model", ["mine/model.safetensors", "mine.gguf", "runs/latest/report.html"]),
        ("classifier", ["runs/latest/checkpoints/best/model.safetensors"]),
        ("pretraining", ["runs/latest/checkpoints/step_00000006/model.safetensors"]),
    ],
)
def test_a_tutorial_reaches_its_goal_with_its_own_commands(
    name: str, made: list[str], run_page: RunPage, clone: Path
) -> None:
    path = TUTORIALS / f"{name}.md"
    printed = run_page(path)
    assert [each for each in made if not (clone / each).exists()] == []
    assert missing_lines(read_page(path), TABLE[path.name], printed) == [], printed
