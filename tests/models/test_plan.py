"""A plan prints every family's numbers from config.json alone, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.plan import CONFIGS, make_folder, plan_arguments
from payload.core.errors import ExitCode
from payload.formats.hub_names import HubName
from payload.weights.source import spec_on_hub
from tests.models.fake_model_hub import FIRST, NAME, model_hub, use_hub
from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

PARAMETERS = {
    "gpt2": 124_439_808,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.2-1B": 1_235_814_400,
    "SmolLM2-135M": 134_515_008,
    "SmolLM3-3B": 3_075_098_624,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Mistral-7B": 7_241_732_096,
    "Gemma-3-270M": 268_098_176,
}
"""Counts of the published models by transformers."""
OTHER = {"model_type": "stablelm", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
OTHER |= {"num_attention_heads": 2, "tie_word_embeddings": False}

_PROGRAM = """
import json, os, sys
from payload.orchestrate.__main__ import main
codes = [main(words, os.environ) for words in json.loads(sys.argv[1])]
heavy = {"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)
print(json.dumps({"codes": codes, "heavy": sorted(heavy)}))
"""


def planned(folders: list[Path], runs: Path) -> tuple[list[dict[str, object]], list[int], str]:
    """Plan each folder in one process: the plans, the exit codes, and what stderr has."""
    arguments = json.dumps([plan_arguments(folder, runs=runs) for folder in folders])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *texts, last = done.stdout.rstrip().rsplit("\n", 1)
    said = json.loads(last)
    assert said["heavy"] == [], "a plan needs none of these packages"
    return list(objects("".join(texts))), said["codes"], done.stderr


def objects(text: str) -> Iterator[dict[str, object]]:
    decoder = json.JSONDecoder()
    while text := text.strip():
        found, end = decoder.raw_decode(text)
        yield found["plan"]["arithmetic"]
        text = text[end:]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a family without native support, with four of its tensors."""
    folder = make_folder(tmp_path_factory.mktemp("other"), "model", OTHER)
    shapes = {
        "model.embed_tokens.weight": (64, 16),
        "model.layers.0.mlp.up_proj.weight": (32, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (64, 16),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_plan_counts_every_family_without_torch(tmp_path: Path, other: Path) -> None:
    folders = [make_folder(tmp_path, name, config) for name, config in CONFIGS.items()]
    plans, codes, said = planned([*folders, other], tmp_path / "runs")
    assert codes == [ExitCode.OK] * len(codes), said
    assert dict(zip(CONFIGS, (plan["params"] for plan in plans), strict=False)) == PARAMETERS
    assert plans[-1]["params"] == 2 * 64 * 16 + 32 * 16 + 16
    assert all(plan["memory_bytes_per_rank"] and plan["flops_per_step"] for plan in plans)
    # Such a folder can be planned with, but not started from.
    assert said.count("has no weights (model.safetensors") == len(CONFIGS)


def test_a_plan_says_that_it_does_not_know_another_family_without_its_weights(
    tmp_path: Path,
) -> None:
    plans, codes, said = planned([make_folder(tmp_path, "m", OTHER)], tmp_path / "runs")
    assert (plans, codes) == ([], [ExitCode.CONFIG])
    error = said.splitlines()[-1]
    assert error.startswith("error: ") and "does not determine the number of parameters" in error


def test_another_family_on_the_hub_is_counted_from_the_headers_of_its_weights(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_hub({FIRST: other}) as endpoint:
        use_hub(monkeypatch, endpoint=endpoint, cache=tmp_path / "cache")
        spec = spec_on_hub(HubName(NAME, FIRST), setting="model.init")
    assert spec.num_params() == 2 * 64 * 16 + 32 * 16 + 16
    assert not list(tmp_path.rglob("*.safetensors"))
