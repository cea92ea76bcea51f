"""Measures layers of GPT-2 in training, with the project's kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from payload.config.training_sections import OptimizerSection
from payload.core.dtype import Dtype
from payload.kernels.kernels import find_kernels
from payload.models.registry import layers_to_measure, narrow_layers_to_measure
from payload.models.spec import ModelSpec
from payload.train.models.loading import build
from payload.train.optimizers.optimizer import build_optimizers

MEASURED_SPEC = layers_to_measure()
_TOKENS = (64, 512)
_FIXED_TOKENS, _FEW_LAYERS, _MANY_LAYERS = 16, 2, 10
_FEWEST_STEPS = 3
_BUDGET_S = 0.6
_FIXED_BUDGET_S = 0.2


class LayerBenchmark:
    """Two wide layers and two models of narrow ones, ready to be timed."""

    def __init__(self) -> None:
        self._wide = _Layers(MEASURED_SPEC)
        depths = (_FEW_LAYERS, _MANY_LAYERS)
        self._narrow = [_Layers(narrow_layers_to_measure(each)) for each in depths]

    def times_s(self, dtype: Dtype) -> Mapping[int, float]:
        """Return the wide layers' seconds per micro-batch, by the number of its tokens."""
        return {
            tokens: self._wide.micro_batch_s(tokens, dtype, budget_s=_BUDGET_S)
            for tokens in _TOKENS
        }

    def layer_s(self, dtype: Dtype) -> float:
        """Return the seconds of a narrow layer in a micro-batch with few tokens."""
        few_s, many_s = (
            each.micro_batch_s(_FIXED_TOKENS, dtype, budget_s=_FIXED_BUDGET_S)
            for each in self._narrow
        )
        return max(0.0, many_s - few_s) / (_MANY_LAYERS - _FEW_LAYERS)


class _Layers:
    """Layers with their kernels, gradients and data."""

    def __init__(self, spec: ModelSpec) -> None:
        self._model = build(spec).train()
        self._optimizer = build_optimizers(self._model, OptimizerSection()).members[-1]
        self._model.kernels = find_kernels()

    def micro_batch_s(self, tokens: int, dtype: Dtype, *, budget_s: float) -> float:
        """Return the seconds per micro-batch, measured for `budget_s` or a few steps.

        The time is the mean over a step of two micro-batches: only the first micro-batch converts
        the weights, and only the second adds to existing gradients. The median of several steps
        counts, because a run cannot choose its fastest steps.
        """
        batch = torch.zeros((1, tokens), dtype=torch.int64)
        self._micro_batch(batch, dtype)
        took_s = [self._step_s(batch, dtype) for _ in range(_FEWEST_STEPS)]
        while sum(took_s) < budget_s:
            took_s.append(self._step_s(batch, dtype))
        return statistics.median(took_s) / 2

    def _step_s(self, batch: torch.Tensor, dtype: Dtype) -> float:
        self._model.zero_grad()
        assert self._model.kernels is not None
        self._model.kernels.weights_changed(self._optimizer)
        began_s = time.perf_counter()
        for _ in range(2):
            self._micro_batch(batch, dtype)
        return time.perf_counter() - began_s

    def _micro_batch(self, batch: torch.Tensor, dtype: Dtype) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = self._model(batch, batch)
        loss.backward()
