"""The comparison with tiktoken: what a round is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prepare import prepare_in_a_process
from payload.formats.data_folder import load_meta

pytestmark = pytest.mark.processes


def test_a_round_is_the_command_in_a_process_that_has_loaded_nothing_before(tmp_path: Path) -> None:
    report = prepare_in_a_process(tmp_path / "out")
    assert not report["was_ready"]
    # Loading the tokenizers is within the one and not within the other.
    assert report["wall_s"] > report["worked_s"] > 0
    assert load_meta(tmp_path / "out").train_tokens == report["train_tokens"] > 10_000_000
