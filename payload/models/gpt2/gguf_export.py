"""Plans the GGUF file of a GPT-2, with llama.cpp's names and values."""

from __future__ import annotations

from collections.abc import Mapping

from payload.models.gguf_errors import refuse_export
from payload.models.gguf_plan import GgufPlan
from payload.models.gpt2.spec import Gpt2Spec

ARCHITECTURE = "gpt2"
"""llama.cpp's name of the architecture."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "transformer.wte": ("token_embd",),
    "transformer.wpe": ("position_embd",),
    "transformer.ln_f": ("output_norm",),
    "ln_1": ("attn_norm",),
    "attn.c_attn": ("attn_qkv",),
    "attn.c_proj": ("attn_output",),
    "ln_2": ("ffn_norm",),
    "mlp.c_fc": ("ffn_up",),
    "mlp.c_proj": ("ffn_down",),
}
"""llama.cpp's name of each module, without the layer."""
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
        vocab_size=spec.vocab_size,
        names=_NAMES,
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        notes=tuple(notes),
    )
