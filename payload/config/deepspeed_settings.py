"""CONTRACT: DeepSpeed's configuration for `distributed.strategy = "zero3"`."""

from __future__ import annotations

import json
from typing import Any

from payload.config.run_config import RunConfig
from payload.core.dtype import Dtype

_REDUCED_ELEMENTS = 5_000_000
"""Number of elements in a gradient bucket; a larger gradient has a separate bucket."""
_UPDATED_ELEMENTS = 50_000_000
"""Number of elements that DeepSpeed updates at a time; it copies their gradients."""


def deepspeed_config(config: RunConfig, *, dtype: Dtype) -> dict[str, Any]:
    """Return the settings for `deepspeed.initialize`.

    Weights and communication are fp32. With bf16, only the matmuls are autocast, as in the other
    strategies. No gathered weights are kept (`max_live_parameters`, `max_reuse_distance`,
    `param_persistence_threshold`). The trainer weights the micro-batches of a step itself, so
    DeepSpeed is configured for one micro-batch.
    """
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.grad_clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": False,
            "overlap_comm": False,
            "reduce_bucket_size": _REDUCED_ELEMENTS,
            "reduce_scatter": True,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "sub_group_size": _UPDATED_ELEMENTS,
        },
    }
    if dtype == "bf16":
        # With an empty list, DeepSpeed sends all weights and gradients in fp32.
        found["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    return found


def render_deepspeed(config: RunConfig, *, dtype: Dtype) -> str:
    """Return the text of the run's deepspeed.json."""
    return json.dumps(deepspeed_config(config, dtype=dtype), indent=2) + "\n"
