"""A LoRA adapter's base with the adapter added, tensor by tensor: memory never holds the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.errors import CheckpointError
from payload.export.tensors import HeldWeights, WeightFiles

if TYPE_CHECKING:
    from torch import Tensor

    from payload.train.models.base import CausalLM
    from payload.train.tensors.lazy_tensors import PlannedTensors


def merged_weights(base: Path, adapter: Path) -> WeightFiles:
    """Return the weights of an adapter and its base, the adapter added.

    Memory holds all of a model that transformers converts as it loads it. Raises CheckpointError
    for what training refuses.
    """
    from payload.train.models.loading import plan_adapter
    from payload.train.models.lora import merge_adapter

    model, tensors = plan_adapter(adapter, base)
    labels = _labels(model)
    if tensors.targets:
        return MergedWeights(adapter, model, tensors, labels=labels)
    merge_adapter(model)
    return HeldWeights(adapter, model.hf_tensors(), labels=labels)


def dequantized_weights(adapter: Path) -> WeightFiles:
    """Return the weights of a merged model whose base was quantised while its adapter was trained.

    The adapter belongs to the quantised weights, so these are dequantised and merged. Memory holds
    the whole model in fp32. Raises CheckpointError, and ConfigError without bitsandbytes.
    """
    from payload.train.models.loading import load

    model = load(adapter)
    return HeldWeights(adapter, model.hf_tensors(), labels=_labels(model))


class MergedWeights(WeightFiles):
    """Reads the base's tensors with what the adapter adds to each, in fp32."""

    def __init__(
        self,
        adapter: Path,
        model: CausalLM,
        tensors: PlannedTensors,
        *,
        labels: Mapping[str, Any],
    ) -> None:
        """Take the adapter's model and the files of its base, as `plan_adapter` returns them."""
        from payload.train.models.lora import LoraLinear

        super().__init__(adapter, tensors, labels=labels)
        self._is_transposed = model.transposes_linears()
        self._whole = model.trained_beside_adapter()
        """A classifier's head."""
        self._linears = {
            self._place(f"{model.hf_name(path)}.weight"): linear
            for path, linear in model.named_modules()
            if isinstance(linear, LoraLinear)
        }
        """By the name of the base's tensor."""

    def _place(self, name: str) -> str:
        """Return the base's own name of a tensor; old files leave the model's prefix out."""
        return name if name in super().shapes() else name.partition(".")[2]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's size, without reading the base's."""
        whole = {name: tuple(value.shape) for name, value in self._whole.items()}
        return {**super().shapes(), **whole}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError where it is not finite."""
        from torch import nn

        if name in self._whole:
            return self._whole[name].detach()
        value = super().read(name).float()
        linear = self._linears.get(name)
        if linear is None:
            return value
        plain, unset = value.t() if self._is_transposed else value, linear.weight
        linear.weight = nn.Parameter(plain, requires_grad=False)
        merged = linear.merged()
        linear.weight = unset
        if not bool(merged.isfinite().all()):
            raise CheckpointError(
                f"{self._folder}: {name} has NaN or infinity with the adapter. Use another "
                "checkpoint."
            )
        return merged.t() if self._is_transposed else merged


def _labels(model: CausalLM) -> Mapping[str, Any]:
    """Return what config.json says of a classifier's labels; nothing for a language model."""
    from payload.train.models.classifier import Classifier

    return model.hf_labels() if isinstance(model, Classifier) else {}
