"""Random models of a GPU visit: the tensors of the real models, which the trainer loads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import write_model
from benchmarks.gpu.models import small_mixture, tensor_shapes, write_config, write_small
from benchmarks.gpu.speed_cases import SPEED_CASES
from benchmarks.model_configs import LLAMA_3_1_8B, QWEN3_0_6B, SMOLLM2_135M
from payload.train.models.loading import load


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(SMOLLM2_135M, 134_515_008), (QWEN3_0_6B, 596_049_920), (LLAMA_3_1_8B, 8_030_261_248)],
)
def test_a_shape_has_the_parameters_of_the_published_model(
    config: Mapping[str, Any], parameters: int
) -> None:
    assert sum(map(math.prod, tensor_shapes(config).values())) == parameters


@pytest.mark.parametrize("case", SPEED_CASES, ids=lambda case: case.name)
def test_a_rehearsed_case_loads_from_several_files(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = case.rehearsed().config
    folder = write_config(tmp_path / "model", config)
    monkeypatch.setattr(write_model, "_FILE_BYTES", 40_000)
    write_model.main(folder, "cpu")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    model = load(folder)
    expected = sum(map(math.prod, tensor_shapes(config).values()))
    assert sum(each.numel() for each in model.parameters()) == expected


def test_a_small_mixture_loads_and_has_a_finite_loss(tmp_path: Path) -> None:
    model = load(write_small(tmp_path / "model", small_mixture(512)))
    tokens = torch.arange(17).unsqueeze(0)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert math.isfinite(float(loss.detach()))
