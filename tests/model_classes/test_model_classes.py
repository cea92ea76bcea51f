"""Each class of models equals transformers and PEFT; most of them run in `make test-seeds`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from tests.model_classes.cases import CASES
from tests.model_classes.comparison import compare, make_model, why_missing
from tests.model_classes.multimodal import WHOLE_CASES
from tests.model_classes.plans import plan_codes

NATIVE = {
    *("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3, text", "SmolLM3", "Phi3", "Qwen3Moe"),
    *("Olmo2", "Olmo3", "Granite", "GraniteMoeHybrid, dense"),
    *("Gemma3", "InternVL", "Llava", "Mistral3", "Qwen2Audio", "Qwen2VL", "Qwen2_5VL", "Qwen3VL"),
    *("Phi4Multimodal", "Gemma4, text", "Gemma4", "Qwen3_5, text", "Qwen3_5"),
    *("Idefics3", "LlavaNext", "LlavaOnevision", "SmolVLM", "Voxtral"),
}
SOME = (
    "Mixtral",
    "Gemma3n, text",
    "GraniteMoeHybrid",
    "Qwen3Next",
    "Qwen2VL",
    "DeepseekV4",
    "SmolVLM",
)
"""Classes in `make test`: the other tests of models cover the native ones."""
ALL = tuple(name for name in (*CASES, *WHOLE_CASES) if not why_missing(name))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.seeds) for name in ALL],
)
def test_a_class_equals_transformers_and_peft(name: str, tmp_path: Path) -> None:
    row = compare(name, tmp_path)
    assert row.problems() == []
    assert row.path == ("native" if name in NATIVE else "transformers")


@pytest.mark.processes
@pytest.mark.parametrize("names", [SOME, pytest.param(ALL, marks=pytest.mark.seeds)])
def test_every_class_has_a_plan_without_torch(names: tuple[str, ...], tmp_path: Path) -> None:
    folders = {name: tmp_path / str(number) for number, name in enumerate(names)}
    for name, folder in folders.items():
        make_model(name, folder)
    codes = plan_codes(folders, tmp_path / "runs")
    assert codes == dict.fromkeys(names, 0)


def test_the_installed_transformers_has_every_class() -> None:
    """The command only names a class that is missing. Here it is a failure."""
    types = {name: case.model_type for name, case in CASES.items()}
    types |= {name: case.model_type for name, case in WHOLE_CASES.items()}
    assert [name for name, kind in types.items() if kind not in CONFIG_MAPPING] == []
