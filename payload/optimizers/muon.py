"""Trains the layers' matrices with Muon, and all other parameters with AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from payload.core.errors import ConfigError
from payload.optimizers import adamw
from payload.optimizers.base import Hyperparameters, Optimizer, Parameters, Prepare, Split

if TYPE_CHECKING:
    import torch


class Muon(Optimizer):
    """torch's Muon, scaled to the size of AdamW's updates."""

    # A matrix has only one momentum, 4 bytes; plans count 8 bytes, as for AdamW, for all weights.
    state_bytes = adamw.OPTIMIZER.state_bytes
    # Muon was not measured; these are the times of AdamW.
    update_s = adamw.UPDATE_S_PER_WEIGHT
    gpu_update_s = adamw.GPU_UPDATE_S_PER_WEIGHT
    keeps_bf16_gradients = (False, True)
    beside = adamw.OPTIMIZER

    def takes(self, *, is_layer_matrix: bool) -> bool:
        """Return whether a parameter is a matrix of a layer."""
        return is_layer_matrix

    def conflict(self, setting: str, *, splits: Split) -> str | None:
        """Return the message that Muon needs full matrices, with the fix for `setting`."""
        if splits == "matrices":
            what, fix = "them", 'adamw, or strategy = "replicate"'
        else:
            what, fix = "the model", "adamw"
        return (
            f'optimizer.name = "{self.name}" needs whole matrices, but {setting} splits {what}. '
            f"Use {fix}."
        )

    def build(
        self, parameters: Parameters, settings: Hyperparameters, *, prepare: Prepare
    ) -> torch.optim.Optimizer:
        """Construct torch's Muon. Raises ConfigError before torch 2.9."""
        import torch

        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f"optimizer.name = {self.name!r} needs torch 2.9 or newer, but torch "
                f"{torch.__version__} is installed. Use adamw."
            )
        # match_rms_adamw scales Muon's update to the size of AdamW's, so that one lr serves both
        # (Moonshot, https://arxiv.org/abs/2502.16982, section 2.2).
        made: torch.optim.Optimizer = prepare(torch.optim.Muon)(
            [*parameters.matrices, *parameters.vectors],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return made


OPTIMIZER = Muon()
