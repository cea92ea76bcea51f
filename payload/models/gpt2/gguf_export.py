"""GPT-2's metadata in a GGUF file: llama.cpp's names and numbers."""

from __future__ import annotations

from payload.models.gguf_errors import refuse_export
from payload.models.gguf_export_plan import GgufPlan
from payload.models.gpt2.spec import Gpt2Spec

ARCHITECTURE = "gpt2"
"""llama.cpp's name."""
_EPSILON = 1e-5
_CONTEXT = 1024


def plan_gguf(spec: Gpt2Spec, *, where: str) -> GgufPlan:
    """Return what a GGUF file of this model has; `where` names its config.json.

    Raises CheckpointError for what llama.cpp computes otherwise.
    """
    notes = []
    if spec.context() != _CONTEXT:
        notes.append(
            f"transformers takes the context of a GPT-2 in GGUF to be {_CONTEXT}: pass "
            f"n_positions={spec.context()} to from_pretrained"
        )
    if spec.activation != "gelu_new":
        refuse_export(where, "activation_function", spec.activation)
    return GgufPlan(
        architecture=ARCHITECTURE,
        values={
            "context_length": spec.context(),
            "embedding_length": spec.n_embd,
            "block_count": spec.n_layer,
            "feed_forward_length": 4 * spec.n_embd,
            "attention.head_count": spec.n_head,
            "attention.layer_norm_epsilon": _EPSILON,
        },
        num_layers=spec.n_layer,
        vocab_size=spec.vocab_size,
        rotated_heads={},
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        notes=tuple(notes),
    )
