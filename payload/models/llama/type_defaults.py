"""The defaults of each model type of the Llama family, for values that config.json may omit.

transformers omits default values from config.json, so a type's defaults affect sizes. Source:
transformers 5.23, models/<family>/configuration_<family>.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GEMMA_LOCAL_THETA = 10_000.0
HYBRID = "granitemoehybrid"
"""Granite 4. Its dense models without Mamba layers have the layers of a Granite 3."""
PHI_CONTEXT = 4096
"""Phi's default of both the context and the context in pre-training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeDefaults:
    """Defaults of one `model_type`, for values that config.json may omit."""

    kv_heads: int | None = None
    """Number of key and value heads; None = the number of heads."""
    head_dim: int | None = None
    """Width of a head; None = hidden_size / num_attention_heads."""
    theta: float = 10_000.0
    window: int | None = None
    context: int = 32_768
    tied: bool = False
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    padding: int | None = None
    """The padding token. Its embedding gets no gradient."""
    windows_everywhere: bool = False
    """True if every layer has the sliding window; if False, `use_sliding_window` and `layer_types`
    decide."""
    is_gemma: bool = False
    no_windows: bool = False
    """True if all layers are equal and have no window, regardless of `layer_types`."""
    local_theta: float | None = None
    """Base of the unscaled rotary embedding of the layers with a window; None = one rotary
    embedding for all layers."""
    full_layer_every: int | None = None
    """N: every N-th layer has full attention and all others have a window, if config.json has no
    `layer_types`. None = other settings determine which layers have a window."""
    is_mixture: bool = False
    """True if the MLP of each layer is a mixture of experts."""
    is_phi: bool = False
    """True if queries, keys and values are one linear, and gate and up another linear. The rotary
    embedding can be partial or LongRoPE."""
    norms_only_outputs: bool = False
    """True for OLMo: the outputs of attention and MLP are normed instead of the inputs. Queries are
    normed over all heads together, and keys are too."""
    has_multipliers: bool = False
    """True for Granite: embeddings, outputs of the layers and logits are scaled."""


DEFAULTS: Mapping[str, TypeDefaults] = {
    "llama": TypeDefaults(context=2048, no_windows=True),
    "smollm3": TypeDefaults(kv_heads=4, theta=2_000_000.0, tied=True, padding=128_004),
    "qwen2": TypeDefaults(kv_heads=32, window=4096),
    "qwen3": TypeDefaults(kv_heads=32, head_dim=128, window=4096, qk_norm=True),
    "mistral": TypeDefaults(kv_heads=8, window=4096, context=131_072, windows_everywhere=True),
    "gemma3_text": TypeDefaults(
        kv_heads=4,
        head_dim=256,
        theta=1_000_000.0,
        window=4096,
        context=131_072,
        tied=True,
        qk_norm=True,
        padding=0,
        is_gemma=True,
        local_theta=GEMMA_LOCAL_THETA,
        full_layer_every=6,
    ),
    "qwen3_moe": TypeDefaults(kv_heads=4, window=4096, qk_norm=True, is_mixture=True),
    "phi3": TypeDefaults(
        context=PHI_CONTEXT,
        windows_everywhere=True,
        rms_norm_eps=1e-5,
        padding=32_000,
        is_phi=True,
    ),
    "olmo2": TypeDefaults(
        context=2048, rms_norm_eps=1e-5, padding=1, no_windows=True, norms_only_outputs=True
    ),
    "olmo3": TypeDefaults(
        theta=500_000.0,
        window=4096,
        context=2048,
        rms_norm_eps=1e-5,
        padding=1,
        local_theta=500_000.0,
        full_layer_every=4,
        norms_only_outputs=True,
    ),
    "granite": TypeDefaults(context=2048, no_windows=True, has_multipliers=True),
    HYBRID: TypeDefaults(context=2048, no_windows=True, has_multipliers=True),
}
