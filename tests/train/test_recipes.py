"""Every packaged fine-tuning recipe trains, shortened, on a small model of its architecture."""

from __future__ import annotations

import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from tests.support.chat_data import conversations, make_model, prepare, write_rows
from tests.support.launching import REPO, losses, metrics, train_several

CONFIGS = REPO / "payload/configs"
LENGTH = 64
ARCHITECTURES = {
    "smollm2_chat_lora": "llama",
    "smollm2_dpo_lora": "llama",
    "smollm2_chat_full": "llama",
    "classify": "llama",
    "classify_lora": "llama",
    "qwen3_lora_nf4": "qwen3",
    "llama70b_lora_nf4_zero3": "llama, llama3 rope",
}
"""Case of `benchmarks.architecture_cases` for each recipe."""


def labelled(model: Path, folder: Path) -> Path:
    """Write a data folder of texts with two labels."""
    rows = [
        {"text": each[0]["content"], "label": "long" if len(each[0]["content"]) > 16 else "short"}
        for each in conversations(80)
    ]
    source = write_rows(folder / "labelled.jsonl", rows)
    return prepare(model, source, folder / "data", task="classify")


def chats(model: Path, folder: Path) -> Path:
    """Write a data folder of conversations."""
    rows = [{"messages": each} for each in conversations(200)]
    source = write_rows(folder / "chats.jsonl", rows)
    return prepare(model, source, folder / "data", "--sequence-length", LENGTH)


def pairs(model: Path, folder: Path) -> Path:
    """Write a data folder of pairs, in each of which the rejected answer is longer."""
    rows = [
        {
            "prompt": each[0]["content"],
            "chosen": each[1]["content"],
            "rejected": f"no: {each[1]['content']}",
        }
        for each in conversations(80)
    ]
    source = write_rows(folder / "pairs.jsonl", rows)
    flags = ("--sequence-length", LENGTH)
    return prepare(model, source, folder / "data", *flags, task="preference")


MAKERS = {"chat": chats, "classify": labelled, "preference": pairs}


def test_every_recipe_for_fine_tuning_is_tried_here() -> None:
    tasks = {
        path.stem: tomllib.loads(path.read_text()).get("task", {}).get("kind")
        for path in CONFIGS.glob("*.toml")
    }
    # tests/first_run runs the config of `make run`.
    recipes = {name for name, task in tasks.items() if task in MAKERS} - {"first_run"}
    assert recipes == set(ARCHITECTURES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of each recipe, such as `NAME/run`."""
    root = tmp_path_factory.mktemp("recipes")
    runs: dict[int, dict[Path, list[str]]] = {1: {}, 2: {}}
    configs = {}
    for name, architecture in ARCHITECTURES.items():
        config = load_run_config(CONFIGS / f"{name}.toml")
        if config.model.quantize != "none" and find_spec("bitsandbytes") is None:
            continue
        model = make_model(root / name / "model", architecture)
        folder = MAKERS[config.task.kind](model, root / name)
        settings = [f"model.init={model}", f"data.dir={folder}", f"data.sequence_length={LENGTH}"]
        settings += ["train.steps=4", "train.eval_every=0", "schedule.warmup_steps=1"]
        run = root / name / "run"
        runs[2 if name.startswith("llama70b") else 1][run] = settings
        configs[run] = CONFIGS / f"{name}.toml"
    for ranks, of_ranks in runs.items():
        if of_ranks:
            train_several(of_ranks, configs, num_ranks=ranks)
    return root


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_recipe_trains_a_small_model(trained: Path, name: str) -> None:
    config = load_run_config(CONFIGS / f"{name}.toml")
    run = trained / name / "run"
    assert len(losses(run)) == 4
    assert "val_loss" in metrics(run)[-1]
    found = json.loads((run / "summary.json").read_text())
    assert found["status"] == "finished" and found["ranks_identical"]
    assert (found["dequantized_per_s"] is not None) == (config.model.quantize != "none")
    checkpoint = run / "checkpoints" / "step_00000004"
    weights = "adapter_model" if config.adapter.is_on() else "model"
    assert (checkpoint / f"{weights}.safetensors").exists()
    assert isinstance(load_run_config(run / "run.toml").batch.micro_batch_size, int)
