"""The interface of any model family to training, generation and checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError, ConfigError
from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.kernels import Kernels
from payload.models.adapter import AdaptedSpec
from payload.models.spec import ModelSpec, ParameterSize, RankSetting
from payload.train.models.attention import document_bounds
from payload.train.models.chunked_loss import ChunkedLoss
from payload.train.models.head_loss import FusedHead, HeadLoss, PlainHead, SplitHead
from payload.train.models.padding import padding_tokens
from payload.train.models.quantized import QuantizedLinear
from payload.train.models.split import SplitModule, Splits
from payload.train.models.stage import Stage
from payload.train.models.trained_tokens import TrainedTokens, TrainedTokensHead
from payload.train.tensors.lazy_tensors import LazyTensors
from payload.train.tensors.new_rows import TensorsWithNewRows


class Cache(Protocol):
    """One layer's keys and values of the tokens processed so far."""

    def num_tokens(self) -> int:
        """Return the number of tokens processed so far."""


@dataclass(frozen=True, slots=True)
class OuterModules:
    """Paths of a model's modules, for pipeline stages."""

    layers: str
    """Path of the list that holds the layers."""
    first: tuple[str, ...]
    """Modules before the layers; the token embedding is the first one."""
    last: tuple[str, ...]
    """Modules after the layers. An output head that is the token embedding is not listed."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The state of a layer after a strategy has distributed its weights."""

    built_as: type[nn.Module]
    """The layer's original class, from which the strategy derives a new one."""
    parameters: type[Tensor]
    """The type of the layer's parameters outside of computation. During computation, the parameters
    are plain tensors."""
    hooks: int
    """The number of hooks that the strategy added to the layer's forward pass."""


class Objective(Protocol):
    """A task's function that reduces a batch's token losses to a scalar, if the loss is not the
    mean."""

    def __call__(self, losses: Tensor, targets: Tensor, /, *inputs: Tensor) -> Tensor:
        """Return the batch's loss, a scalar, from (B, T) losses and the batch's other tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """The places of the documents and targets in a packed batch, on the device."""

    starts: Tensor
    """The batch's `starts` (B, T), by which the batch is recognised."""
    bounds: Tensor | None
    """`document_bounds` of the batch."""
    chosen: Tensor
    """Indices of the targets that are not ignored, among all B x T targets, int64."""


class LayerModule(nn.Module):
    """A layer whose forward pass another function can compute."""

    placement: Placement | None = None
    """Set by a strategy that wraps `forward` and `computed_by`."""

    def computed_by(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(self, *inputs)`, run like this layer's forward pass.

        A strategy that gathers the layer's weights for `forward` also gathers them for this call.
        """
        return function(self, *inputs)


class CausalLM(SplitModule, ABC):
    """A language model for next-token prediction.

    B batch, T tokens of the input, C width, V vocabulary.
    """

    packs_documents = False
    """True if the layers compute any number of packed documents without mixing them."""
    reads_parts = False
    """True if `load_tensors` can set parameters of which this rank holds only a part."""

    def __init__(self, spec: ModelSpec, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = dropout
        self.checkpoints_layers = False
        """True once `enable_checkpointing` was called."""
        self.deferred_weights: Path | None = None
        """Folder from which the strategy later reads this rank's part of the weights, or None."""
        self.new_rows: tuple[int, int] | None = None
        """Vocabulary rows (first, end) that `deferred_weights` lacks; None = no missing rows."""
        self.chunked_loss: ChunkedLoss | None = None
        """Computes head and loss without kernels by chunks of tokens; None = all together."""
        self.has_single_tokens = False
        """True if a document can be a single token that counts."""
        self.attends_by_document = False
        """True if attention computes each packed document alone, without a mask. Set on GPUs."""
        self.layout: PackedLayout | None = None
        """The layout of the batch that `sent` sent last, or None."""
        self.takes_inference_mode = True
        """False if the layers have tensors that cannot be converted in inference mode."""
        self.kernels: Kernels | None = None
        """Kernels for computation without caches; None = the plain modules, the reference."""
        self.stage: Stage | None = None
        """This rank's pipeline stage; None = the whole model."""
        self.adapter: AdapterSection | None = None
        """The adapter's settings; set by `lora.add_adapter`."""
        self.trained_tokens: TrainedTokens | None = None
        """Rows of the embedding that are trained in addition to an adapter; set by
        `train_tokens`."""
        self.objective: Objective | None = None
        """Reduction of the token losses in `forward`; None = the mean over the targets."""
        self.without_router_loss = False
        """True for a run that an older release began without the routers' balancing loss."""

    @abstractmethod
    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[Any] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T) token ids to hidden states (B, T, C) after the final norm.

        With `caches` from `new_caches`, `tokens` continue the cached tokens. With `starts` (B, T),
        a row can hold several documents. A token's start is the index of its document's first
        token: positions count from this token, and attention does not reach back beyond it.
        """

    def compute_loss_in_chunks(self, *, compiles: bool) -> None:
        """Compute head and loss in chunks of tokens, if no kernels do; see `ChunkedLoss`."""
        self.chunked_loss = ChunkedLoss(compiles=compiles)

    def sent(
        self, inputs: Sequence[Tensor], send: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the arguments of `forward`, each sent to the device by `send`.

        Also keep what only the host knows without waiting for the device: where the documents and
        the targets are.
        """
        found = tuple(send(each) for each in inputs)
        self.layout = None
        if self.attends_by_document and len(found) > 2:
            bounds = document_bounds(inputs[2], joins_padding=not self.has_single_tokens)
            self.layout = PackedLayout(
                starts=found[2],
                bounds=None if bounds is None else send(bounds),
                chosen=send((inputs[1].flatten() != IGNORED_TARGET).nonzero().flatten()),
            )
        return found

    def bounds_of(self, starts: Tensor | None) -> Tensor | None:
        """Return the `document_bounds` for attention without a mask, or None for a mask."""
        if starts is None or not self.attends_by_document or (self.training and self.dropout):
            return None
        if self.layout is not None and self.layout.starts is starts:
            return self.layout.bounds
        return document_bounds(starts, joins_padding=not self.has_single_tokens)

    @abstractmethod
    def head_weight(self) -> nn.Parameter | None:
        """Return the output head's weight (V, C) if logits are `hidden @ weight.T`, or None.

        If the head has a bias, or if logits are scaled or capped, return None: the loss is computed
        from `logits`, without kernels.
        """

    def tied_weight(self) -> nn.Parameter | None:
        """Return the token embedding if it is also the output head, or None.

        The gradient of a tied weight has two parts: the backward pass computes the head's part
        first and the embedding's part last. A model with kernels looks up tokens by
        `kernels.embed`, which adds the embedding's part. If this method returns None, autograd adds
        both parts.
        """
        return None

    @abstractmethod
    def new_caches(self) -> Sequence[Cache]:
        """Return empty caches for `hidden`; the first cache counts the tokens."""

    def layers(self) -> Sequence[nn.Module]:
        """Return the layers in the order of the forward pass.

        The forward pass calls each layer as one module.

        A strategy shards the layers' weights layer by layer, and all other weights together.
        """
        return []

    def splits(self) -> Splits | None:
        """Return how tensor ranks split the parameters; None if that is not possible."""
        return None

    def outer_modules(self) -> OuterModules:
        """Return the modules outside the layers, by the pipeline stage that computes them."""
        raise NotImplementedError(
            "outer_modules was called for a model that cannot be split into pipeline stages"
        )

    @abstractmethod
    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is a matrix within a layer.

        The optimizer Muon trains these matrices.
        """

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights with transformers' names and layout."""
        return {name: value.detach() for name, value in self.named_parameters()}

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """Return the contents of a config.json from which transformers builds the same model."""

    @abstractmethod
    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Raises CheckpointError, naming `where`, if tensors are missing or do not have the model's
        shapes.
        """

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        return []

    def enable_checkpointing(self) -> None:
        """Keep only each layer's input in training and recompute the layer in the backward pass.

        Raises ConfigError if the layers do not support activation checkpointing.
        """
        self.checkpoints_layers = True

    def run_layer(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Run one layer, without keeping its activations if `checkpoints_layers` is set."""
        if self.checkpoints_layers and self.training and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def drop_head(self) -> None:
        """Remove the output head, for a classifier; do nothing if the head is tied.

        Raises CheckpointError for a model that needs its head.
        """

    def classifier_architecture(self) -> str:
        """Return the name of transformers' classification class for this model.

        Raises CheckpointError if transformers lacks this class in the common layout.
        """
        raise CheckpointError(
            f"model_type = {self.spec.model_type!r}: not supported as a classifier. Use a language "
            "model of another family."
        )

    def trained_beside_adapter(self) -> dict[str, nn.Parameter]:
        """Return the base model's parameters that are trained in full in addition to the adapter.

        The keys are PEFT's names of the parameters.
        """
        return {}

    def bf16_gradients(self, setting: RankSetting) -> list[nn.Parameter]:
        """Return the parameters whose gradient a rank with this setting may keep in bf16.

        `ModelSpec.bf16_gradients` defines the rule. The memory estimate uses the same rule.
        """
        linears, head = self.trained_spec().bf16_gradients(setting)
        found = []
        if linears:
            paths = [path for joined in self.joined_linears() for path in joined]
            found = [self.get_parameter(f"{path}.weight") for path in paths]
        weight = self.head_weight() if head else None
        return found if weight is None else [*found, weight]

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the layers' linears, grouped as the kernels join them."""
        return []

    def is_adaptable(self, linear: str) -> bool:
        """Return whether the linear at this path can have an adapter or be quantised to 4 bits."""
        del linear
        return True

    def peft_reads_as_expert(self, linear: str) -> bool:
        """Return whether PEFT takes this linear for an expert's linear, because of its name."""
        del linear
        return False

    def parameters_beside_linears(self) -> tuple[ParameterSize, ...]:
        """Return the parameters outside the linears that an adapter can target."""
        return self.spec.parameters_beside_linears()

    def embedding_module(self) -> str:
        """Return the path of the token embedding."""
        return self.outer_modules().first[0]

    def head_module(self) -> str | None:
        """Return the path of the module of the output head, or None without such a module."""
        last = self.outer_modules().last
        return "lm_head" if "lm_head" in last else None

    def train_tokens(self, tokens: Sequence[int], *, with_head: bool = True) -> None:
        """Train these tokens' rows of the frozen embedding and, if `with_head`, of the output head.

        A tied head always uses the rows of the embedding. Raises ConfigError for a head with a
        bias, because PEFT cannot compute its adapter.
        """
        embedding, head = self._vocabulary_modules()
        is_tied = head is None or head.weight is embedding.weight
        if getattr(head, "bias", None) is not None:
            raise ConfigError(
                "adapter.train_tokens: the output head of this model has a bias, which PEFT leaves "
                'out. Set adapter.train_tokens to "none".'
            )
        trained = None if is_tied or not with_head else head
        self.trained_tokens = TrainedTokens(tokens, embedding, trained, is_tied=is_tied)
        self.trained_tokens.watch(embedding, head)

    def token_rows(self) -> dict[str, nn.Parameter]:
        """Return the trained rows by the path of the module that they belong to."""
        if self.trained_tokens is None:
            return {}
        found = {self.embedding_module(): self.trained_tokens.embedding}
        head = self.head_module()
        if head is not None and self.trained_tokens.head is not None:
            found[head] = self.trained_tokens.head
        return found

    def merge_tokens(self) -> None:
        """Write the trained rows into the embedding and the head."""
        if self.trained_tokens is not None:
            self.trained_tokens.merge(*self._vocabulary_modules())
            self.trained_tokens = None

    def deferred_tensors(self) -> LazyTensors:
        """Open `deferred_weights`, with the rows of new tokens."""
        assert self.deferred_weights is not None
        if self.new_rows is None:
            return LazyTensors(self.deferred_weights)
        first, rows = self.new_rows
        # Files can also store a head that is the embedding.
        paths = (self.embedding_module(), self.head_module() or "", "lm_head")
        names = {path.rpartition(".")[2] for path in paths}
        return TensorsWithNewRows(self.deferred_weights, modules=names, first=first, rows=rows)

    def add_tokens(self, first: int, rows: int) -> None:
        """Set the rows from `first` to `rows` of embedding and head to the mean of earlier rows.

        A vocabulary with fewer rows grows to `rows`. The mean is equal on every machine, unlike
        random rows as in transformers.
        """
        if rows > self.spec.vocab_size:
            self._resize_vocabulary(rows)
            self.spec = self.spec.with_vocab_size(rows)
        with torch.no_grad():
            for module in self._vocabulary_modules():
                if module is not None:
                    assert isinstance(module.weight, Tensor)
                    module.weight[first:rows] = module.weight[:first].float().mean(0)

    def _resize_vocabulary(self, rows: int) -> None:
        for module in self._vocabulary_modules():
            if module is None:
                continue
            old = module.weight
            assert isinstance(old, nn.Parameter)
            new = old.new_zeros(rows, old.shape[1])
            new[: len(old)] = old.detach()
            module.weight = nn.Parameter(new, requires_grad=old.requires_grad)
            size = "num_embeddings" if isinstance(module, nn.Embedding) else "out_features"
            setattr(module, size, rows)

    def _vocabulary_modules(self) -> tuple[nn.Module, nn.Module | None]:
        """Return the token embedding, and the module of the output head if there is one."""
        head = self.head_module()
        embedding = self.get_submodule(self.embedding_module())
        return embedding, None if head is None else self.get_submodule(head)

    def head_changed(self) -> None:
        """Adjust to an output head whose adapter was added or removed."""

    def has_router_loss(self) -> bool:
        """Return whether training adds the load-balancing loss of a mixture of experts."""
        return False

    def router_loss(self, padding: Tensor | None = None) -> Tensor | None:
        """Return the load-balancing loss of a mixture of experts in the last forward pass, or None.

        The loss leaves out the tokens at which `padding` (B, T) is True.
        """
        del padding
        return None

    def take_expert_tokens(self) -> Tensor:
        """Return how many tokens each expert received in training since the last call.

        The counts are float64 on the CPU.

        The result is empty for a model without experts.
        """
        return torch.zeros(0, dtype=torch.float64)

    def freeze_router(self) -> Collection[str]:
        """Freeze the routers of a mixture of experts.

        Return the endings of the routers' module paths. Raises ConfigError for any other model.
        """
        raise ConfigError(
            f'model.router = "freeze": model_type = {self.spec.model_type!r} has no router. Set '
            'model.router to "auto".'
        )

    def hf_name(self, module: str) -> str:
        """Return transformers' path of this model's module `module`."""
        return module

    def peft_path(self, module: str) -> str:
        """Return the path of this model's module `module` in the model that PEFT loads.

        For the text model in a multimodal model, PEFT loads the adapter on the multimodal model.
        """
        path = self.hf_name(module)
        return path if self.spec.whole is None else self.spec.whole.module_path(path)

    def transposes_linears(self) -> bool:
        """Return whether transformers stores this family's linear weights as (in, out)."""
        return False

    def trained_spec(self) -> ModelSpec:
        """Return the spec of the trained model, including an adapter."""
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
            train_tokens=adapter.train_tokens,
        )

    def draws_masks(self) -> bool:
        """Return whether training draws dropout masks."""
        return bool(self.dropout or (self.adapter is not None and self.adapter.dropout))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., C) to logits (..., V)."""
        weight = self.head_weight()
        assert weight is not None, "a family without a plain linear head has its own logits()"
        found = functional.linear(hidden, weight)
        return found if self.trained_tokens is None else self.trained_tokens.replace(found, hidden)

    def token_losses(self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the cross entropy of every target, (B, T) fp32; 0 for `IGNORED_TARGET`.

        For `starts`, see `hidden`. On a pipeline stage before the last one, all losses are 0. A
        strategy can wrap this method like `forward`.
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
        chosen = self._chosen(targets, starts)
        some = self._head_loss().token_losses(*_rows(chosen, hidden, targets))
        losses.view(-1)[chosen] = some.squeeze(0)
        return losses

    def _chosen(self, targets: Tensor, starts: Tensor) -> Tensor:
        """Return the indices of the targets that are not ignored, among all B x T targets."""
        if self.layout is not None and self.layout.starts is starts:
            return self.layout.chosen
        return (targets.flatten() != IGNORED_TARGET).nonzero().flatten()

    def _head_loss(self) -> HeadLoss:
        """Return the implementation of head and loss that fits the model's current state."""
        weight = self.head_weight()
        if weight is None:
            return PlainHead(self.logits)
        if self.trained_tokens is not None:
            return TrainedTokensHead(weight, self.trained_tokens)
        if self.ranks is not None:
            return SplitHead(weight, self.ranks, vocab_rows=self.spec.head_rows())
        if self.kernels is not None:
            return FusedHead(weight, self.kernels)
        return (
            PlainHead(self.logits)
            if self.chunked_loss is None
            else FusedHead(weight, self.chunked_loss)
        )

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *more: Tensor
    ) -> Tensor:
        """Return the mean cross entropy over the targets, or the result of `objective`, a scalar.

        The result includes the routers' balancing loss, if config.json requests this loss.
        On a pipeline stage before the last one, return the activations for the next stage.
        Tokens and targets are (B, T) int64 within the vocabulary. For `starts`, see `hidden`.
        `more` are further inputs of the objective.
        """
        if self.objective is not None:
            losses = self._token_losses(tokens, targets, starts)
            return self._balanced(self.objective(losses, targets, *more), starts)
        hidden = self.hidden(tokens, starts=starts)
        if self.stage is not None and not self.stage.is_last():
            return hidden
        if starts is not None:
            # Only the answers have targets: the head computes only those positions.
            hidden, targets = _rows(self._chosen(targets, starts), hidden, targets)
        return self._balanced(self._head_loss().mean_loss(hidden, targets), starts)

    def _balanced(self, loss: Tensor, starts: Tensor | None) -> Tensor:
        if not self.has_router_loss():
            return loss
        balance = self.router_loss(padding_tokens(starts))
        return loss if balance is None else loss + balance


def _rows(chosen: Tensor, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states (1, N, C) and the targets (1, N) at the indices `chosen` (N,)."""
    picked = hidden.flatten(0, 1).index_select(0, chosen).unsqueeze(0)
    return picked, targets.flatten()[chosen].unsqueeze(0)


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and tensor of each parameter that is trained.

    All other code uses this definition. A frozen parameter has no optimizer state and takes no part
    in the gradient exchange, and the memory estimate includes neither.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
