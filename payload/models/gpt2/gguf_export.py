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
KEYS: Mapping[str, str] = {
    "n_positions": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
"""The metadata key for each key of config.json."""
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
    resolved = {
        "n_positions": spec.context(),
        "n_embd": spec.n_embd,
        "n_layer": spec.n_layer,
        "n_inner": 4 * spec.n_embd,
        "n_head": spec.n_head,
        "layer_norm_epsilon": _EPSILON,
    }
    return GgufPlan(
        architecture=ARCHITECTURE,
        values={KEYS[name]: value for name, value in resolved.items()},
        vocab_size=spec.vocab_size,
        names=_NAMES,
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        notes=tuple(notes),
    )
