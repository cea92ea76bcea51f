"""A LoRA adapter's base with the adapter added, tensor by tensor: memory never holds the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.adapter_files import (
    ADAPTER_CONFIG_FILE,
    AdapterConfig,
    read_adapter_config,
)
from payload.errors import CheckpointError
from payload.export.tensors import WeightFiles
from payload.models.adapter import scale
from payload.untrusted import read_bytes

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_HEAD = "lm_head."


class MergedWeights(WeightFiles):
    """Reads the base's tensors with what the adapter adds to each, in fp32."""

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__(base)
        self._adapter = adapter
        self._config: AdapterConfig = read_adapter_config(adapter)
        self._is_transposed = _fan_in_fan_out(adapter)
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self._magnitudes: dict[str, Tensor] = {}
        """DoRA's, by the weight's name."""
        self._whole: dict[str, Tensor] = {}

    def __enter__(self) -> MergedWeights:
        """Open the files and read the adapter. Raises CheckpointError when they do not fit."""
        from payload.train.models.lora import read_adapter_tensors

        super().__enter__()
        try:
            self._take(read_adapter_tensors(self._adapter))
        except CheckpointError:
            self._open.close()
            raise
        return self

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Find the base's tensor for each of the adapter's."""
        for name, low in tensors.items():
            module, _, part = name.removeprefix(_PREFIX).rpartition(".lora_")
            if not module:
                # Trained whole, as a classifier's head is; it takes the output head's place.
                self._whole[name.removeprefix(_PREFIX)] = low
            elif part == "magnitude_vector":
                self._magnitudes[self._place(f"{module}.weight")] = low
            elif part == "A.weight":
                high = tensors.get(f"{_PREFIX}{module}.lora_B.weight")
                if high is None:
                    raise self._misfit(f"{module} has lora_A without lora_B")
                self._pairs[self._place(f"{module}.weight")] = low, high

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
        if name in self._whole:
            return self._whole[name].float()
        value = super().read(name).float()
        if name not in self._pairs:
            return value
        low, high = (each.float() for each in self._pairs[name])
        settings = self._config.settings
        factor = scale(rank=settings.rank, alpha=settings.alpha, rslora=settings.rslora)
        added = factor * (high @ low)
        added = added.t() if self._is_transposed else added
        if added.shape != value.shape:
            sizes = f"{tuple(value.shape)}, the adapter is for {tuple(added.shape)}"
            raise self._misfit(f"{name} is {sizes}")
        merged = value + added
        if name in self._magnitudes:
            # Over the inputs, which are the first dimension where the base is transposed.
            inputs = 0 if self._is_transposed else 1
            lengths = merged.norm(dim=inputs, keepdim=True)
            merged = merged * (self._magnitudes[name].float().reshape(lengths.shape) / lengths)
        if not bool(merged.isfinite().all()):
            raise self._misfit(f"{name} has NaN or infinity with the adapter")
        return merged

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
        super().__init__(adapter)
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> DequantizedWeights:
        """Load and merge. Raises CheckpointError, and ConfigError without bitsandbytes."""
        from payload.train.models.registry import load

        self._tensors = load(self._folder).hf_tensors()
        return self

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's size."""
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32. Raises CheckpointError where it is not finite."""
        value = self._tensors[name]
        if not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{self._folder}: {name} has NaN or infinity with the adapter. Use another "
                "checkpoint."
            )
        return value


def _fan_in_fan_out(adapter: Path) -> bool:
    """Say whether the base's linears are stored as (in, out)."""
    path = adapter / ADAPTER_CONFIG_FILE
    raw: Any = json.loads(read_bytes(path))
    return bool(raw.get("fan_in_fan_out"))
