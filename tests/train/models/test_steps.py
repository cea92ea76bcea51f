"""Twenty steps of a run equal transformers' model under torch's AdamW; a resume is exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import CASES, make_folder
from payload.data.reading.blocks import BlockOrder, TokenData
from payload.run_record.run_files import RunPaths
from tests.support.data_folders import make_data_folder
from tests.support.launching import losses, train_several
from tests.support.sampled import sampled
from tests.train.alone import train_alone

STEPS, BATCH, LENGTH, SEED = 20, 4, 32, 3
LR, DECAY, BETAS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1.0
CONFIG = f"""
[run]
seed = {SEED}
[data]
dir = "{{data}}"
sequence_length = {LENGTH}
[model]
init = "{{init}}"
dropout = 0.0
[batch]
global_batch_size = {BATCH}
micro_batch_size = 1
[optimizer]
lr = {LR}
min_lr = {LR}
weight_decay = {DECAY}
beta1 = {BETAS[0]}
beta2 = {BETAS[1]}
grad_clip = {CLIP}
[schedule]
warmup_steps = 0
decay_steps = {STEPS}
[train]
steps = {STEPS}
eval_every = 0
eval_tokens = 64
checkpoint_every = 10
[precision]
dtype = "fp32"
"""

GEMMA4 = "gemma4_text, small"
SLOWER = ("qwen3", "gemma3_text", "olmo3", "granite")
FAMILIES = ("gpt2", "llama", *SLOWER, GEMMA4, "qwen2_moe", "qwen3_5_text")
SHORT = "train.steps=5"
Prepared = Callable[[str], Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(
        tmp_path_factory.mktemp("data"),
        num_train_tokens=4000,
        num_val_tokens=200,
        vocab_size=CASES["llama"]["vocab_size"],
    )


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Prepared:
    """Return `config_of(case)`: a run that starts from the case's weights."""

    @functools.cache
    def prepare(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        make_folder(CASES[name], folder / "init")
        if name == GEMMA4:
            soften_attention(folder / "init" / "model.safetensors")
        config = folder / "config.toml"
        config.write_text(CONFIG.format(data=data, init=folder / "init"), encoding="utf-8")
        return config

    return prepare


def soften_attention(file: Path) -> None:
    """Scale the norms of queries in a weights file to the size that they have in trained models.

    With random norms, rounding decides which token gets all attention, and losses diverge.
    """
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("q_norm.weight"):
            tensors[name] *= 0.2
    save_file(tensors, file, metadata={"format": "pt"})


def transformers_losses(folder: Path, data: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train transformers' model with torch's AdamW on the run's batches; return losses, weights."""
    # Not train(): GPT-2's config.json has dropout.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
    )
    blocks = TokenData.open(data, sequence_length=LENGTH).train
    order = BlockOrder(num_blocks=blocks.num_full_blocks(), seed=SEED)
    found = []
    for step in range(STEPS):
        samples = np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.int64)
        tokens, targets = blocks.gather(order.blocks(samples))
        logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, dict(model.state_dict())


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)],
)
def test_twenty_steps_are_those_of_transformers_with_torchs_adamw(
    name: str, tmp_path: Path, config_of: Prepared, data: Path
) -> None:
    config = config_of(name)
    train_alone(tmp_path / "run", config)
    wanted, weights = transformers_losses(config.parent / "init", data)
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0] - 0.1
    ours = load_file(RunPaths(tmp_path / "run").checkpoint(STEPS) / "model.safetensors")
    for key, value in ours.items():
        # Keys' biases do not affect the loss: AdamW amplifies the rounding errors of the gradient.
        same = [0, 2] if key.endswith("c_attn.bias") else slice(None)
        parts = 3 if key.endswith("c_attn.bias") else 1
        found, there = value.view(parts, -1)[same], weights[key].view(parts, -1)[same]
        assert (found - there).norm() < 1e-4 * there.norm(), key


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen2_moe"])
def test_six_steps_three_of_them_after_a_resume_are_bitwise_those_in_one_go(
    name: str, tmp_path: Path, config_of: Prepared
) -> None:
    config = config_of(name)
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    train_alone(whole.root, config, "train.steps=6")
    train_alone(parts.root, config, "train.steps=3")
    train_alone(parts.root, config, "train.steps=6")
    assert losses(parts.root) == losses(whole.root)
    for file in ("model.safetensors", "optimizer.safetensors"):
        left = (whole.checkpoint(6) / file).read_bytes()
        assert left == (parts.checkpoint(6) / file).read_bytes()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory, config_of: Prepared) -> Path:
    """Return a folder with each family's run on two ranks and on four, such as `llama-2`."""
    root = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 4):
        runs = {
            root / run_name(name, ranks): (SHORT, f"model.init={config_of(name).parent / 'init'}")
            for name in FAMILIES
        }
        train_several(runs, config_of(FAMILIES[0]), num_ranks=ranks)
    return root


def run_name(case: str, ranks: int) -> str:
    return f"{case.replace(', ', '-')}-{ranks}"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", sampled(FAMILIES, sample=("llama", GEMMA4, "qwen3_5_text")))
def test_losses_do_not_depend_on_how_many_ranks_train_a_family(
    name: str, tmp_path: Path, config_of: Prepared, on_ranks: Path
) -> None:
    train_alone(tmp_path / "1", config_of(name), SHORT)
    for ranks in (2, 4):
        found = losses(on_ranks / run_name(name, ranks))
        assert found == pytest.approx(losses(tmp_path / "1"), rel=1e-5) and len(found) == 5
