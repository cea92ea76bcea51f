"""The routers of a mixture of experts: their parameters, balancing loss and counts of tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

_Module = Any
"""transformers.PreTrainedModel. Most of its methods have no type hints."""

_NAMES = ("gate", "router", "wg")


def router_parameters(module: _Module, *, experts: int) -> dict[str, list[nn.Parameter]]:
    """Return the router's weights and biases, which give each token's expert scores, by module."""
    found: dict[str, list[nn.Parameter]] = {}
    for path, part in module.named_modules():
        is_router = path.rpartition(".")[2] in _NAMES or "router" in type(part).__name__.lower()
        own = list(part.parameters(recurse=False)) if is_router else []
        scores = [each for each in own if experts > 1 and len(each) == experts]
        found |= {path: scores} if scores else {}
    return found


def balance_note(coefficient: float) -> str:
    """Return the line that reports the balancing loss."""
    return (
        "the loss includes the routers' balancing loss (output_router_logits), times "
        f"router_aux_loss_coef = {coefficient:g}"
    )


class RouterLoss:
    """The balancing loss that transformers adds if config.json has output_router_logits = true.

    Source: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6.
    """

    def __init__(self, module: _Module) -> None:
        """Find the model's own function, number of experts and coefficient."""
        code = vars(sys.modules[type(module).__module__])
        self._function = code.get("load_balancing_loss_func")
        self._module = module
        self._logits: tuple[Tensor, ...] | None = None

    def is_on(self) -> bool:
        """Return whether config.json requests the load-balancing loss and the model computes it."""
        wants = getattr(self._module.config, "output_router_logits", False)
        return bool(wants) and self._function is not None and self.coefficient() != 0

    def coefficient(self) -> float:
        """Return `router_aux_loss_coef`, by which the loss is multiplied."""
        return float(getattr(self._module, "router_aux_loss_coef", 0.0))

    def keep(self, made: Any) -> None:
        """Keep the router's logits of a forward pass for `take`."""
        self._logits = made.router_logits

    def take(self, padding: Tensor | None) -> Tensor | None:
        """Return the weighted loss of the last forward pass; a second call returns None.

        The tokens at which `padding` (B, T) is True do not count.
        """
        logits, self._logits = self._logits, None
        if logits is None or self._function is None:
            return None
        owner = self._module
        # The attributes that each model's own forward pass reads; DBRX has other names.
        experts = getattr(owner, "num_experts", None) or owner.moe_num_experts
        active = getattr(owner, "num_experts_per_tok", None) or owner.moe_top_k
        mask = None if padding is None else (~padding).long()
        return self.coefficient() * cast(Tensor, self._function(logits, experts, active, mask))


class TokenCounts:
    """Counts the tokens of each expert in training, from the indices that the experts receive."""

    def __init__(self, module: _Module, *, experts: int) -> None:
        """Add hooks that count tokens to each module with experts as stacks of matrices."""
        self._experts = experts
        self._layers = [part for part in module.modules() if _holds_stacks(part, experts)]
        self._counts: dict[int, Tensor] = {}
        for number, part in enumerate(self._layers):
            part.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def take(self) -> Tensor:
        """Return the number of tokens of each expert since the last call, float64 on the CPU.

        The result is empty for a model without experts, or with experts that receive no indices.
        """
        counts, self._counts = self._counts, {}
        if not self._layers:
            return torch.zeros(0, dtype=torch.float64)
        none = torch.zeros(self._experts, dtype=torch.int64)
        found = [counts.get(number, none).cpu() for number in range(len(self._layers))]
        return torch.cat(found).double()

    def _hook(self, number: int) -> Any:
        def count(part: nn.Module, inputs: Sequence[Any], options: dict[str, Any]) -> None:
            chosen = _indices((*inputs, *options.values()))
            # A checkpointed layer runs again in the backward pass, so its tokens count twice.
            if not part.training or not torch.is_grad_enabled() or chosen is None:
                return
            chosen = chosen.detach().flatten()
            # Other indices mean no expert of this rank, or are no indices of experts.
            chosen = chosen[(chosen >= 0) & (chosen < self._experts)]
            found = torch.bincount(chosen, minlength=self._experts)
            before = self._counts.get(number)
            self._counts[number] = found if before is None else before + found

        return count


def _indices(inputs: Sequence[Any]) -> Tensor | None:
    whole = (each for each in inputs if isinstance(each, Tensor) and each.dtype == torch.int64)
    return next(whole, None)


def _holds_stacks(part: nn.Module, experts: int) -> bool:
    own = part.parameters(recurse=False)
    return experts > 1 and any(each.dim() == 3 and len(each) == experts for each in own)
