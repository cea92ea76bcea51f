"""The estimate that the trainer logs before training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from payload.config.run_config import parse_run_config
from payload.models.gpt2.spec import PRESETS
from payload.train.estimate_text import predict
from payload.train.gemm_and_network_benchmark import Calibration
from payload.train.ranks.world import World
from payload.train.tasks.registry import open_task


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def lines_with(
    ranks: int, tiny_data: Path, *overrides: str, dequantized_per_s: float | None = None
) -> dict[str, str]:
    config = parse_run_config(
        f"[data]\ndir = '{tiny_data}'\nsequence_length = 32\n[train]\nsteps = 60",
        overrides=overrides,
        where="test",
    )
    world = World(rank=0, world_size=ranks, local_rank=0, local_world_size=1, node="here")
    found = predict(
        config,
        spec=PRESETS["gpt2"],
        task=open_task(config),
        world=world,
        calibration=Calibration(
            dtype="bf16",
            reason="as configured",
            peak_flops_per_s=1e11 * ranks,
            all_reduce_bytes_per_s=1e9 if ranks > 1 else None,
            dequantized_per_s=dequantized_per_s,
        ),
    )
    lines = {line.partition(" ")[0]: line for line in found.lines}
    # summary.json keeps the number of the line.
    assert lines["predicted"].startswith(f"predicted {found.step_s:.2f} s a step, ")
    return lines


def test_a_step_is_predicted_with_what_the_backward_pass_does_not_hide(tiny_data: Path) -> None:
    lines = lines_with(2, tiny_data)
    # 498 MB of gradients; the last bucket's 22 MB cannot overlap.
    assert lines["sync"] == (
        "sync      0.50 s a step: 498 MB of gradients at 1.00 GB/s; 0.48 s of this overlap the "
        "backward pass"
    )
    # 0.8749 TFLOP at 1 / (1 + 0.05) of 0.2 TFLOP/s (core_speed), 0.022 s, and the update's 0.149 s
    # on two threads.
    assert lines["predicted"] == (
        "predicted 4.77 s a step, of which 4.59 s are compute at 95% of the peak: about 4 min 46 s "
        "training, 5 min 4 s in all (start 12 s, evaluations 3 s, checkpointing 3 s)"
    )


def test_one_rank_has_nothing_to_exchange(tiny_data: Path) -> None:
    lines = lines_with(1, tiny_data)
    assert lines["sync"] == "sync      nothing to exchange on one rank"
    assert lines["predicted"].startswith("predicted 9.34 s a step, of which 9.19 s are compute ")


def test_a_trainer_with_checkpointing_dequantises_once_more_as_its_plan_has_it(
    tiny_data: Path,
) -> None:
    words = ["memory.activation_checkpointing=off", "memory.activation_checkpointing=on"]
    plain, again = (lines_with(1, tiny_data, word, dequantized_per_s=1e9) for word in words)
    assert " s a step to dequantise 85M weights twice a micro-batch, " in plain["4"]
    assert " s a step to dequantise 85M weights three times a micro-batch, " in again["4"]
    seconds = [float(lines["4"].split()[2]) for lines in (plain, again)]
    assert seconds[1] == pytest.approx(1.5 * seconds[0], rel=0.05)
