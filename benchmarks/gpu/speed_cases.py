"""The models that a visit trains beside a peer, with their sizes and goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.model_configs import LLAMA_3_1_8B, QWEN3_0_6B, SMOLLM2_135M

_REHEARSED: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCase:
    """A model with the batch of a step and the goals on a card.

    A step is one micro-batch, in bf16 with SDPA and without activation checkpointing.
    """

    name: str
    config: Mapping[str, Any]
    """Content of config.json."""
    micro_batch_size: int
    sequence_length: int
    lora_rank: int | None = None
    """Rank of LoRA on all linears of the layers; None trains all weights."""
    least_ratio: float
    """Least tokens/s relative to the peer's."""
    least_mfu: float
    ours_s: float
    """Estimated time of our run on a machine with an H100; the peer's is similar."""

    def rehearsed(self) -> SpeedCase:
        """Return the case with small sizes, for the CPU."""
        config = {**self.config, **_REHEARSED}
        return replace(self, config=config, micro_batch_size=2, sequence_length=32)

    def adapter(self) -> dict[str, Any] | None:
        """Return the settings of the adapter; None if all weights are trained."""
        if self.lora_rank is None:
            return None
        return {"rank": self.lora_rank, "alpha": 2.0 * self.lora_rank, "dropout": 0.0}

    def method(self) -> str:
        """Return what is trained, for the page."""
        return "all weights" if self.lora_rank is None else f"LoRA of rank {self.lora_rank}"


SPEED_CASES = (
    SpeedCase(
        name="SmolLM2-135M",
        config=SMOLLM2_135M,
        micro_batch_size=16,
        sequence_length=2048,
        least_ratio=1.3,
        least_mfu=0.40,
        ours_s=25,
    ),
    SpeedCase(
        name="Qwen3-0.6B",
        config=QWEN3_0_6B,
        micro_batch_size=4,
        sequence_length=2048,
        least_ratio=1.3,
        least_mfu=0.40,
        ours_s=35,
    ),
    SpeedCase(
        name="Llama-3.1-8B LoRA",
        config=LLAMA_3_1_8B,
        micro_batch_size=2,
        sequence_length=2048,
        lora_rank=16,
        least_ratio=1.2,
        least_mfu=0.45,
        # The base has 16 GB, which a run reads twice: it also hashes them.
        ours_s=60,
    ),
)
"""The cases, the most valuable first."""
