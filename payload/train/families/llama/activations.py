"""The activations of a gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from payload.models.llama.config import Activation


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation of this name."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
