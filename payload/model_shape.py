"""Sizes of GPT-2 models and what follows from them: parameters, FLOPs, bytes. Pure arithmetic.

The launch plan and the trainer both print these numbers, so they are counted in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GPT2_VOCAB_SIZE = 50_257


def typical_mfu(*, kernels: bool) -> float:
    """A guess at the share of the measured GEMM peak that a training step reaches.

    With the kernels GPT-2 124M had 67 % on AVX-512 cores and the quickstart's small model 27 to
    42 % (2026-11-21); without them a step of GPT-2 takes 1.4 times as long. On AMX it was not
    measured. Each step says its own.
    """
    return 0.5 if kernels else 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A GPT-2 model's sizes; names as in GPT-2's own config, but for `sequence_length`."""

    n_layer: int
    n_head: int
    n_embd: int
    sequence_length: int = 1024
    """Tokens of a sequence that it is trained on."""
    vocab_size: int = GPT2_VOCAB_SIZE
    bias: bool = True
    n_positions: int | None = None
    """Longest context of the weights in tokens; None = `sequence_length`."""

    def positions(self) -> int:
        """Return the longest context of the weights in tokens."""
        return self.n_positions or self.sequence_length

    def num_matrix_params(self) -> int:
        """Weights of the layers' matrices: attention 4, MLP 8 times n_embd squared, per layer."""
        return self.n_layer * 12 * self.n_embd**2

    def num_params(self) -> int:
        """All trained numbers; the output head shares the token embedding."""
        width = self.n_embd
        norms = (2 * self.n_layer + 1) * width * (2 if self.bias else 1)
        biases = self.n_layer * 9 * width if self.bias else 0
        embeddings = (self.vocab_size + self.positions()) * width
        return embeddings + self.num_matrix_params() + norms + biases

    def flops_per_token(self) -> int:
        """Forward and backward floating-point operations for one token.

        6 per parameter that multiplies (positions do not), plus 12 x layers x width x context for
        attention. Source: PaLM, appendix B, https://arxiv.org/abs/2204.02311; nanoGPT counts the
        same.
        """
        multiplying = self.num_params() - self.positions() * self.n_embd
        return 6 * multiplying + 12 * self.n_layer * self.n_embd * self.sequence_length

    def memory_bytes(
        self,
        *,
        micro_batch_size: int,
        dtype: Literal["bf16", "fp32"],
        kernels: bool,
        alone: bool,
        accumulates: bool,
    ) -> int:
        """Estimate of a training rank's peak memory, the interpreter and torch included.

        The peak is where the forward pass ends. Weights and two AdamW moments are fp32, 12 bytes a
        parameter; gradients, 4 more, are there then with other ranks, whose exchange has buckets,
        and in all passes of a step but its first (`accumulates`). With `kernels` a layer keeps 28
        bytes a number of its width for its backward pass in bf16 (the residual stream twice in
        fp32, and 10 widths in bf16); what comes and goes between leaves gaps, 7 bytes more as
        measured for gpt2. The logits are those of one chunk.
        """
        size = 2 if dtype == "bf16" else 4
        tokens = micro_batch_size * self.sequence_length
        gradients = self.num_params() * 4
        held = self.num_params() * 12 + _PROCESS_BYTES
        if accumulates or not alone:
            held, gradients = held + gradients, 0
        if not kernels:
            # 18 widths a layer; a logit is 16 bytes: log-softmax and two gradients in fp32, itself.
            layers = tokens * self.n_layer * 18 * self.n_embd * size
            return held + layers + tokens * self.vocab_size * 16
        widths = 35 if dtype == "bf16" else 72
        layers = tokens * self.n_layer * widths * self.n_embd
        logits = min(tokens, LOGITS_TOKENS) * self.vocab_size * size
        # In a step's only pass the head's gradient is made where ranks exchange it.
        head = self.vocab_size * self.n_embd * 4 if alone or accumulates else 0
        copies = self.num_params() * 2 if dtype == "bf16" else 0
        return held + copies + max(layers + logits + head, gradients)


LOGITS_TOKENS = 2048
"""Tokens whose logits the kernels' head has at once: 206 MB of bf16 with GPT-2's vocabulary."""

# Python, torch and their threads' stacks, on the development machine.
_PROCESS_BYTES = 350 * 2**20

PRESETS = {
    # `tiny` trains in minutes on two cores; the others are the GPT-2 family,
    # https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
    "tiny": ModelShape(n_layer=4, n_head=4, n_embd=128),
    "gpt2": ModelShape(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": ModelShape(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": ModelShape(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": ModelShape(n_layer=48, n_head=25, n_embd=1600),
}
