"""The interface of a model to training, generation and checkpoints, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.kernels import Kernels
from payload.models.adapter import AdaptedSpec
from payload.models.spec import ModelSpec, RankSetting
from payload.train.models import chunked_loss
from payload.train.models.head_loss import FusedHead, HeadLoss, PlainHead, SplitHead
from payload.train.models.quantized import QuantizedLinear
from payload.train.models.split import SplitModule, Splits
from payload.train.models.stage import Stage


class Cache(Protocol):
    """Keys and values that one layer keeps of the tokens seen so far."""

    def num_tokens(self) -> int:
        """Return the number of tokens seen so far."""


@dataclass(frozen=True, slots=True)
class OuterModules:
    """Paths of a model's modules, for pipeline stages."""

    layers: str
    """The list of the layers."""
    first: tuple[str, ...]
    """Modules before them; the token embedding is the first one."""
    last: tuple[str, ...]
    """Modules behind them, but for a head that is the token embedding."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The layer as a strategy made it when it placed its weights on the ranks."""

    built_as: type[nn.Module]
    """The layer's class, which the strategy derives another one from."""
    parameters: type[Tensor]
    """The type of its parameters between two passes; in a pass they are plain."""
    hooks: int
    """The hooks that the strategy put around the layer's forward pass."""


class Objective(Protocol):
    """A task's own reduction of the losses of a batch's tokens, where it is not their mean."""

    def __call__(self, losses: Tensor, targets: Tensor, /, *inputs: Tensor) -> Tensor:
        """Return the batch's loss, a scalar, of (B, T) losses and what else the batch holds."""


class LayerModule(nn.Module):
    """A layer whose forward pass can be computed by another function."""

    placement: Placement | None = None
    """Set by a strategy that wraps `forward` and `computed_by`."""

    def computed_by(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function` of this layer and `inputs`, as a forward pass of this layer.

        A strategy that gathers the layer's weights for its forward pass does so around this, too.
        """
        return function(self, *inputs)


class CausalLM(SplitModule, ABC):
    """A language model that is trained to predict the next token.

    B batch, T tokens in this pass, C width, V vocabulary.
    """

    reads_parts = False
    """True if `load_tensors` sets parameters of which a rank holds a part."""

    def __init__(self, spec: ModelSpec, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = dropout
        self.checkpoints_layers = False
        """True once `enable_checkpointing` was called."""
        self.unread: Path | None = None
        """The folder that a strategy has still to read this rank's part of the weights from."""
        self.chunks_loss = False
        """True if head and loss are computed in chunks of tokens, where there are no kernels."""
        self.takes_inference_mode = True
        """False if the layers have tensors that cannot be converted in inference mode."""
        self.kernels: Kernels | None = None
        """Faster ways for a pass without caches; None = the plain modules, the reference."""
        self.stage: Stage | None = None
        """The pipeline stage that is here; None = the whole model."""
        self.adapter: AdapterSection | None = None
        """The adapter that is trained; `lora.add_adapter` sets it."""
        self.objective: Objective | None = None
        """The reduction that `forward` returns; None = the mean loss of the targets."""

    @abstractmethod
    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[Any] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """(B, T) token ids to (B, T, C), the final norm included.

        With `caches`, which `new_caches` made, `tokens` continue the ones seen before. With
        `starts` (B, T), each row holds several documents: a token's start is the first one of its
        document, where positions begin at 0 and beyond which attention does not reach.
        """

    @abstractmethod
    def head_weight(self) -> nn.Parameter | None:
        """Return the output head's weight (V, C) where logits are `hidden @ weight.T`, else None.

        None where the head has a bias or logits are scaled or capped: the loss is then computed
        from `logits`, without the kernels.
        """

    def tied_weight(self) -> nn.Parameter | None:
        """Return the token embedding where it is the output head too, else None.

        Its gradient comes in two parts, the head's first and the embedding's last. A model with
        kernels looks tokens up by `kernels.embed` then. With None autograd adds up both.
        """
        return None

    @abstractmethod
    def new_caches(self) -> Sequence[Cache]:
        """Return empty caches for `hidden`; the first one counts the tokens."""

    def layers(self) -> Sequence[nn.Module]:
        """Return the layers in the order of the forward pass, each called as a whole there.

        A strategy places their weights on the ranks layer by layer, and all others together.
        """
        return []

    def splits(self) -> Splits | None:
        """Return how tensor ranks share out the parameters, or None where they cannot."""
        return None

    def outer_modules(self) -> OuterModules:
        """Return what belongs to no layer, by the pipeline stage that computes it."""
        raise NotImplementedError("require_split refuses models that cannot be in stages")

    @abstractmethod
    def is_hidden_matrix(self, name: str) -> bool:
        """Say whether the parameter of this name is a layer's matrix, as Muon trains alone."""

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights under the names and in the layout of transformers."""
        return {name: value.detach() for name, value in self.named_parameters()}

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """Return the content of config.json, by which transformers builds the same model."""

    @abstractmethod
    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors, under the names of transformers.

        Raises CheckpointError, which names `where`, when some are missing or of another size.
        """

    def speed_notes(self) -> list[str]:
        """Say what runs on the reference although kernels were asked for, and why; a line each."""
        return []

    def enable_checkpointing(self) -> None:
        """Keep a layer's input alone in training, and compute the layer again going back.

        Raises ConfigError where the layers cannot.
        """
        self.checkpoints_layers = True

    def layer_pass(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Run one layer; with `checkpoints_layers` what it computes on the way is not kept."""
        if self.checkpoints_layers and self.training and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def drop_head(self) -> None:
        """Take the output head off, as a classifier has none; nothing to do where it is tied.

        Raises CheckpointError for a model that cannot do without.
        """

    def classifier_architecture(self) -> str:
        """Return the name of transformers' class for classification with this model.

        Raises CheckpointError where it has none in the common layout.
        """
        raise CheckpointError(
            f"model_type = {self.spec.model_type!r}: it cannot be a classifier. Use a language "
            "model of another family."
        )

    def trained_beside_adapter(self) -> dict[str, nn.Parameter]:
        """Return the base's own parameters that are trained with an adapter, by PEFT's names."""
        return {}

    def bf16_gradients(self, setting: RankSetting) -> list[nn.Parameter]:
        """Return the parameters whose gradient a rank that trains so may keep in bf16.

        `ModelSpec.bf16_gradients` decides; the memory estimate asks it, too.
        """
        linears, head = self.trained_spec().bf16_gradients(setting)
        found = []
        if linears:
            paths = [path for joined in self.joined_linears() for path in joined]
            found = [self.get_parameter(f"{path}.weight") for path in paths]
        weight = self.head_weight() if head else None
        return found if weight is None else [*found, weight]

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the layers' linears, those that the kernels join together."""
        return []

    def hf_name(self, module: str) -> str:
        """Return transformers' path of the module that this model has at `module`."""
        return module

    def transposes_linears(self) -> bool:
        """Say whether transformers keeps the weights of this family's linears as (in, out)."""
        return False

    def trained_spec(self) -> ModelSpec:
        """Return the numbers of what is trained: the model's own, or those with its adapter."""
        if self.adapter is None:
            return self.spec
        adapter = self.adapter
        return AdaptedSpec.of(
            self.spec,
            rank=adapter.rank,
            target=adapter.target,
            dropout=adapter.dropout,
            is_quantized=any(isinstance(each, QuantizedLinear) for each in self.modules()),
            is_dora=adapter.dora,
        )

    def draws_masks(self) -> bool:
        """Say whether a training pass draws dropout masks."""
        return bool(self.dropout or (self.adapter is not None and self.adapter.dropout))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) to (..., V)."""
        weight = self.head_weight()
        assert weight is not None, "a family without a plain linear head has its own logits()"
        return functional.linear(hidden, weight)

    def token_losses(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor:
        """Cross entropy of every target, (B, T) fp32; 0 where the target is `IGNORED_TARGET`.

        `starts` are as in `hidden`. On a pipeline stage that is not the last one all are 0.
        A strategy may wrap this as a forward pass of its own.
        """
        return self._token_losses(tokens, targets, starts)

    def _token_losses(self, tokens: Tensor, targets: Tensor, starts: Tensor | None) -> Tensor:
        hidden = self.hidden(tokens, starts=starts)
        if self.stage is not None and not self.stage.is_last():
            self.stage.send(hidden)
            return torch.zeros(targets.shape, device=targets.device)
        if starts is None:
            return self._head_loss().token_losses(hidden, targets)
        losses = torch.zeros(targets.shape, device=targets.device)
        chosen = targets != IGNORED_TARGET
        hidden, targets = hidden[chosen].unsqueeze(0), targets[chosen].unsqueeze(0)
        some = self._head_loss().token_losses(hidden, targets)
        losses[chosen] = some.squeeze(0)
        return losses

    def _head_loss(self) -> HeadLoss:
        """Return how this model computes its head and loss now."""
        weight = self.head_weight()
        if weight is None:
            return PlainHead(self.logits)
        if self.ranks is not None:
            return SplitHead(weight, self.ranks, words=self.spec.head_rows())
        if self.kernels is not None:
            return FusedHead(weight, self.kernels)
        return FusedHead(weight, chunked_loss) if self.chunks_loss else PlainHead(self.logits)

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *more: Tensor
    ) -> Tensor:
        """Mean cross entropy over the targets, a scalar, or what `objective` makes of each.

        On a pipeline stage that is not the last one, what is sent to the next one instead.
        Raises nothing on its own; tokens and targets are (B, T) int64 within the vocabulary,
        `starts` as in `hidden`, and `more` what the objective reads besides.
        """
        if self.objective is not None:
            return self.objective(self._token_losses(tokens, targets, starts), targets, *more)
        hidden = self.hidden(tokens, starts=starts)
        if self.stage is not None and not self.stage.is_last():
            return hidden
        if starts is not None:
            # The answers are a part of the text: the head reads those positions alone.
            chosen = targets != IGNORED_TARGET
            hidden, targets = hidden[chosen].unsqueeze(0), targets[chosen].unsqueeze(0)
        return self._head_loss().mean_loss(hidden, targets)


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and tensor of each parameter that is trained.

    The one place that decides it: a frozen parameter has no optimizer state, no place in the
    exchange of gradients and none in the memory that is estimated.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
