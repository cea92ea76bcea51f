"""Plans the GGUF file of a GPT-2, with llama.cpp's names and values."""

from __future__ import annotations

from payload.models.gguf_errors import refuse_export
from payload.models.gguf_export_plan import GgufPlan
from payload.models.gpt2.spec import Gpt2Spec

ARCHITECTURE = "gpt2"
"""llama.cpp's name of the architecture."""
_EPSILON = 1e-5
_CONTEXT = 1024


def plan_gguf(spec: Gpt2Spec, *, where: str) -> GgufPlan:
    """Return the contents of a GGUF file for this model; `where` names its config.json.

    Raises CheckpointError for features that llama.cpp computes differently.
    """
    notes = []
    if spec.context() != _CONTEXT:
        notes.append(
            f"transformers assumes a context of {_CONTEXT} for a GPT-2 in GGUF: pass "
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
