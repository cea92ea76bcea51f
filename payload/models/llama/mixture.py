"""Sizes of the experts of a mixture: Qwen3-MoE.

A checkpoint has the matrices of each expert. The module has a stack for all experts of a layer, as
transformers' module does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from payload.models.spec import ParameterSize

_ROUTER, _WIDE, _DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The MLP of every layer as a mixture of experts."""

    experts: int
    active: int
    """Number of experts that process a token."""
    inner: int
    """Width of an expert's gate."""
    normalises: bool
    """True if the weights of a token's experts are divided by their sum."""
    balance: float
    """Factor of the router's balancing loss; 0 = without this loss."""

    def shapes(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of the parameters of a layer's MLP."""
        yield _ROUTER, (self.experts, width)
        yield _WIDE, (self.experts, 2 * self.inner, width)
        yield _DOWN, (self.experts, width, self.inner)

    def stored_shapes(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of the tensors of a layer's MLP in a checkpoint."""
        yield _ROUTER, (self.experts, width)
        for number in range(self.experts):
            yield f"mlp.experts.{number}.gate_proj.weight", (self.inner, width)
            yield f"mlp.experts.{number}.up_proj.weight", (self.inner, width)
            yield f"mlp.experts.{number}.down_proj.weight", (width, self.inner)

    def expert_params(self, width: int) -> int:
        """Return the number of weights of a layer's experts."""
        return 3 * self.experts * self.inner * width

    def active_params(self, width: int) -> int:
        """Return how many weights of a layer a token uses, in the router and in the token's
        experts."""
        return (self.experts + 3 * self.active * self.inner) * width

    def kept_elements(self, width: int, *, kernels: bool) -> int:
        """Return how many elements of one token a layer's experts keep for the backward pass.

        For each expert of the token, the kernels keep the expert's input, gate and up. Plain torch
        also keeps the activated gate, the product of activated gate and up, and two copies of the
        output.
        """
        inner = 2 * self.inner if kernels else 4 * self.inner
        return self.active * (inner + (width if kernels else 3 * width))

    def parameters(self, width: int) -> tuple[ParameterSize, ...]:
        """Return the parameters of a layer's MLP that an adapter can target."""
        router, wide, down = (shape for _, shape in self.shapes(width))
        return (
            ParameterSize(_ROUTER, router[1], router[0]),
            ParameterSize(_WIDE, wide[2], wide[1], stack=self.experts, is_expert=True),
            ParameterSize(_DOWN, down[2], down[1], stack=self.experts, is_expert=True),
        )
