"""Merges a LoRA adapter into its base model, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.errors import CheckpointError
from payload.export.hf_weight_reader import InMemoryWeights, WeightFiles
from payload.export.merge_rounding import MergeRounding
from payload.models.adapter import token_ids
from payload.weights.adapter_files import read_adapter_config

if TYPE_CHECKING:
    from torch import Tensor

    from payload.train.models.base import CausalLM
    from payload.train.tensors.lazy_tensors import PlannedTensors


def merged_weights(base: Path, adapter: Path, *, rounding: MergeRounding) -> WeightFiles:
    """Return the weights of a base with an adapter merged into it.

    `rounding` receives each merged tensor when the tensor is read, or earlier. A model that
    transformers converts while loading is held completely in memory. Raises CheckpointError for
    models that training rejects.
    """
    from payload.train.models.loading import plan_adapter
    from payload.train.models.lora import merge_adapter

    model, tensors = plan_adapter(adapter, base)
    labels = _labels(model)
    if tensors.targets:
        return MergedWeights(adapter, model, tensors, labels=labels, rounding=rounding)
    merge_adapter(model, merged_one=rounding.add)
    return InMemoryWeights(adapter, model.hf_tensors(), labels=labels)


def dequantized_weights(adapter: Path, *, rounding: MergeRounding) -> WeightFiles:
    """Return the merged weights of an adapter that has trained tokens or a quantised base.

    An adapter of a quantised base was trained on the quantised weights, so the base is dequantised
    before the merge. The complete model is in memory, in fp32. Raises CheckpointError, and
    ConfigError without bitsandbytes.
    """
    from payload.train.models.loading import load_unmerged
    from payload.train.models.lora import merge_adapter

    model = load_unmerged(adapter)
    merge_adapter(model, merged_one=rounding.add)
    labels = dict(_labels(model))
    if token_ids(read_adapter_config(adapter).settings.train_tokens):
        labels["vocab_size"] = model.spec.vocab_size
    return InMemoryWeights(adapter, model.hf_tensors(), labels=labels)


class MergedWeights(WeightFiles):
    """Reads the tensors of the base with the adapter merged into each, in fp32."""

    def __init__(
        self,
        adapter: Path,
        model: CausalLM,
        tensors: PlannedTensors,
        *,
        labels: Mapping[str, Any],
        rounding: MergeRounding,
    ) -> None:
        """Store the base's files and the model with the adapter, as `plan_adapter` returns them."""
        from payload.train.models.lora import LoraLinear

        super().__init__(adapter, tensors, labels=labels)
        self._rounding = rounding
        self._is_transposed = model.transposes_linears()
        self._whole = model.trained_beside_adapter()
        """Parameters that are trained in full in addition to the adapter: the head of a
        classifier."""
        self._linears = {
            self._base_name(f"{model.hf_name(path)}.weight"): linear
            for path, linear in model.named_modules()
            if isinstance(linear, LoraLinear)
        }
        """The linears with an adapter, by the name of the weight's tensor in the base."""

    def _base_name(self, name: str) -> str:
        """Return the name that a tensor has in the base. Old files omit the model's prefix."""
        return name if name in super().shapes() else name.partition(".")[2]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading the base."""
        whole = {name: tuple(value.shape) for name, value in self._whole.items()}
        return {**super().shapes(), **whole}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError unless it is finite."""
        from torch import nn

        if name in self._whole:
            return self._whole[name].detach()
        value = super().read(name).float()
        linear = self._linears.get(name)
        if linear is None:
            return value
        plain, placeholder = value.t() if self._is_transposed else value, linear.weight
        linear.weight = nn.Parameter(plain, requires_grad=False)
        merged = linear.merged()
        linear.weight = placeholder
        if not bool(merged.isfinite().all()):
            raise CheckpointError(
                f"{self._folder}: merging the adapter into {name} produces NaN or infinity. Use "
                "another checkpoint."
            )
        self._rounding.add(plain, merged)
        return merged.t() if self._is_transposed else merged


def _labels(model: CausalLM) -> Mapping[str, Any]:
    """Return the entries for config.json with a classifier's labels; empty for a language model."""
    from payload.train.models.classifier import Classifier

    return model.hf_labels() if isinstance(model, Classifier) else {}
