"""Computes the time of a run: start, training, evaluations, checkpoints and samples.

The plan, `finetune` and the log of rank 0 all use this formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from payload.config.run_config import RunConfig
from payload.config.training_sections import TrainSection
from payload.core.durations import in_words
from payload.estimates.compute_time import compute_time, evaluation_s
from payload.estimates.evaluations_and_saves_left import evaluations_left, saves_left
from payload.estimates.network import Network
from payload.estimates.run_estimate import RunEstimate
from payload.estimates.step_time import run_step_time
from payload.models.spec import ModelSpec

_START_S = 12.0
"""Time before the first step and after the last step: the start of the processes, the import of
torch, calibration and the report. Measured with SmolLM2-135M on two cores."""
_SAVED_BYTES_PER_S = 0.5e9
"""Rate at which a checkpoint is hashed and written, assumed for a disk that was not measured."""
_SAMPLES_START_S = 8.0
"""Start-up time of the process that generates the samples of one model."""
_SAMPLED_TOKENS = 40
_READ_BYTES_PER_S = 8e9
"""Rate at which two cores read fp32 weights while they generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """The parts of a run's time."""

    start_s: float
    training_s: float
    evaluation_s: float
    saving_s: float
    """Time that saving the checkpoints takes."""
    samples_s: float = 0.0
    """Time of the samples before and after the run; 0 for a run without samples."""

    def total_s(self) -> float:
        """Return the sum of all parts."""
        parts = (self.start_s, self.evaluation_s, self.saving_s, self.samples_s)
        return self.training_s + sum(parts)

    def words(self) -> str:
        """Return the times of the training and of the whole run as text, with all other parts."""
        parts = {
            "start": self.start_s,
            "evaluations": self.evaluation_s,
            "checkpointing": self.saving_s,
            "samples": self.samples_s,
        }
        others = ", ".join(f"{name} {_rounded(each)}" for name, each in parts.items() if each > 0)
        return f"{_rounded(self.training_s)} training, {_rounded(self.total_s())} in all ({others})"


def _rounded(seconds: float) -> str:
    return in_words(round(seconds, 0 if seconds >= 10 else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of a run's ranks in training and evaluation."""

    flops_per_step: float
    tokens_per_step: int
    step_s: float
    """Seconds of a step."""
    flops_per_s: float
    """FLOP/s of all ranks together in an evaluation."""

    @classmethod
    def of_steps(cls, numbers: RunEstimate, *, step_s: float) -> Speed:
        """Return the speed for a step time, with evaluation at the same FLOP/s as training."""
        return cls(
            flops_per_step=numbers.flops_per_step,
            tokens_per_step=numbers.tokens_per_step,
            step_s=step_s,
            flops_per_s=numbers.flops_per_step / step_s,
        )

    @classmethod
    def of_tokens(cls, numbers: RunEstimate, *, tokens_per_s: float) -> Speed:
        """Return the speed of ranks that train at `tokens_per_s` together."""
        return cls.of_steps(numbers, step_s=numbers.tokens_per_step / tokens_per_s)

    def tokens_per_s(self) -> float:
        """Return the tokens per second that all ranks train on together."""
        return self.tokens_per_step / self.step_s

    def run_time(
        self,
        train: TrainSection,
        *,
        val_tokens: int,
        checkpoint_bytes: int,
        sampled_params: int = 0,
    ) -> RunTime:
        """Return the time of a run with `val_tokens` validation tokens.

        `sampled_params` is the number of the model's parameters if the run generates samples.
        """
        evaluated = min(val_tokens, train.eval_tokens or val_tokens)
        one_s = evaluation_s(
            tokens=evaluated,
            flops_per_token=self.flops_per_step / self.tokens_per_step,
            flops_per_s=self.flops_per_s,
        )
        sample_s = _SAMPLES_START_S + _SAMPLED_TOKENS * 4 * sampled_params / _READ_BYTES_PER_S
        return RunTime(
            start_s=_START_S,
            training_s=train.steps * self.step_s,
            evaluation_s=(1 + evaluations_left(train, 0)) * one_s,
            saving_s=saves_left(train, 0) * checkpoint_bytes / _SAVED_BYTES_PER_S,
            samples_s=2 * sample_s if sampled_params else 0.0,
        )


def typical_speed(
    config: RunConfig,
    spec: ModelSpec,
    numbers: RunEstimate,
    *,
    core_flops_per_s: float,
    cores: int,
    network: Network,
    dequantize_s: float,
) -> Speed:
    """Return the typical speed of `cores` unmeasured cores.

    `numbers` is the estimate of `config` with `spec`; `dequantize_s` is added to each step.
    """
    computing = compute_time(
        config,
        spec,
        peak_flops_per_s=cores * core_flops_per_s,
        cores=cores,
        tokens=numbers.tokens_per_step,
    )
    step = run_step_time(
        config,
        spec,
        compute_s=computing.seconds,
        network=network,
        threads=max(1, cores // network.ranks),
    )
    return Speed(
        flops_per_step=numbers.flops_per_step,
        tokens_per_step=numbers.tokens_per_step,
        step_s=step.total_s() + dequantize_s,
        flops_per_s=computing.flops_per_s,
    )
