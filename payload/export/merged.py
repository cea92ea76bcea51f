"""A LoRA adapter's base with the adapter added, tensor by tensor: memory never holds the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from payload.errors import CheckpointError
from payload.export.tensors import WeightFiles

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = "lm_head."


class MergedWeights(WeightFiles):
    """Reads the base's tensors with what the adapter adds to each, in fp32."""

    def __init__(self, base: Path, adapter: Path) -> None:
        """Load the adapter. Raises CheckpointError as loading the model with it does."""
        from payload.train.models.lora import LoraLinear
        from payload.train.models.registry import load_adapter_alone

        super().__init__(base)
        self._adapter = adapter
        model = load_adapter_alone(adapter, base)
        self._is_transposed = model.transposes_linears()
        self._whole = model.trained_beside_adapter()
        """A classifier's head, which takes the output head's place."""
        self._linears = {
            self._place(f"{model.hf_name(path)}.weight"): linear
            for path, linear in model.named_modules()
            if isinstance(linear, LoraLinear)
        }
        """By the name of the base's tensor."""

    def _place(self, name: str) -> str:
        """Return the base's own name of a tensor; old files leave the model's prefix out."""
        shapes = super().shapes()
        for known in (name, name.partition(".")[2]):
            if known in shapes:
                return known
        raise self._misfit(f"the base has no tensor {name}")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's size, without reading the base's."""
        base = super().shapes()
        if self._whole:
            base = {name: size for name, size in base.items() if not name.startswith(_HEAD)}
        return {**base, **{name: tuple(value.shape) for name, value in self._whole.items()}}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError where the adapter does not fit it."""
        from torch import nn

        if name in self._whole:
            return self._whole[name].detach()
        value = super().read(name).float()
        linear = self._linears.get(name)
        if linear is None:
            return value
        plain, unset = value.t() if self._is_transposed else value, linear.weight
        if plain.shape != unset.shape:
            raise self._misfit(f"{name} is {tuple(plain.shape)}, not {tuple(unset.shape)}")
        linear.weight = nn.Parameter(plain, requires_grad=False)
        merged = linear.merged()
        linear.weight = unset
        if not bool(merged.isfinite().all()):
            raise self._misfit(f"{name} has NaN or infinity with the adapter")
        return merged.t() if self._is_transposed else merged

    def _misfit(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._adapter}: does not fit its base {self._folder}: {problem}. Use the base that "
            "the adapter was trained beside."
        )


class DequantizedWeights(WeightFiles):
    """Reads a merged model's tensors whose base was quantised while its adapter was trained.

    The adapter belongs to the quantised weights, so these are dequantised and merged. Memory holds
    the whole model in fp32.
    """

    def __init__(self, adapter: Path) -> None:
        """Load and merge. Raises CheckpointError, and ConfigError without bitsandbytes."""
        from payload.train.models.registry import load

        self._folder = adapter
        self._merged = load(adapter).hf_tensors()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's size."""
        return {name: tuple(value.shape) for name, value in self._merged.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError where it is not finite."""
        value = self._merged[name]
        if not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{self._folder}: {name} has NaN or infinity with the adapter. Use another "
                "checkpoint."
            )
        return value
