"""Small models of many architectures, and their differences from transformers' own models.

A case is the content of a config.json. transformers builds and saves the model with random weights;
this project loads the folder and compares.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from payload.models.registry import read_spec
from payload.train.families.transformers.model import TransformersLM
from payload.train.models.base import CausalLM
from payload.train.models.loading import load

BATCH, LENGTH = 2, 48
CHUNKS = [13, 1, 1, 6, 27]
"""Number of tokens in each forward pass with a cache; some exceed the sliding window."""
_SEED = 20261123

_LLAMA: Mapping[str, Any] = {
    "vocab_size": 1031,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA4: Mapping[str, Any] = {
    **_LLAMA,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "final_logit_softcapping": 4.0,
    "pad_token_id": 0,
}
_QWEN35: Mapping[str, Any] = {
    **_LLAMA,
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 1031,
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 64,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": {**_LLAMA, "model_type": "llama"},
    "llama, untied, biases": {
        **_LLAMA,
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
    },
    "llama, llama3 rope": {
        **_LLAMA,
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "llama, linear rope": {
        **_LLAMA,
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "smollm3": {**_LLAMA, "model_type": "smollm3", "pad_token_id": 7},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen2, windows": {
        **_LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32},
    "mistral, window": {**_LLAMA, "model_type": "mistral", "sliding_window": 9},
    "gemma3_text": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 32,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "pad_token_id": 0,
    },
    "gemma4_text, small": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 1031,
    },
    "gemma4_text, large": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
    "qwen3_5_text": {**_QWEN35, "pad_token_id": 7},
    "qwen3_5_text, untied, biases": {
        **_QWEN35,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "llama, yarn rope": {
        **_LLAMA,
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama, dynamic rope": {
        **_LLAMA,
        "model_type": "llama",
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
    "gpt_neox": {
        **_LLAMA,
        "model_type": "gpt_neox",
        "tie_word_embeddings": False,
        "rotary_pct": 0.25,
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2", "tie_word_embeddings": False},
    "olmo3": {
        **_LLAMA,
        "model_type": "olmo3",
        "sliding_window": 9,
        "pad_token_id": 1,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.2,
        },
    },
    "granite": {
        **_LLAMA,
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.05,
        "logits_scaling": 3.0,
    },
    "granite 4, dense": {
        **_LLAMA,
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 80,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.05,
        "logits_scaling": 3.0,
    },
    "phi3": {**_LLAMA, "model_type": "phi3", "tie_word_embeddings": False, "sliding_window": 9},
    "phi3, partial longrope": {
        **_LLAMA,
        "model_type": "phi3",
        "head_dim": 16,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 12,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
        "pad_token_id": 7,
    },
    "falcon": {
        "model_type": "falcon",
        "vocab_size": 1031,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        **_LLAMA,
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "gemma2": {**_LLAMA, "model_type": "gemma2", "head_dim": 32, "sliding_window": 9},
    "qwen2_moe": {
        **_LLAMA,
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "phimoe": {
        **_LLAMA,
        "model_type": "phimoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "granitemoe": {
        **_LLAMA,
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""The config.json of each case, by the name of its row in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One architecture compared with transformers."""

    name: str
    path: str
    """The layers that compute the model: `native` or `transformers`."""
    logits: float
    """Largest difference between the logits of the two libraries, in fp32."""
    gradients: float
    """Largest difference of a weight's gradient, relative to the gradient's norm."""
    cache: float
    """Largest difference between a logit with and without the cache."""
    params: int
    torch_params: int
    flops: int
    """FLOPs per token, forward and backward."""
    torch_flops: float | None
    """None if the model has a recurrence in chunks of tokens: torch also counts the filling."""


def compare(name: str, folder: Path) -> Comparison:
    """Compare the case of this name; `folder` holds the weights and can be removed afterwards."""
    theirs = make_folder(CASES[name], folder)
    ours = load(folder)
    if ours.draws_masks():
        ours.eval()  # Its router samples in training only.
    tokens, targets = random_tokens(theirs.config.vocab_size)
    with torch.no_grad():
        their_logits = theirs(input_ids=tokens).logits
        our_logits = ours.logits(ours.hidden(tokens))
        cached_logits = _with_cache(ours, tokens)
    spec = read_spec(folder).with_sequence_length(LENGTH)
    torch_flops = _backward_of_theirs(theirs, tokens, targets)
    torch.autograd.backward(ours(tokens, targets))
    return Comparison(
        name=name,
        path="transformers" if isinstance(ours, TransformersLM) else "native",
        logits=_largest(our_logits - their_logits),
        gradients=_gradient_difference(ours, theirs, folder / "gradients"),
        cache=_largest(cached_logits - our_logits),
        params=spec.num_params(),
        torch_params=sum(each.numel() for each in theirs.parameters()),
        flops=spec.flops_per_token(),
        torch_flops=None if spec.recurrent_flops() else torch_flops / tokens.numel(),
    )


def make_folder(raw: Mapping[str, Any], folder: Path, *, seed: int = _SEED) -> Any:
    """Save transformers' model of a config.json with random weights; return it.

    Attention and experts are transformers' plain ones, whose operations torch can count. Norms and
    biases are random too: with their initial values, a model without them would give equal results.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers adds keys to nested dictionaries.
    config = AutoConfig.for_model(**copy.deepcopy(dict(raw)))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
            if name.endswith(".A_log"):
                # If a state decays within a token, rounding decides transformers' gradients.
                parameter.clamp_(max=-1.0)
    model.save_pretrained(folder)
    return model


def random_tokens(vocab_size: int, *, batch: int = BATCH, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens and the next tokens, (batch, LENGTH) each, with padding among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocab_size, (batch, LENGTH + 1), generator=generator)
    drawn[:, ::5] = torch.randint(0, 8, drawn[:, ::5].shape, generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _with_cache(model: CausalLM, tokens: Tensor) -> Tensor:
    """Return the logits of `tokens` from several forward passes with a cache."""
    caches = model.new_caches()
    found = [
        model.logits(model.hidden(part, caches)) for part in torch.split(tokens, CHUNKS, dim=1)
    ]
    assert caches[0].num_tokens() == tokens.shape[1]
    return torch.cat(found, dim=1)


def _backward_of_theirs(model: Any, tokens: Tensor, targets: Tensor) -> int:
    """Compute transformers' gradients; return the FLOPs that torch counts."""
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens).logits
        torch.autograd.backward(functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    return int(counter.get_total_flops())


def _gradient_difference(ours: CausalLM, theirs: Any, folder: Path) -> float:
    """Return the largest difference of a gradient; each model saves its gradients like weights."""
    for model in (ours, theirs):
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    save_file(
        {name: value.contiguous() for name, value in ours.hf_tensors().items()},
        folder / "ours.safetensors",
    )
    found = load_file(folder / "ours.safetensors")
    assert set(found) == set(expected), f"different names of weights: {set(found) ^ set(expected)}"
    return max(
        float((found[name] - value).norm() / value.norm().clamp_min(1e-30))
        for name, value in expected.items()
    )


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
