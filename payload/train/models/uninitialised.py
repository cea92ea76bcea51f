"""Linears and embeddings of torch without their random initialisation, which takes seconds."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A torch Linear without random initialisation, which takes a second for GPT-2."""

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised; the model sets all of them."""


class Embedding(nn.Embedding):
    """A torch Embedding without random initialisation."""

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised; the model sets all of them."""
