"""Classifiers in transformers' layout: a body (language model without head) and a linear `score`.

`score` reads the hidden state of a text's last token, as in transformers'
`...ForSequenceClassification`. B texts, T tokens, C width, K labels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.models.classifier import ClassifierSpec
from payload.models.spec import ParameterSize
from payload.train.losses.classification import Classification
from payload.train.models.base import CausalLM
from payload.train.models.hf_layout import require_tensors
from payload.train.models.text_rows import pack_texts
from payload.train.tensors.lazy_tensors import copy_in, without

SCORE = "score.weight"
_SINGLE_LABEL = "single_label_classification"
_SUFFIX = "ForSequenceClassification"
_BODY = "body."
_INIT_STD = 0.02


class Classifier(CausalLM):
    """A language model that assigns one of `labels` to each text."""

    def __init__(
        self,
        body: CausalLM,
        *,
        labels: Sequence[str],
        pad_token: int,
        label_tokens: Sequence[Sequence[int]] = (),
        random: bool = True,
    ) -> None:
        """Use `body` and drop its output head. `score` is random, or left for the caller to set.

        `label_tokens` are the tokens of each label's name. If they are given, a label's row of
        `score` is the mean of the head's rows for these tokens. The label's first logit is then the
        mean logit of these tokens. A body without `head_weight` always gets a random `score`.
        """
        super().__init__(ClassifierSpec.of(body.spec, num_labels=len(labels)), dropout=body.dropout)
        head = body.head_weight() if label_tokens else None
        named = None if head is None else _name_rows(head, label_tokens)
        body.drop_head()
        body.has_single_tokens = True
        self.body = body
        self.labels = tuple(labels)
        self.pad_token = pad_token
        """Token that pads the shorter texts of a batch. Such tokens at the end of a text count as
        padding."""
        self.objective = Classification()
        self.score = nn.Linear(body.spec.width(), len(labels), bias=False)
        if named is not None:
            self.score.weight = nn.Parameter(named)
        elif random:
            nn.init.normal_(self.score.weight, std=_INIT_STD)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute. If the body's layers read the attribute, also set it on the body."""
        super().__setattr__(name, value)
        if name in ("kernels", "adapter", "attends_by_document") and "body" in self._modules:
            setattr(self.body, name, value)

    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[Any] | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T) token ids to hidden states (B, T, C) after the final norm."""
        return self.body.hidden(tokens, caches, starts)

    def draws_masks(self) -> bool:
        """Return whether training draws random numbers."""
        return super().draws_masks() or self.body.draws_masks()

    def class_logits(self, tokens: Tensor) -> Tensor:
        """Map (B, T) padded token ids to logits (B, K) fp32.

        If the body supports packing (`packs_documents`), the texts are packed without padding
        before the layers.
        """
        last = last_tokens(tokens, pad_token=self.pad_token)
        if not self.body.packs_documents:
            hidden = self.hidden(tokens)
            return self.logits(hidden[torch.arange(len(tokens), device=tokens.device), last])
        width = self.spec.width()
        rows = pack_texts(tokens, last + 1, pad_token=self.pad_token, width=width)
        hidden = self.hidden(rows.tokens, starts=rows.starts)
        return self.logits(hidden.flatten(0, 1)[rows.last])

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., C) to logits (..., K), in fp32 for any dtype of the layers."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.score.weight)

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *more: Tensor
    ) -> Tensor:
        """Return the loss of the texts' labels (B,), a scalar."""
        assert starts is None and not more, "a row has one text"
        assert self.objective is not None
        return self.objective(self.class_logits(tokens), targets)

    def enable_checkpointing(self) -> None:
        """Keep only each layer's input in training."""
        self.body.enable_checkpointing()

    def drop_head(self) -> None:
        """Do nothing, because the output head is already dropped."""

    def head_weight(self) -> nn.Parameter | None:
        """Return None, because a classifier has no head that predicts tokens."""
        return None

    def tied_weight(self) -> nn.Parameter | None:
        """Return None, because the token embedding is not tied."""
        return None

    def new_caches(self) -> Sequence[Any]:
        """Return empty key-value caches for the layers of the body."""
        return self.body.new_caches()

    def layers(self) -> Sequence[nn.Module]:
        """Return the body's layers."""
        return self.body.layers()

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether the parameter `name` is a layer's matrix."""
        return name.startswith(_BODY) and self.body.is_hidden_matrix(name.removeprefix(_BODY))

    def trained_beside_adapter(self) -> dict[str, nn.Parameter]:
        """Return `score`, which is trained in full together with an adapter."""
        weight = self.score.weight
        assert isinstance(weight, nn.Parameter)
        return {SCORE: weight}

    def joined_linears(self) -> list[tuple[str, ...]]:
        """Return the paths of the body's linears."""
        return [tuple(f"{_BODY}{path}" for path in paths) for paths in self.body.joined_linears()]

    def take_expert_tokens(self) -> Tensor:
        """Return how many tokens each of the body's experts received."""
        return self.body.take_expert_tokens()

    def freeze_router(self) -> Collection[str]:
        """Freeze the body's routers. Raises ConfigError for a body without routers."""
        return self.body.freeze_router()

    def is_adaptable(self, linear: str) -> bool:
        """Return whether the body's linear at this path can have an adapter."""
        return self.body.is_adaptable(linear)

    def peft_reads_as_expert(self, linear: str) -> bool:
        """Return whether PEFT takes this linear for an expert's linear, because of its name."""
        return self.body.peft_reads_as_expert(linear)

    def parameters_beside_linears(self) -> tuple[ParameterSize, ...]:
        """Return the body's parameters that an adapter can target; the head is dropped."""
        kept = {name for name, _ in self.body.named_parameters()}
        found = [each for each in self.body.parameters_beside_linears() if each.name in kept]
        return tuple(replace(each, name=f"{_BODY}{each.name}") for each in found)

    def embedding_module(self) -> str:
        """Return the path of the body's token embedding."""
        return f"{_BODY}{self.body.embedding_module()}"

    def head_module(self) -> None:
        """Return None, because the output head is dropped."""

    def _resize_vocabulary(self, rows: int) -> None:
        self.body.add_tokens(rows, rows)

    def hf_name(self, module: str) -> str:
        """Return transformers' path of a module."""
        if not module.startswith(_BODY):
            return module
        return self.body.hf_name(module.removeprefix(_BODY))

    def transposes_linears(self) -> bool:
        """Return whether transformers stores the layers' linear weights as (in, out)."""
        return self.body.transposes_linears()

    def classifier_architecture(self) -> str:
        """Return the name of transformers' classification class for the body."""
        return self.body.classifier_architecture()

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the weights with transformers' names and layout."""
        return {**self.body.hf_tensors(), SCORE: self.score.weight.detach()}

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of config.json for transformers to build the same classifier."""
        return {**self.body.hf_config(), **self.hf_labels()}

    def hf_labels(self) -> dict[str, Any]:
        """Return the keys that turn the body's config.json into a classifier's config.json."""
        return {
            "architectures": [self.classifier_architecture()],
            "id2label": {str(number): label for number, label in enumerate(self.labels)},
            "label2id": {label: number for number, label in enumerate(self.labels)},
            # With the base's `num_labels`, transformers would invent labels.
            "num_labels": len(self.labels),
            "pad_token_id": self.pad_token,
            "problem_type": _SINGLE_LABEL,
        }

    def load_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Set all weights from a checkpoint's tensors with transformers' names.

        Raises CheckpointError, naming `where`, if tensors are missing or do not have the model's
        shapes.
        """
        require_tensors(
            {SCORE: self.score.weight},
            {name: tensors[name] for name in tensors if name == SCORE},
            where=where,
            source=f"its {len(self.labels)} labels need",
            fix="Use a folder with the classifier's config.json and all its weight files.",
        )
        copy_in(tensors, SCORE, self.score.weight)
        self.body.load_tensors(without(tensors, SCORE), where=where)

    def speed_notes(self) -> list[str]:
        """Return one line for each part that runs without the requested kernels, and why."""
        return self.body.speed_notes()


def _name_rows(head: Tensor, label_tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return, for each label, the mean of the head's rows (V, C) for the label's tokens.

    The result is (K, C) in fp32.

    Source: Gao et al., https://arxiv.org/abs/2012.15723, section 4, which predicts labels by the
    output head.
    """
    return torch.stack([head.detach()[list(each)].float().mean(0) for each in label_tokens])


def last_tokens(tokens: Tensor, *, pad_token: int) -> Tensor:
    """Return the index of each text's last token that is not `pad_token`, (B,).

    The index is 0 for a text that has only `pad_token`.

    Source: transformers, modeling_layers.py, GenericForSequenceClassification.
    """
    places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    return (places * (tokens != pad_token).int()).argmax(-1)


def is_classifier(config: Mapping[str, object]) -> bool:
    """Return whether a config.json describes a classifier."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_SUFFIX) for name in names)


def saved_labels(
    config: Mapping[str, object], *, where: str, is_own: bool = False
) -> tuple[str, ...]:
    """Return the labels of a classifier's config.json. Raises CheckpointError.

    `is_own` is True for a run's checkpoint. Its `num_labels` is not checked, because older versions
    stored the base's value.
    """
    raw = config.get("id2label")
    named = raw if isinstance(raw, dict) else {}
    labels = [named.get(str(number)) for number in range(len(named))]
    if len(set(labels)) < 2 or not all(isinstance(label, str) for label in labels):
        raise CheckpointError(
            f"{where}: id2label must contain two or more different labels, numbered from 0. Use "
            "the folder of a classifier."
        )
    if (kind := config.get("problem_type")) not in (None, _SINGLE_LABEL):
        raise CheckpointError(
            f"{where}: problem_type = {shown(kind)}, but only classifiers that assign exactly one "
            "label to a text are supported. Use another classifier."
        )
    if (number := config.get("num_labels")) not in (None, len(labels)) and not is_own:
        raise CheckpointError(
            f"{where}: num_labels = {shown(number)}, but id2label has {len(labels)} labels. Use "
            "another classifier."
        )
    return tuple(str(label) for label in labels)


def saved_pad_token(config: Mapping[str, object], *, where: str) -> int:
    """Return pad_token_id of a classifier's config.json. Raises CheckpointError."""
    found = config.get("pad_token_id")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise CheckpointError(
            f"{where}: pad_token_id = {found!r}: must be a token of the model. Set this key to the "
            "tokenizer's padding token."
        )
    return found
