"""The kernels of a model, which compute the same as the reference, but faster."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable

import torch
from torch import Tensor

from payload.core.dtype import Dtype
from payload.kernels import accumulate, head, update
from payload.kernels.bf16_copies import Bf16Copies
from payload.kernels.library import Library, load_library
from payload.kernels.linears import LayerContext
from payload.kernels.unavailable import KernelsUnavailableError
from payload.models.spec import logits_tokens

log = logging.getLogger(__name__)


class Kernels:
    """Computes parts of a training step faster; without a library, some parts use pure torch."""

    def __init__(self, library: Library | None) -> None:
        self._library = library
        self._copies = Bf16Copies()
        self.token_gradient = accumulate.TokenGradient(library)
        """Adds up the token embedding's gradient; a gradient exchange replaces this object."""
        self._layers: dict[Dtype, LayerContext] = {}
        if library is None:
            return
        gradients = accumulate.WeightGradients(library)
        self._layers["fp32"] = LayerContext(library, self._copies, gradients, torch.float32)
        if library.has_products:
            self._layers["bf16"] = LayerContext(library, self._copies, gradients)

    def layers_note(self, dtype: Dtype) -> str | None:
        """Return a log text on why a run in `dtype` has no layer kernels, or None."""
        if self._library is None or dtype in self._layers:
            return None
        why = "this CPU has no bf16 matmul instructions"
        if platform.machine() != "x86_64":
            why = f"PyTorch's bf16 brgemm does not support {platform.machine()}"
        return f"for loss and AdamW; layers run on PyTorch ({why})"

    @property
    def has_update(self) -> bool:
        """Return whether `norm` and `adamw` are available."""
        return self._library is not None

    def weights_changed(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Drop data derived from the optimizer's weights. It is a hook that runs after the
        optimizer's steps."""
        self._copies.drop(each for group in optimizer.param_groups for each in group["params"])

    def keep_no_copies(self) -> None:
        """Keep data derived from weights only for the matmul that needs it."""
        self._copies.keep_none()

    def make_gradients_at(self, place: Callable[[Tensor], Tensor]) -> None:
        """Make the kernels compute weight gradients in the memory that `place` returns."""
        for context in self._layers.values():
            context.gradients.place = place

    def norm(self, tensors: list[Tensor]) -> float:
        """Return the norm over all tensors, bitwise equal for any number of threads."""
        assert self._library is not None
        return update.norm(tensors, self._library)

    def adamw(self, optimizer: torch.optim.AdamW, *, grad_scale: float) -> None:
        """Run the optimizer's step with gradients times `grad_scale`, in one pass over memory."""
        assert self._library is not None
        update.adamw(optimizer, grad_scale=grad_scale, library=self._library, copies=self._copies)
        self.token_gradient.updated()

    def make_state(self, optimizer: torch.optim.AdamW) -> None:
        """Create the optimizer's missing state."""
        update.make_state(optimizer)

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Look up rows of a token embedding that is also the output head."""
        return accumulate.embed(weight, tokens, self.token_gradient)

    def layer_context(self) -> LayerContext | None:
        """Return the context for the layer functions in the current dtype, or None without them."""
        return self._layers.get("bf16" if _is_bf16() else "fp32")

    def mean_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `hidden` (B, T, C) against `targets` (B, T)."""
        hidden, cast_weight = self._cast(hidden, weight)
        flat = (hidden.flatten(0, 1), weight, cast_weight, targets.flatten())
        with torch.autocast("cpu", enabled=False):
            return head.mean_loss(*flat, self.token_gradient)

    def token_losses(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for ignored targets."""
        hidden, cast_weight = self._cast(hidden, weight)
        rows, flat = hidden.flatten(0, 1), targets.flatten()
        trains = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
        with torch.autocast("cpu", enabled=False):
            if trains:
                losses = head.trained_losses(rows, weight, cast_weight, flat, self.token_gradient)
            else:
                losses = head.token_losses(rows, cast_weight, flat, self._library)
        return losses.view_as(targets)

    def _cast(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.detach()
        if not _is_bf16():
            return hidden, weight
        hidden = hidden.to(torch.bfloat16)
        if hidden.shape[:-1].numel() <= logits_tokens(len(weight)):
            # Only two matmuls read the weight and round it themselves; a copy would add to the
            # peak.
            return hidden, weight
        # The copy is made for this micro-batch: a kept copy would be in memory with all gradients.
        return hidden, weight.to(torch.bfloat16)


def _is_bf16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def find_kernels() -> Kernels:
    """Return this machine's kernels, built if missing.

    If the build fails, log the reason; torch then computes instead of the kernels.
    """
    try:
        library = load_library()
    except KernelsUnavailableError as error:
        log.info(f"kernels   none ({error}): using stock torch, which is slower")
        return Kernels(None)
    return Kernels(library)
