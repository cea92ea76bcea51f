"""Any causal language model that transformers builds from its own code, as one of ours.

transformers' module does the layers; the loss is ours where the head is a plain linear layer and
nothing changes its logits afterwards. No code of a model's folder is ever run.
B batch, T tokens in this pass, C width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from payload.errors import CheckpointError, ConfigError
from payload.models.other import OtherSpec
from payload.models.spec import ModelSpec
from payload.train.models.base import CausalLM
from payload.train.models.saved import load_named, saved_config
from payload.untrusted import shown

MODEL_TYPES = ("*",)
"""Whatever no other family has."""

_Module = Any
"""transformers.PreTrainedModel, most of whose methods have no types."""
_Config = Any
"""transformers.PreTrainedConfig."""

_PROBE_TOKENS = 2
_ADAPTER_PARTS = (".lora_A", ".lora_B")
_PROBE_DOCUMENT = 8
# Buffers that old releases saved.
_UNUSED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


class ModelCache:
    """What the layers keep of the tokens seen so far: one for the whole model.

    Without one of transformers' key-value caches it keeps the tokens, and every pass makes all of
    them.
    """

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        """transformers' cache; None = `tokens` instead."""
        self.tokens: Tensor | None = None

    def num_tokens(self) -> int:
        """Return the number of tokens seen so far."""
        if self.kept is not None:
            return int(self.kept.get_seq_length())
        return 0 if self.tokens is None else self.tokens.shape[1]

    def extend(self, tokens: Tensor) -> Tensor:
        """Append new tokens; return all."""
        self.tokens = tokens if self.tokens is None else torch.cat((self.tokens, tokens), dim=1)
        return self.tokens


class TransformersLM(CausalLM):
    """A model whose layers are transformers' own."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dropout: float = 0.0,
        random: bool = True,
        reason: str = "our own layers do not have it",
    ) -> None:
        """Build the module from the spec's config; `reason` says why it is transformers' own."""
        module = build_module(spec, dropout, random=random)
        super().__init__(_counted(spec, module), dropout=dropout)
        self._reason = reason
        self.module = module
        self._not_plain = why_not_plain(self.module)
        self._mixes_documents: bool | None = None
        self._keeps_tokens = not _has_key_value_cache(self.module)
        self._matrices = frozenset(_hidden_matrices(self.module))
        self._dropped: tuple[str, ...] = ()
        """The output head's tensors, where it was taken off."""
        self._draws = _draws_in_training(self.module) if not dropout else True

    def hf_name(self, module: str) -> str:
        """Return transformers' path of a module."""
        return module.removeprefix("module.")

    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[ModelCache] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """(B, T) token ids to (B, T, C), what the head reads; to the logits without a plain head.

        With `caches`, `tokens` continue the ones seen before; `starts` are as in `CausalLM`.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        # A row of one document and padding needs nothing: no token sees those behind it.
        if starts is not None and not bool(((starts == 0) | (starts == places)).all()):
            self._require_documents()
            # transformers tells packed documents by positions that begin again.
            return self._run(tokens, position_ids=places - starts, use_cache=False)
        if not caches:
            return self._run(tokens, use_cache=False)
        (cache,) = caches
        if cache.kept is None:
            return self._run(cache.extend(tokens), use_cache=False)[:, -tokens.shape[1] :]
        return self._run(tokens, past_key_values=cache.kept, use_cache=True)

    def _run(self, tokens: Tensor, **options: Any) -> Tensor:
        if self._not_plain is None or self._dropped:
            made = self.module.base_model(input_ids=tokens, return_dict=True, **options)
            return cast(Tensor, made.last_hidden_state)
        return cast(Tensor, self.module(input_ids=tokens, return_dict=True, **options).logits)

    def draws_masks(self) -> bool:
        """Say whether a training pass draws random numbers: dropout's, or a router's."""
        return self._draws or super().draws_masks()

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) to (..., V)."""
        if self._not_plain is not None:
            return hidden
        return cast(Tensor, self._head()(hidden))

    def head_weight(self) -> nn.Parameter | None:
        """Return the head's weight (V, C) where it is a plain linear layer, else None."""
        if self._not_plain is not None:
            return None
        weight = self._head().weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def enable_checkpointing(self) -> None:
        """Keep a layer's input alone in training. Raises ConfigError where the layers cannot."""
        if not self.module.supports_gradient_checkpointing:
            raise ConfigError(
                f"memory.activation_checkpointing: transformers has none for model_type = "
                f"{self.spec.model_type!r}. Set it to off and lower batch.micro_batch_size."
            )
        enable = getattr(self.module, "activation_checkpointing_enable", None)
        # Older releases of transformers have it under this name alone.
        enable = enable or self.module.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def drop_head(self) -> None:
        """Take the output head off. Raises CheckpointError for a model that has none apart."""
        self.classifier_architecture()
        head = self.module.get_output_embeddings()
        name = next((name for name, each in self.module.named_modules() if each is head), None)
        if name is None or self.module.base_model is self.module:
            raise CheckpointError(
                f"model_type = {self.spec.model_type!r}: its output head cannot be taken off. Use "
                "a language model of another family."
            )
        self._dropped = tuple(f"{name}.{part}" for part in ("weight", "bias"))
        self.module.set_submodule(name, nn.Identity())

    def classifier_architecture(self) -> str:
        """Return the name of transformers' class for classification with this model.

        Raises CheckpointError where that is not the same body with a linear layer `score`.
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
            f"model_type = {self.spec.model_type!r}: transformers has no classifier for it that is "
            "its body and a linear layer 'score'. Use a language model of another family."
        )

    def new_caches(self) -> list[ModelCache]:
        """Return an empty cache; it is one for all layers."""
        if self._keeps_tokens:
            return [ModelCache(None)]
        from transformers import DynamicCache

        return [ModelCache(DynamicCache(config=self.module.config))]

    def tied_weight(self) -> nn.Parameter | None:
        """Return None: autograd adds up both parts of a tied embedding's gradient."""
        return None

    def is_hidden_matrix(self, name: str) -> bool:
        """Say whether the parameter of this name is a layer's matrix."""
        return name in self._matrices

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights as transformers' own `save_pretrained` names and shapes them."""
        from transformers.core_model_loading import revert_weight_conversion

        tied = self.module.all_tied_weights_keys
        state = {
            name: value.detach()
            for name, value in self.module.state_dict().items()
            if name not in tied
        }
        return dict(revert_weight_conversion(self.module, state))

    def hf_config(self) -> dict[str, Any]:
        """Return the content of config.json: the one that was read, for fp32 weights."""
        return saved_config(_raw(self.spec), architecture=type(self.module).__name__)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors, under the names of transformers.

        Raises CheckpointError, which names `where`, when some are missing or of another size.
        """
        tied = self.module.all_tied_weights_keys
        wanted = {k: v for k, v in self.module.state_dict().items() if k not in tied}
        if set(wanted) <= set(tensors):
            unused = (*tied, *_UNUSED, *self._dropped)
            load_named(wanted, tensors, unused=unused, where=where)
        else:
            self._load_converted(tensors, where=where)
        if not self._dropped:
            _require_causal(self.module)

    def _load_converted(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Load weights that transformers names or joins otherwise in memory than in files."""
        if self._dropped:
            raise CheckpointError(
                f"{where}: not the weights that config.json describes. Name the folder of a whole "
                "classifier."
            )
        kind = type(self.module)
        try:
            loaded, found = kind.from_pretrained(
                None,
                config=self.module.config,
                state_dict=dict(tensors),
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{where}: transformers cannot load it ({first_line(error)}). Name the folder of a "
                "whole model."
            ) from None
        for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
            names = sorted(str(each) for each in found.get(what) or ())
            if names:
                raise CheckpointError(
                    f"{where}: not the weights that config.json describes: {len(names)} "
                    f"{what.partition('_')[0]} (first: {names[:1]}). Name the folder of a whole "
                    "model."
                )
        self.module = loaded.train(self.module.training)

    def speed_notes(self) -> list[str]:
        """Say what runs on the reference although kernels were asked for, and why; a line each."""
        notes = [f"{self.spec.model_type}: transformers' layers: {self._reason}"]
        if self._not_plain is not None:
            notes.append(f"the loss keeps all logits at once: {self._not_plain}")
        if self._draws and not self.dropout:
            notes.append("training draws random numbers (a router that samples), by model and seed")
        if self._keeps_tokens:
            notes.append("generation computes every token again: the model has no key-value cache")
        return notes

    def _require_documents(self) -> None:
        """Raise ConfigError where a token of one document reaches another one.

        A pass with random tokens shows it, once.
        """
        if self._mixes_documents is None:
            self._mixes_documents = mixes_documents(self.module)
        if self._mixes_documents:
            raise ConfigError(
                f"model_type = {self.spec.model_type!r}: transformers' layers do not keep the "
                "conversations of a block apart. Prepare the data with --packing none."
            )

    def _head(self) -> nn.Linear:
        return cast(nn.Linear, self.module.get_output_embeddings())


def build_module(spec: ModelSpec, dropout: float, *, random: bool) -> _Module:
    """Return transformers' module for the spec's config.json, in fp32.

    Raises CheckpointError for a model that it has no code of its own for, or none that predicts
    the next token.
    """
    config = module_config(_raw(spec), where="config.json", dropout=dropout)
    kind = module_class(config)
    try:
        with nullcontext() if random else _without_initialisation():
            module = kind._from_config(config, dtype=torch.float32)
    except Exception as error:  # Sizes that do not fit fail anywhere in transformers' code.
        raise CheckpointError(
            f"config.json: transformers cannot build it ({first_line(error)}). Name the folder of "
            "a whole model."
        ) from None
    module.tie_weights()  # Part of the initialisation that is left out.
    if random:
        _require_causal(module)
    return module


def module_config(raw: Mapping[str, Any], *, where: str, dropout: float) -> _Config:
    """Return transformers' own configuration of a config.json, every dropout set to `dropout`.

    Raises CheckpointError for a model that needs code from its own folder, and for a quantised one.
    """
    from transformers import CONFIG_MAPPING

    name = raw.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        remote = " and would run code of its own (auto_map)" if "auto_map" in raw else ""
        raise CheckpointError(
            f"{where}: model_type = {shown(name)}: this transformers does not have it{remote}. "
            "Use a model that transformers builds from its own code."
        )
    if "quantization_config" in raw:
        raise CheckpointError(
            f"{where}: quantization_config: quantised weights cannot be trained. Name the "
            "model's folder in bf16 or fp32."
        )
    plain = {key: value for key, value in raw.items() if key != "auto_map"}
    try:
        config = CONFIG_MAPPING[name].from_dict(plain)
    except Exception as error:  # Each family checks its own fields, in its own way.
        raise CheckpointError(
            f"{where}: transformers refuses it ({first_line(error)}). Correct config.json."
        ) from None
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, int | float):
            setattr(config, key, type(value)(dropout) if value in (True, False) else dropout)
    return config


def module_class(config: _Config) -> Any:
    """Return transformers' class for predicting the next token. Raises CheckpointError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_text_alone = kind is not None and not kind.__name__.endswith("ForConditionalGeneration")
    if not is_text_alone or getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"config.json: model_type = {shown(config.model_type)}: transformers has no causal "
            "language model of text alone for it. Use the model's text-only version."
        )
    return kind


def why_not_plain(module: _Module) -> str | None:
    """Return None when the logits are a linear layer of the last hidden state, else the reason.

    A pass whose hidden state and logits are replaced by numbers of ours shows whether anything
    happens to either on its way. It does not depend on the weights, so all ranks agree.
    """
    head = module.get_output_embeddings()
    body = module.base_model
    if type(head) is not nn.Linear:
        return f"the head is {type(head).__name__}, not a plain linear layer"
    if head.bias is not None:
        return "the head has a bias"
    if body is module:
        return "the module without its head is not to be had"
    generator = torch.Generator().manual_seed(0)
    width, words = head.in_features, head.out_features
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=generator)
    logits = 100 * torch.randn(1, _PROBE_TOKENS, words, generator=generator)
    read: list[Tensor] = []

    def replace_hidden(_: object, __: object, made: Any) -> Any:
        made["last_hidden_state" if "last_hidden_state" in made else 0] = hidden
        return made

    def replace_logits(_: object, inputs: tuple[Tensor, ...], __: object) -> Tensor:
        read.append(inputs[0])
        return logits

    hooks: list[RemovableHandle] = [
        body.register_forward_hook(replace_hidden),
        head.register_forward_hook(replace_logits),
    ]
    try:
        made = _probed(module, torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64))
    finally:
        for hook in hooks:
            hook.remove()
    if len(read) != 1 or not torch.equal(read[0], hidden):
        return "the hidden state changes on its way to the head"
    if not torch.equal(made, logits):
        return "the logits change behind the head (a scale or a soft cap)"
    return None


def _counted(spec: ModelSpec, module: _Module) -> ModelSpec:
    """Return the spec with its parameters counted, where config.json alone did not tell them."""
    if not isinstance(spec, OtherSpec) or spec.counts is not None:
        return spec
    return spec.with_tensors({name: tuple(each.shape) for name, each in module.named_parameters()})


def first_line(error: Exception) -> str:
    """Return the first line of the error's text, or its class without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _raw(spec: ModelSpec) -> Mapping[str, Any]:
    """Return config.json as it was read."""
    return cast("Mapping[str, Any]", spec.config)  # type: ignore[attr-defined]


def mixes_documents(module: _Module) -> bool:
    """Say whether a document's logits depend on the one before it in the same row."""
    width = int(module.get_output_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(
        width, (3, 1, _PROBE_DOCUMENT), generator=generator
    ).unbind()
    positions = torch.arange(_PROBE_DOCUMENT).repeat(2)[None]
    made = []
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for before in (first, other):
                tokens = torch.cat((before, second), dim=1)
                found = module(
                    input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True
                )
                made.append(found.logits[:, _PROBE_DOCUMENT:])
    except TypeError:  # It takes no positions.
        return True
    finally:
        module.train(was_training)
    return not torch.equal(*made)


def _has_key_value_cache(module: _Module) -> bool:
    if module._is_stateful:
        return False
    return "past_key_values" in inspect.signature(module.base_model.forward).parameters


def _hidden_matrices(module: _Module) -> set[str]:
    """Return the names, in the CausalLM, of the linear layers' weights but the head's."""
    head = module.get_output_embeddings()
    return {
        f"module.{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head and part.weight.dim() == 2
    }


def _probed(module: _Module, tokens: Tensor, *, training: bool = False) -> Tensor:
    """Return the logits of a few tokens. Raises CheckpointError when transformers' code fails."""
    was_training = module.training
    module.train(training)
    try:
        with torch.no_grad():
            return cast(Tensor, module(input_ids=tokens, use_cache=False, return_dict=True).logits)
    except Exception as error:  # As in build_module.
        raise CheckpointError(
            f"config.json: transformers cannot run it ({first_line(error)}). Name the folder of a "
            "whole model."
        ) from None
    finally:
        module.train(was_training)


def _draws_in_training(module: _Module) -> bool:
    """Say whether a pass in training differs from the next one, as where a router samples.

    The seed of a pass then makes it the same at a resume, as it does with dropout.
    """
    before = torch.random.get_rng_state()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
    _probed(module, tokens, training=True)
    drawn = not torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(before)
    return drawn


def _require_causal(module: _Module) -> None:
    """Raise CheckpointError when a token's logits depend on the tokens behind it."""
    pairs = (torch.tensor([[0, other]]) for other in (1, 2))
    first, second = (_probed(module, each)[0, 0] for each in pairs)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise CheckpointError(
            f"config.json: model_type = {shown(module.config.model_type)}: each token sees those "
            "behind it, so it cannot learn to predict the next one. Use a causal language model."
        )


def _without_initialisation() -> AbstractContextManager[None]:
    from transformers.initialization import no_init_weights

    return cast("AbstractContextManager[None]", no_init_weights())


def build(spec: ModelSpec, *, dropout: float = 0.0, random: bool = True) -> TransformersLM:
    """Build the model of this spec."""
    return TransformersLM(spec, dropout=dropout, random=random)
