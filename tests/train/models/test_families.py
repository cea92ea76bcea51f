"""Every architecture of the table computes the same as in transformers, and is counted right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.architecture_cases import CASES, compare
from benchmarks.architectures import problems

OUR_OWN = {
    *("gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3", "phi3", "qwen3_moe"),
    *("olmo2", "olmo3", "granite", "granitemoehybrid", "gemma4_text", "qwen3_5_text"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_equals_transformers_and_is_counted_as_torch_counts(
    name: str, tmp_path: Path
) -> None:
    row = compare(name, tmp_path)
    assert problems(row) == []
    is_ours = CASES[name]["model_type"] in OUR_OWN and "dynamic" not in name
    assert row.path == ("native" if is_ours else "transformers")


def test_the_table_has_at_least_fourteen_architectures_and_each_family_of_ours() -> None:
    types = {case["model_type"] for case in CASES.values()}
    assert len(types) >= 14
    assert types >= OUR_OWN
