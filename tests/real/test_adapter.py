"""SmolLM2's adapter trains like PEFT's on transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from payload.config.training_sections import AdapterSection, EngineSection, OptimizerSection
from payload.train.models.loading import load
from payload.train.models.lora import add_adapter, save_adapter
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.torch_engines import apply_engine
from tests.support.slow_imports import peft
from tests.support.smollm2 import smollm2_folder
from tests.train.alone import ALONE

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

STEPS, RANK, LR = 20, 16, 2e-4
SETTINGS = OptimizerSection(lr=LR, min_lr=LR)


def batches() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(49_152, (2, 17), generator=drawn) for _ in range(STEPS)]


@pytest.mark.seeds
def test_twenty_losses_in_fp32_are_pefts(tmp_path: Path) -> None:
    model = load(smollm2_folder())
    add_adapter(model, AdapterSection(kind="lora", rank=RANK), seed=1)
    save_adapter(model, tmp_path, base=(str(smollm2_folder()), None))
    optimizers = build_optimizers(model, SETTINGS)
    apply_engine(model, optimizers, settings=EngineSection(), world=ALONE)
    optimizers.set_lr(LR)
    ours = []
    for text in batches():
        loss = model.train()(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizers.clip(1.0)
        optimizers.step()
        ours.append(loss.item())
    assert ours == pytest.approx(pefts_losses(tmp_path), rel=1e-5)


def pefts_losses(adapter: Path) -> list[float]:
    anything: Any = AutoModelForCausalLM
    base = anything.from_pretrained(smollm2_folder(), dtype=torch.float32)
    model = peft().PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=LR,
        betas=(SETTINGS.beta1, SETTINGS.beta2),
        weight_decay=SETTINGS.weight_decay,
        fused=True,
    )
    losses = []
    for text in batches():
        targets = text[:, 1:].contiguous()
        loss = model(input_ids=text[:, :-1], labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
