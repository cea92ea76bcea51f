"""AdamW whose two moments are kept in 8 bits: bitsandbytes' blockwise AdamW.

Each block of 256 values has a scale in fp32. Source: Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from payload.optimizers.base import Hyperparameters, Optimizer, Parameters, Prepare, Split

if TYPE_CHECKING:
    import torch

_BLOCK = 256
_SLICE = 2**18
"""Number of weights that a CPU updates together, a multiple of the block. Slices of an eighth of
this size took half as long again, and parameters of 4 million weights in one slice 1.6 times as
long, on two cores with AVX2."""
_SMALLEST = 4096
"""Smallest number of elements of a parameter whose moments are kept in 8 bits."""
_TABLES = {"state1": ("qmap1", "dynamic"), "state2": ("qmap2", "udynamic")}
"""For each moment, the names that bitsandbytes gives the table of its 256 values."""
_SCALES = ("absmax1", "absmax2")


class AdamW8bit(Optimizer):
    """Trains all parameters with AdamW. Parameters below 4,096 elements have moments in fp32."""

    state_bytes = 2  # And 8 bytes for every 256 weights.
    update_s = 27e-9
    """Measured with 42 million weights on two cores of an EPYC with AVX2, 2026-11-30."""
    gpu_update_s = 16 / 300e9
    """Seconds for the 16 bytes that an update moves, as in `adamw`. Not measured."""
    package = "bitsandbytes"

    def conflict(self, setting: str, *, splits: Split) -> str | None:
        """Return the message that the scales of blocks cannot be split."""
        what = "them" if splits == "matrices" else "the model"
        return (
            f'optimizer.name = "{self.name}" needs whole parameters, but {setting} splits {what}. '
            "Use adamw."
        )

    def build(
        self, parameters: Parameters, settings: Hyperparameters, *, prepare: Prepare
    ) -> torch.optim.Optimizer:
        """Construct bitsandbytes' AdamW, with weight decay only for matrices and embeddings."""
        made: torch.optim.Optimizer = prepare(_with_checkpoints())(
            [
                {"params": parameters.matrices, "weight_decay": settings.weight_decay},
                {"params": parameters.vectors, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            min_8bit_size=_SMALLEST,
        )
        return made


@cache
def _with_checkpoints() -> Any:
    """Return bitsandbytes' AdamW, whose state can be saved as tensors and restored."""
    import bitsandbytes
    import torch

    library: Any = bitsandbytes
    base: Any = library.optim.AdamW8bit

    class AdamW8bitWithCheckpoints(base):  # type: ignore[misc]  # untyped
        initialized: bool

        @torch.no_grad()
        def step(self) -> None:
            """Update all parameters, without waiting for a GPU after each one."""
            if not self.initialized:
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            for group_number, group in enumerate(self.param_groups):
                for number, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, group_number, number)
                    if parameter.numel() >= _SMALLEST:
                        self._update_in_slices(group, parameter)
                    else:
                        self.update_step(group, parameter, group_number, number)

        def _update_in_slices(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
            """Update whole blocks at a time: on CPUs, bitsandbytes makes fp32 copies of a slice."""
            state = self.state[parameter]
            state["step"] += 1
            assert parameter.grad is not None
            flat = [parameter.detach().view(-1), parameter.grad.reshape(-1)]
            flat += [state[name].view(-1) for name in _TABLES]
            beta1, beta2 = group["betas"]
            size = _SLICE if parameter.device.type == "cpu" else parameter.numel()
            for first in range(0, parameter.numel(), size):
                weights, gradient, mean, square = (each[first : first + size] for each in flat)
                blocks = slice(first // _BLOCK, -(-(first + size) // _BLOCK))
                library.functional.optimizer_update_8bit_blockwise(
                    self.optimizer_name,
                    *(gradient, weights, mean, square),
                    *(beta1, beta2, 0.0, 0.0, group["eps"], state["step"], group["lr"]),
                    *(state["qmap1"], state["qmap2"]),
                    *(state["absmax1"][blocks], state["absmax2"][blocks]),
                    group["weight_decay"],
                )

        def named_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            """Return the parameter's state without bitsandbytes' constant tables."""
            state = self.state[parameter]
            names = ("step", *_TABLES, *(_SCALES if parameter.numel() >= _SMALLEST else ()))
            return {name: torch.as_tensor(state[name]) for name in names} if state else {}

        def set_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> bool:
            """Set a tensor of the parameter's state; return False if it does not fit."""
            state, size = self.state[parameter], parameter.numel()
            in_8_bits = size >= _SMALLEST
            moment = torch.uint8 if in_8_bits else torch.float32
            forms = {name: (moment, tuple(parameter.shape)) for name in _TABLES}
            if in_8_bits:
                forms |= {name: (torch.float32, (-(-size // _BLOCK),)) for name in _SCALES}
            if name == "step" and not value.dim() and value.dtype is torch.int64:
                state[name] = int(value)
                return True
            if forms.get(name) != (value.dtype, tuple(value.shape)):
                return False
            if name in _TABLES and in_8_bits:
                if not self.name2qmap:
                    self.fill_qmap()
                table, kind = _TABLES[name]
                state[table] = self.name2qmap[kind] = self.name2qmap[kind].to(parameter.device)
            state[name] = value.to(parameter.device)
            return True

    return AdamW8bitWithCheckpoints


OPTIMIZER = AdamW8bit()
