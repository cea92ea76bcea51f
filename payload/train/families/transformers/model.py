"""Any causal language model that transformers builds from its own code, as a CausalLM.

transformers' module computes the layers. This project's loss is used if the head is a plain linear
layer and the module does not change the logits afterwards. Code in a model's folder is never run.
Shapes: B batch, T tokens of the input, C width, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from payload.core.errors import CheckpointError, ConfigError
from payload.models.spec import LinearSize, ModelSpec, ParameterSize
from payload.models.transformers.spec import OtherSpec, is_adaptable, is_of_experts
from payload.train.families.transformers.from_config import (
    build_module,
    raw_config,
    without_load_report,
)
from payload.train.families.transformers.probes import (
    draws_in_training,
    first_line,
    mixes_documents,
    require_causal,
    why_not_plain,
)
from payload.train.families.transformers.router import (
    RouterLoss,
    TokenCounts,
    balance_note,
    router_parameters,
)
from payload.train.models.base import CausalLM
from payload.train.models.hf_layout import (
    load_named,
    require_tied,
    require_weight,
    saved_config,
)
from payload.train.models.lora import LoraParameters, is_plain_linear
from payload.train.models.quantized import QuantizedLinear, loading_targets
from payload.train.tensors.lazy_tensors import DeferredTensor, PlannedTensors

_Module = Any
"""transformers.PreTrainedModel. Most of its methods have no type hints."""

_EXPERT_LINEARS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of an expert's linears. Source: PEFT, utils/transformers_weight_conversion.py,
`_MOE_TARGET_MODULE_MAPPING`."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ADAPTER_PARTS = (".lora_A", ".lora_B", ".lora_magnitude_vector")
# Buffers saved by old releases.
_UNUSED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


class ModelCache:
    """Cache of all layers for the tokens processed so far.

    If transformers has no key-value cache for the model, this object keeps the tokens, and every
    call computes all of them again.
    """

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        """transformers' cache; None = keep `tokens`."""
        self.tokens: Tensor | None = None

    def num_tokens(self) -> int:
        """Return the number of tokens processed so far."""
        if self.kept is not None:
            return int(self.kept.get_seq_length())
        return 0 if self.tokens is None else self.tokens.shape[1]

    def extend(self, tokens: Tensor) -> Tensor:
        """Append new tokens; return all tokens."""
        self.tokens = tokens if self.tokens is None else torch.cat((self.tokens, tokens), dim=1)
        return self.tokens


class TransformersLM(CausalLM):
    """A model with transformers' own layers."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dropout: float = 0.0,
        random: bool = True,
        reason: str = "our own layers do not support it",
    ) -> None:
        """Build the module from the spec's config.

        The log gives `reason` as the reason for not using this project's layers.
        """
        module = build_module(spec, dropout, random=random)
        super().__init__(_counted(spec, module), dropout=dropout)
        self._reason = reason
        self.module = module
        self._base_not_plain = self._not_plain = why_not_plain(self.module)
        self._watch_routers()
        self._mixes_documents: bool | None = None
        self._keeps_tokens = not _has_key_value_cache(self.module)
        self._matrices = frozenset(_hidden_matrices(self.module))
        self.spec = _with_modules(self.spec, self.module)
        self._dropped: tuple[str, ...] = ()
        """The output head's tensors, if it was removed."""
        self._draws = draws_in_training(self.module) if not dropout else True

    def head_changed(self) -> None:
        """Compute the loss from the logits while the head has an adapter."""
        self._not_plain = self._base_not_plain
        head: nn.Module = self._head()
        if not self._dropped and isinstance(head, LoraParameters):
            self._not_plain = self._not_plain or "the head has an adapter"

    def embedding_module(self) -> str:
        """Return the path of the token embedding."""
        return self._path(self.module.get_input_embeddings())

    def head_module(self) -> str | None:
        """Return the path of the output head, or None if it was removed."""
        return None if self._dropped else self._path(self._head())

    def _path(self, module: nn.Module) -> str:
        return next(
            f"module.{name}" for name, each in self.module.named_modules() if each is module
        )

    def _resize_vocabulary(self, rows: int) -> None:
        """Resize the vocabulary; transformers also changes its config and tied weights.

        Raises CheckpointError for a model whose vocabulary cannot grow.
        """
        if reason := self.spec.why_fixed_vocabulary():
            raise CheckpointError(
                f"the vocabulary of {self.spec.vocab_size:,} tokens cannot grow to {rows:,}: "
                f"{reason}. Use only tokens of the model."
            )
        self.module.resize_token_embeddings(rows, mean_resizing=False)

    def hf_name(self, module: str) -> str:
        """Return transformers' path of a module."""
        return module.removeprefix("module.")

    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[ModelCache] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T) token ids to the head's input (B, T, C).

        If the head is not plain, return logits.

        With `caches`, `tokens` continue the cached tokens. `CausalLM.hidden` describes `starts`.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        # Rows with one document and padding need no positions: no token attends to a later one.
        if starts is not None and not bool(((starts == 0) | (starts == places)).all()):
            self._require_documents()
            # transformers detects packed documents by positions that restart.
            return self._run(tokens, position_ids=places - starts, use_cache=False)
        if not caches:
            return self._run(tokens, use_cache=False)
        (cache,) = caches
        if cache.kept is None:
            return self._run(cache.extend(tokens), use_cache=False)[:, -tokens.shape[1] :]
        return self._run(tokens, past_key_values=cache.kept, use_cache=True)

    def _run(self, tokens: Tensor, **options: Any) -> Tensor:
        is_plain = self._not_plain is None or bool(self._dropped)
        balances = self.has_router_loss() and torch.is_grad_enabled()
        if balances:
            options["output_router_logits"] = True
        called = self.module.base_model if is_plain else self.module
        made = called(input_ids=tokens, return_dict=True, **options)
        if balances:
            self._router_loss.keep(made)
        return cast(Tensor, made.last_hidden_state if is_plain else made.logits)

    def _watch_routers(self) -> None:
        self._router_loss = RouterLoss(self.module)
        self._token_counts = TokenCounts(self.module, experts=_experts(self.spec))

    def has_router_loss(self) -> bool:
        """Return whether training adds the load-balancing loss; False for a classifier."""
        return self._router_loss.is_on() and not self._dropped and not self.without_router_loss

    def router_loss(self, padding: Tensor | None = None) -> Tensor | None:
        """Return the weighted load-balancing loss of the last forward pass, or None."""
        return self._router_loss.take(padding)

    def take_expert_tokens(self) -> Tensor:
        """Return the number of tokens of each expert in training since the last call."""
        return self._token_counts.take()

    def freeze_router(self) -> Collection[str]:
        """Freeze the routers. Raises ConfigError for a model without routers."""
        found = router_parameters(self.module, experts=_experts(self.spec))
        if not found:
            return super().freeze_router()
        for parameters in found.values():
            for parameter in parameters:
                parameter.requires_grad_(False)
        return found.keys()

    def draws_masks(self) -> bool:
        """Return whether training draws random numbers: for dropout or in a router."""
        return self._draws or super().draws_masks()

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., C) to logits (..., V)."""
        if self._not_plain is not None:
            return hidden
        return cast(Tensor, self._head()(hidden))

    def head_weight(self) -> nn.Parameter | None:
        """Return the head's weight (V, C) if it is a plain linear layer, or None."""
        if self._not_plain is not None:
            return None
        weight = self._head().weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def enable_checkpointing(self) -> None:
        """Keep only each layer's input in training. Raises ConfigError if unsupported."""
        if not self.module.supports_gradient_checkpointing:
            raise ConfigError(
                "memory.activation_checkpointing: not supported by transformers for model_type = "
                f"{self.spec.model_type!r}. Set activation_checkpointing to off and lower "
                "batch.micro_batch_size."
            )
        enable = getattr(self.module, "activation_checkpointing_enable", None)
        # Older releases of transformers have only this name.
        enable = enable or self.module.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def drop_head(self) -> None:
        """Remove the output head. Raises CheckpointError for a model without a separate head."""
        self.classifier_architecture()
        head = self.module.get_output_embeddings()
        name = next((name for name, each in self.module.named_modules() if each is head), None)
        if name is None or self.module.base_model is self.module:
            raise CheckpointError(
                f"model_type = {self.spec.model_type!r}: its output head cannot be removed. Use "
                "a language model of another family."
            )
        self._dropped = tuple(f"{name}.{part}" for part in ("weight", "bias"))
        self.module.set_submodule(name, nn.Identity())

    def classifier_architecture(self) -> str:
        """Return the name of transformers' classification class for this model.

        Raises CheckpointError unless this class has the same layers and a linear layer `score`.
        """
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

        kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(self.module.config), None)
        if kind is not None:
            with torch.device("meta"):
                theirs = kind(self.module.config)
            prefix = f"{self.module.base_model_prefix}."
            ours = {
                name
                for name in self.module.state_dict()
                if name.startswith(prefix) and not name.endswith(_ADAPTER_PARTS)
            }
            if set(theirs.state_dict()) == ours | {"score.weight"}:
                return str(kind.__name__)
        raise CheckpointError(
            f"model_type = {self.spec.model_type!r}: transformers has no classifier for this model "
            "that ends with a linear layer 'score'. Use a language model of another family."
        )

    def new_caches(self) -> list[ModelCache]:
        """Return a list of one empty cache, which serves all layers."""
        if self._keeps_tokens:
            return [ModelCache(None)]
        from transformers import DynamicCache

        return [ModelCache(DynamicCache(config=self.module.config))]

    def layers(self) -> Sequence[nn.Module]:
        """Return the modules of the classes in transformers' `_no_split_modules`; may be empty."""
        names = set(getattr(self.module, "_no_split_modules", None) or ())
        return [each for each in self.module.modules() if type(each).__name__ in names]

    def is_adaptable(self, linear: str) -> bool:
        """Return whether the linear at this path can have an adapter."""
        return is_adaptable(self.spec.model_type, linear)

    def peft_reads_as_expert(self, linear: str) -> bool:
        """Return whether PEFT would mistake this linear's name for the name of an expert's linear.

        PEFT converts adapters of older releases of transformers, which had no fused experts.
        """
        others = self.parameters_beside_linears()
        has_fused = any(each.name.endswith("experts.gate_up_proj") for each in others)
        return has_fused and linear.rpartition(".")[2] in _EXPERT_LINEARS

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is a layer's matrix."""
        return name in self._matrices

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights with the names and shapes of transformers' `save_pretrained`."""
        from transformers.core_model_loading import revert_weight_conversion

        tied = self.module.all_tied_weights_keys
        state = {
            name: value.detach()
            for name, value in self.module.state_dict().items()
            if name not in tied
        }
        return dict(revert_weight_conversion(self.module, state))

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of the config.json that was read, changed for fp32 weights."""
        return saved_config(raw_config(self.spec), architecture=type(self.module).__name__)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Raises CheckpointError, naming `where`, if tensors are missing or do not have the model's
        shapes.
        """
        tied = self.module.all_tied_weights_keys
        if self.has_names_of(tensors):
            unused = (*tied, *_UNUSED, *self._dropped, *self._ignored(tensors))
            load_named(self._targets(), tensors, unused=unused, where=where)
        else:
            self._load_converted(tensors, where=where)
        for head, embedding in tied.items():
            if head in tensors:
                # Names in files can differ from the module's.
                named = embedding in tensors
                value = tensors[embedding] if named else self.module.state_dict()[embedding]
                found = {head: tensors[head], embedding: value}
                require_tied(found, head=head, embedding=embedding, where=where)
        is_unread = isinstance(tensors, PlannedTensors) and bool(tensors.targets)
        if not self._dropped and not is_unread:
            require_causal(self.module, without_head=self._not_plain is None)

    def _ignored(self, names: Iterable[str]) -> list[str]:
        """Return the names of tensors that transformers ignores, such as those of MTP layers."""
        own = self.module.state_dict()
        patterns = self.module._keys_to_ignore_on_load_unexpected or ()
        return [
            name
            for name in names
            if name not in own and any(re.search(each, name) for each in patterns)
        ]

    def has_names_of(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether `tensors` has a tensor for the name of every weight in the module."""
        return set(self._targets()) <= set(tensors)

    def _targets(self) -> dict[str, Tensor | QuantizedLinear]:
        tied = self.module.all_tied_weights_keys
        state = {k: v for k, v in self.module.state_dict().items() if k not in tied}
        return loading_targets(self.module, state)

    def _load_converted(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Load weights whose names or shapes transformers changes while loading."""
        if self._dropped:
            raise CheckpointError(
                f"{where}: does not contain the weights that config.json describes. Use a folder "
                "with all weights of a classifier."
            )
        if any(isinstance(each, QuantizedLinear) for each in self.module.modules()):
            raise CheckpointError(
                f"{where}: transformers converts the weights of model_type = "
                f"{self.spec.model_type!r} while loading, so they cannot be quantised. Use "
                'model.quantize = "none".'
            )
        kind, own = type(self.module), self.module.state_dict()
        # Before the conversion, a tensor can have another path, but it has the same last name.
        integers = {
            name.rpartition(".")[2] for name, each in own.items() if not each.is_floating_point()
        }
        for name in tensors:
            if name.rpartition(".")[2] not in integers and not name.endswith(_UNUSED):
                require_weight(tensors, name, where=where)
        try:
            with without_load_report():
                loaded, found = kind.from_pretrained(
                    None,
                    config=self.module.config,
                    state_dict={name: DeferredTensor(tensors, name) for name in tensors},
                    dtype=torch.float32,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{where}: transformers cannot load this model ({first_line(error)}). Use a "
                "folder with the model's config.json and all its weight files."
            ) from None
        for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
            names = sorted(str(each) for each in found.get(what) or ())
            if names:
                raise CheckpointError(
                    f"{where}: does not contain the weights that config.json describes: "
                    f"{len(names)} {what.partition('_')[0]} (first: {names[0]}). Use a folder "
                    "with the model's config.json and all its weight files."
                )
        self.module = loaded.train(self.module.training)
        self._watch_routers()

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        notes = [f"{self.spec.model_type}: transformers' layers: {self._reason}"]
        if self._not_plain is not None:
            notes.append(f"the loss keeps all logits in memory: {self._not_plain}")
        if self._draws and not self.dropout:
            notes.append("training draws random numbers (a sampling router); run.seed seeds them")
        if self.has_router_loss():
            notes.append(balance_note(self._router_loss.coefficient()))
        if self._keeps_tokens:
            notes.append("generation recomputes every token: the model has no key-value cache")
        return notes

    def _require_documents(self) -> None:
        """Raise ConfigError if tokens of one document can attend to another document.

        Runs random tokens through the model once.
        """
        if self._mixes_documents is None:
            self._mixes_documents = mixes_documents(self.module)
        if self._mixes_documents:
            raise ConfigError(
                f"model_type = {self.spec.model_type!r}: transformers' layers do not separate the "
                "conversations of a block. Prepare the data with --packing none."
            )

    def _head(self) -> nn.Linear:
        return cast(nn.Linear, self.module.get_output_embeddings())


def _counted(spec: ModelSpec, module: _Module) -> ModelSpec:
    """Return the spec; count its parameters first if config.json does not determine them."""
    if spec.is_counted():
        return spec
    return spec.with_tensors({name: tuple(each.shape) for name, each in module.named_parameters()})


def _with_modules(spec: ModelSpec, module: _Module) -> ModelSpec:
    """Return the spec with the module's linears, and the other parameters that PEFT can adapt."""
    if not isinstance(spec, OtherSpec):
        return spec
    head, tied = module.get_output_embeddings(), module.all_tied_weights_keys
    linears, others = [], []
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and part is not head:
            if not is_plain_linear(part) or not is_adaptable(spec.model_type, path):
                continue
            outputs, inputs = part.weight.shape
            expert = is_of_experts(path, (outputs, inputs), spec.experts)
            linears.append(LinearSize(f"module.{path}", inputs, outputs, is_expert=expert))
            continue
        for name, parameter in part.named_parameters(recurse=False):
            shape, full = tuple(parameter.shape), f"{path}.{name}"
            is_matrix = len(shape) in (2, 3) and not name.endswith("bias")
            # A change of a tied weight would also change the other weight.
            if not is_matrix or isinstance(part, _CONVOLUTIONS) or full in {*tied, *tied.values()}:
                continue
            # As in PEFT: most stacks of experts are (experts, out, in).
            is_transposed = len(shape) == 3 and getattr(part, "is_transposed", False)
            inputs, outputs = shape[-2:] if is_transposed else (shape[-1], shape[-2])
            others.append(
                ParameterSize(
                    f"module.{full}",
                    inputs,
                    outputs,
                    stack=math.prod(shape[:-2]),
                    is_expert=is_of_experts(full, shape, spec.experts),
                )
            )
    return spec.with_modules(tuple(linears), tuple(others))


def _experts(spec: ModelSpec) -> int:
    return spec.experts if isinstance(spec, OtherSpec) else 0


def _has_key_value_cache(module: _Module) -> bool:
    if module._is_stateful:
        return False
    return "past_key_values" in inspect.signature(module.base_model.forward).parameters


def _hidden_matrices(module: _Module) -> set[str]:
    """Return the CausalLM's parameter names of all linear weights, except the head's."""
    head = module.get_output_embeddings()
    return {
        f"module.{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head and part.weight.dim() == 2
    }


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> TransformersLM:
    """Build the model of this spec."""
    return TransformersLM(spec, dropout=dropout, random=random)
