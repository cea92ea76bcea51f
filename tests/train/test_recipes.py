"""Every packaged recipe for fine-tuning trains, shortened, on a small model of its architecture."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from payload.data.__main__ import main as data
from payload.errors import ExitCode
from payload.run_config import load_run_config
from tests.support.chat_data import conversations, make_model, prepare, write_rows
from tests.support.launching import REPO, losses, metrics, train

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
    """Make a data folder of texts with two labels."""
    rows = [
        {"text": each[0]["content"], "label": "long" if len(each[0]["content"]) > 16 else "short"}
        for each in conversations(80)
    ]
    source = write_rows(folder / "labelled.jsonl", rows)
    words = ["prepare", "--task", "classify", "--source", "jsonl", "--input", str(source)]
    words += ["--quiet", "--tokenizer", str(model), "--out", str(folder / "data")]
    assert data(words) == ExitCode.OK
    return folder / "data"


def chats(model: Path, folder: Path) -> Path:
    """Make a data folder of conversations."""
    rows = [{"messages": each} for each in conversations(200)]
    source = write_rows(folder / "chats.jsonl", rows)
    return prepare(model, source, folder / "data", "--sequence-length", LENGTH)


def pairs(model: Path, folder: Path) -> Path:
    """Make a data folder of answers, of which each one's rejected answer is longer."""
    rows = [
        {
            "prompt": each[0]["content"],
            "chosen": each[1]["content"],
            "rejected": f"no: {each[1]['content']}",
        }
        for each in conversations(80)
    ]
    source = write_rows(folder / "pairs.jsonl", rows)
    words = ["prepare", "--task", "preference", "--source", "jsonl", "--input", str(source)]
    words += ["--quiet", "--tokenizer", str(model), "--out", str(folder / "data")]
    assert data([*words, "--sequence-length", str(LENGTH)]) == ExitCode.OK
    return folder / "data"


MAKERS = {"chat": chats, "classify": labelled, "preference": pairs}


def test_every_recipe_for_fine_tuning_is_tried_here() -> None:
    tasks = {
        path.stem: tomllib.loads(path.read_text()).get("task", {}).get("kind")
        for path in CONFIGS.glob("*.toml")
    }
    assert {name for name, task in tasks.items() if task in MAKERS} == set(ARCHITECTURES)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_recipe_trains_a_small_model(tmp_path: Path, name: str) -> None:
    config = load_run_config(CONFIGS / f"{name}.toml")
    if config.model.quantize != "none":
        pytest.importorskip("bitsandbytes")
    model = make_model(tmp_path / "model", ARCHITECTURES[name])
    folder = MAKERS[config.task.kind](model, tmp_path)
    settings = [f"model.init={model}", f"data.dir={folder}", f"data.sequence_length={LENGTH}"]
    settings += ["train.steps=4", "train.eval_every=0", "schedule.warmup_steps=1"]
    ranks = 2 if name.startswith("llama70b") else 1
    run = tmp_path / "run"
    train(run, CONFIGS / f"{name}.toml", *settings, num_ranks=ranks)
    assert len(losses(run)) == 4
    assert "val_loss" in metrics(run)[-1]
    found = json.loads((run / "summary.json").read_text())
    assert found["status"] == "finished" and found["ranks_identical"]
    assert (found["dequantized_per_s"] is not None) == (config.model.quantize != "none")
    checkpoint = run / "checkpoints" / "step_00000004"
    weights = "adapter_model" if config.adapter.is_on() else "model"
    assert (checkpoint / f"{weights}.safetensors").exists()
    assert isinstance(load_run_config(run / "run.toml").batch.micro_batch_size, int)
