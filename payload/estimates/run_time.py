"""Computes the time of a run, with training and evaluations, from its step time."""

from __future__ import annotations

from dataclasses import dataclass

from payload.config.run_config import RunConfig
from payload.estimates.compute_time import compute_time, evaluation_s
from payload.estimates.run_estimate import RunEstimate
from payload.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of a run's ranks in training and evaluation."""

    numbers: RunEstimate
    """The run's estimate, with the FLOPs and tokens of a step."""
    step_s: float
    """Seconds of a step."""
    flops_per_s: float
    """Rate at which the ranks evaluate."""

    @classmethod
    def of_steps(cls, numbers: RunEstimate, *, step_s: float) -> Speed:
        """Return the speed of ranks that evaluate at the rate at which they train."""
        return cls(numbers=numbers, step_s=step_s, flops_per_s=numbers.flops_per_step / step_s)

    @classmethod
    def of_tokens(cls, numbers: RunEstimate, *, tokens_per_s: float) -> Speed:
        """Return the speed of ranks that train at `tokens_per_s` together."""
        return cls.of_steps(numbers, step_s=numbers.tokens_per_step / tokens_per_s)

    def tokens_per_s(self) -> float:
        """Return the tokens per second that all ranks train on together."""
        return self.numbers.tokens_per_step / self.step_s

    def run_s(self, *, steps: int, evaluated_tokens: int) -> float:
        """Return the seconds of `steps` steps and of evaluations of `evaluated_tokens` in total."""
        numbers = self.numbers
        evaluating_s = evaluation_s(
            tokens=evaluated_tokens,
            flops_per_token=numbers.flops_per_step / numbers.tokens_per_step,
            flops_per_s=self.flops_per_s,
        )
        return steps * self.step_s + evaluating_s


def typical_speed(
    config: RunConfig,
    spec: ModelSpec,
    numbers: RunEstimate,
    *,
    core_flops_per_s: float,
    cores: int,
    dequantize_s: float,
) -> Speed:
    """Return the typical speed of `cores` unmeasured cores, without exchange and update.

    `numbers` is the estimate of `config` with `spec`; `dequantize_s` is added to each step.
    """
    computing = compute_time(config, spec, peak_flops_per_s=cores * core_flops_per_s, cores=cores)
    return Speed(
        numbers=numbers,
        step_s=computing.seconds + dequantize_s,
        flops_per_s=computing.flops_per_s,
    )
