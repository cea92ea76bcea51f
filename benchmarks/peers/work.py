"""The work of a peer of `benchmarks.gpu`.

A peer is started as `python -m MODULE WORK`, where WORK is a `Work` as JSON. All peers train on the
same rows of the same token file, in the same order, for the same number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The model and the steps of a peer, and the path of its report."""

    folder: str
    """Folder of the model in the Hugging Face layout."""
    tokens: str
    """File of token ids."""
    tokens_dtype: str
    report: str
    """Path of the report."""
    device: str
    """cpu or cuda."""
    sequence_length: int
    micro_batch_size: int
    """Sequences per step: the peers make one micro-batch per step."""
    warm_up_steps: int
    """Steps before the clock starts."""
    steps: int
    """Steps that the clock measures."""
    adapter: Mapping[str, Any] | None
    """Rank, alpha and dropout of LoRA on all linears of the layers; None trains all weights."""

    @classmethod
    def of(cls, text: str) -> Work:
        """Read the work from JSON."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the work as JSON."""
        return json.dumps(asdict(self))

    def all_steps(self) -> int:
        """Return the number of steps, including the warm-up."""
        return self.warm_up_steps + self.steps

    def rows(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the tokens of all steps, (sequences, sequence length)."""
        count = self.all_steps() * self.micro_batch_size
        found = np.fromfile(
            self.tokens, dtype=self.tokens_dtype, count=count * self.sequence_length
        )
        return found.reshape(count, self.sequence_length).astype(np.int64)

    def weights_dtype(self) -> str:
        """Return torch's name of the weights' dtype: a frozen base is bf16, trained weights
        fp32."""
        return "float32" if self.adapter is None else "bfloat16"
