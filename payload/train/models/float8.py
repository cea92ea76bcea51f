"""8-bit float matmuls for the linears of a model's layers, by torchao.

In forward and backward matmuls, inputs and weights are e4m3 and gradients are e5m2, each tensor
scaled by its largest value. Sums, and stored weights and gradients, keep their dtype. The head, the
embeddings and the norms are not converted: https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from payload.config.training_sections import PrecisionSection
from payload.core.errors import ConfigError
from payload.train.models.base import CausalLM
from payload.train.tensors.torchao_notices import hide_torchao_notices

_MULTIPLE = 16
"""8-bit matmuls need multiples of this size: https://docs.nvidia.com/cuda/cublas, "FP8"."""


def convert_linears(model: CausalLM, settings: PrecisionSection) -> str:
    """Convert the linears of the model's layers to 8-bit floats; return a log text about them.

    Parameters keep their tensors and names, so checkpoints do not change. Raises
    ConfigError if no linear can be converted.
    """
    inside = {id(each) for layer in model.layers() for each in layer.modules()}
    linears = [each for each in model.modules() if id(each) in inside and _is_linear(each)]
    fitting = {id(each) for each in linears if _fits(each)}
    if not fitting:
        raise ConfigError(
            f"precision.fp8 = {settings.fp8!r}: no linear of the layers ({len(linears)} checked) "
            f"has sizes that are multiples of {_MULTIPLE}. Set fp8 to 'off'."
        )
    library = _library()
    library.convert_to_float8_training(
        model,
        module_filter_fn=lambda module, _name: id(module) in fitting,
        config=library.Float8LinearConfig(emulate=settings.fp8 == "emulated"),
    )
    # torchao's 8-bit tensors cannot be converted in inference mode.
    model.takes_inference_mode = False
    suffix = ", emulated in bf16" if settings.fp8 == "emulated" else ""
    return (
        f"{len(fitting)} of the layers' {len(linears)} linears multiply in 8-bit floats{suffix}; "
        "head and embeddings do not"
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _fits(module: nn.Module) -> bool:
    assert isinstance(module, nn.Linear)
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _library() -> Any:
    hide_torchao_notices()
    import torchao.float8

    return torchao.float8
