"""AdamW with torch's fused update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from payload.optimizers.base import Hyperparameters, Optimizer, Parameters, Prepare

if TYPE_CHECKING:
    import torch

UPDATE_S_PER_WEIGHT = 2.4e-9
"""Seconds in which one core updates a weight, including clipping; an update moves 28 bytes. Two
cores took 0.15 s for GPT-2 124M (benchmarks/results/2026-11-22_step_epyc-2-cores.md)."""
GPU_UPDATE_S_PER_WEIGHT = 28 / 300e9
"""The 28 bytes of a weight's update at 300 GB/s, the memory bandwidth in an L4's specification. The
L4 is the slowest supported GPU; an H100 has eleven times the bandwidth. Not measured."""


class AdamW(Optimizer):
    """Trains all parameters with AdamW, or the parameters that another optimizer leaves out."""

    state_bytes = 8  # Two moments in fp32.
    update_s = UPDATE_S_PER_WEIGHT
    gpu_update_s = GPU_UPDATE_S_PER_WEIGHT
    keeps_bf16_gradients = (True, True)

    def build(
        self, parameters: Parameters, settings: Hyperparameters, *, prepare: Prepare
    ) -> torch.optim.Optimizer:
        """Construct torch's AdamW, with weight decay only for matrices and embeddings."""
        import torch

        made: torch.optim.Optimizer = prepare(torch.optim.AdamW)(
            [
                {"params": parameters.matrices, "weight_decay": settings.weight_decay},
                {"params": parameters.vectors, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )
        return made


OPTIMIZER = AdamW()
