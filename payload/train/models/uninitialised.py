"""torch's linears and embeddings without their own random weights, which take seconds."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """torch's, without its own random weights: the model sets all. GPT-2's take torch a second."""

    def reset_parameters(self) -> None:
        """Leave the weights as the memory is."""


class Embedding(nn.Embedding):
    """The same for embeddings."""

    def reset_parameters(self) -> None:
        """Leave the weights as the memory is."""
