"""The kernels that a model asks for: parts of a pass that run faster than the reference."""

from __future__ import annotations

import logging
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
    """A faster way for a model's passes. Without a library, what pure torch can do of it."""

    def __init__(self, library: Library | None) -> None:
        self._library = library
        self._copies = Bf16Copies()
        self.token_gradient = accumulate.TokenGradient(library)
        """Takes the token embedding's; an exchange between ranks puts its own here."""
        self._layers: LayerContext | None = None
        if library is not None and library.has_products:
            gradients = accumulate.WeightGradients(library)
            self._layers = LayerContext(library, self._copies, gradients)

    def layers_note(self, dtype: Dtype) -> str | None:
        """Say why a run that computes in `dtype` has no kernels for the layers; None if it has."""
        if self._library is None or (self._layers is not None and dtype == "bf16"):
            return None
        why = "they compute in bf16, this run in fp32"
        if self._layers is None:
            why = "this CPU has no instructions for bf16 matmuls"
        return f"for the loss and AdamW alone, not for the layers: {why}"

    @property
    def has_update(self) -> bool:
        """Return whether `norm` and `adamw` are there."""
        return self._library is not None

    def weights_changed(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Forget what was derived from the optimizer's weights; a hook for its steps."""
        self._copies.drop(each for group in optimizer.param_groups for each in group["params"])

    def keep_no_copies(self) -> None:
        """Hold nothing that was derived from weights beyond the matmul that needs it."""
        self._copies.keep_none()

    def make_gradients_at(self, place: Callable[[Tensor], Tensor]) -> None:
        """Make a weight's gradient in what `place` has for it, as far as kernels make it."""
        if self._layers is not None:
            self._layers.gradients.place = place

    def norm(self, tensors: list[Tensor]) -> float:
        """The norm of all numbers of all tensors, whatever the number of threads."""
        assert self._library is not None
        return update.norm(tensors, self._library)

    def adamw(self, optimizer: torch.optim.AdamW, *, grad_scale: float) -> None:
        """The optimizer's step, with every gradient times `grad_scale`, in one pass."""
        assert self._library is not None
        update.adamw(optimizer, grad_scale=grad_scale, library=self._library, copies=self._copies)
        self.token_gradient.updated()

    def make_state(self, optimizer: torch.optim.AdamW) -> None:
        """Make the optimizer's state, as far as it is missing."""
        update.make_state(optimizer)

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Rows of the token embedding, which is the head's weight as well."""
        return accumulate.embed(weight, tokens, self.token_gradient)

    def layer_context(self) -> LayerContext | None:
        """Return what the functions of `layers` need; None in fp32 and without a library for it."""
        return self._layers if _is_bf16() else None

    def mean_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of (B, T, C) against (B, T), a scalar."""
        hidden, cast_weight = self._cast(hidden, weight)
        flat = (hidden.flatten(0, 1), weight, cast_weight, targets.flatten())
        with torch.autocast("cpu", enabled=False):
            return head.mean_loss(*flat, self.token_gradient)

    def token_losses(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of every target, (B, T) fp32; 0 where it is ignored."""
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
            # Two matmuls read it, which may as well round it: a copy would lie at the peak.
            return hidden, weight
        # Made for this pass: kept, the copy would lie beside all gradients.
        return hidden, weight.to(torch.bfloat16)


def _is_bf16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def find_kernels() -> Kernels:
    """The kernels of this machine, built if need be; what is missing is said and done without."""
    try:
        library = load_library()
    except KernelsUnavailableError as error:
        log.info(f"kernels   none: {error}; stock torch instead, which is slower")
        return Kernels(None)
    return Kernels(library)
