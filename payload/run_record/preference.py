"""CONTRACT: the rows that training on preference pairs writes to metrics.jsonl.

The reward of an answer is beta times the difference of two log-probabilities: under the model and
under the reference. The margin of a pair is the reward of the chosen answer minus the reward of the
rejected answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from payload.core.validation.fields import checked
from payload.run_record.metrics_log import EvalMetrics, StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceStep(StepMetrics):
    """One step on preference pairs: a line of metrics.jsonl."""

    reward_accuracy: float = checked(low=0, high=1)
    """Fraction of the pairs in the step with a margin above 0."""
    reward_margin: float
    """Mean margin of the pairs in the step."""

    def describe(self) -> str:
        """Return the text that the task adds to the log line of a step."""
        return f"  margin {self.reward_margin:.3f}  accuracy {self.reward_accuracy:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceMetrics(EvalMetrics):
    """One evaluation on preference pairs: a line of metrics.jsonl."""

    val_pairs: int
    val_accuracy: float
    """Fraction of the pairs with a margin above 0."""
    val_margin: float
    """Mean margin of the pairs."""
    val_chosen_reward: float
    """Mean reward of the chosen answers."""
    val_rejected_reward: float

    def describe(self) -> str:
        """Return the result as one line of a log."""
        return (
            f"preference accuracy {self.val_accuracy:.2%}, validation loss {self.val_loss:.4f}, "
            f"margin {self.val_margin:.4f} (rewards {self.val_chosen_reward:+.4f} and "
            f"{self.val_rejected_reward:+.4f}) over {self.val_pairs:,} pairs"
        )
