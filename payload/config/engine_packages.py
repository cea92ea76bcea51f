"""CONTRACT: packages and devices that engines and backends require, and how to install them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from payload.config.launch_sections import DistributedSection
from payload.config.run_config import RunConfig
from payload.config.training_sections import EngineSection, PrecisionSection
from payload.core.errors import ConfigError
from payload.optimizers.registry import find as find_optimizer

IPEX_MODULE = "intel_extension_for_pytorch"
IPEX_INSTALL = (
    "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0, in a separate environment"
)
CCL_MODULE = "oneccl_bindings_for_pytorch"
QUANTIZER_MODULE = "bitsandbytes"
_QUANTIZER_INSTALL = "pip install 'bitsandbytes>=0.50,<0.51'"

FP8_MODULE = "torchao"
_FP8_INSTALL = "pip install torchao==0.18.0"

DEEPSPEED_MODULE = "deepspeed"
# DeepSpeed is distributed only as source, and the build must import the installed torch.
_DEEPSPEED_INSTALL = "pip install --no-build-isolation deepspeed==0.19.8"

_CCL_INSTALL = (
    "pip install torch==2.8.0 oneccl_bind_pt==2.8.0 --extra-index-url "
    "https://pytorch-extension.intel.com/release-whl/stable/cpu/us/"
)
_COMPILERS = ("g++", "clang++", "c++")


def require_known_backend(settings: DistributedSection) -> None:
    """Raise ConfigError for nccl if the system has no NVIDIA device."""
    if settings.backend == "nccl" and not has_nvidia_device():
        raise ConfigError(
            "distributed.backend = 'nccl' supports only GPU tensors, but this machine has no CUDA "
            "device. Set backend to 'gloo'."
        )


def has_nvidia_device() -> bool:
    """Return True if the system has an NVIDIA device file; torch may still not see the GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def require_compiler(settings: EngineSection) -> None:
    """Raise ConfigError if engine.compile is on and no C++ compiler is installed."""
    if settings.compile and not any(shutil.which(name) for name in _COMPILERS):
        raise ConfigError(
            "engine.compile = true needs a C++ compiler, which is not installed. Install it with: "
            "apt-get install g++ (or use engine.compile = false)."
        )


def require_packages_here(config: RunConfig) -> None:
    """If this machine lacks a required package or device, raise ConfigError with the fix."""
    if config.device.kind == "cuda" and not has_nvidia_device():
        raise ConfigError(
            "device.kind = 'cuda': this machine has no CUDA device. Install the NVIDIA driver, "
            "and PyTorch's CUDA build (make setup TORCH_CUDA=1). Or use device.kind = 'cpu'."
        )
    engine, distributed, quantize = config.engine, config.distributed, config.model.quantize
    require_known_backend(distributed)
    require_compiler(engine)
    if engine.kind == "ipex" and importlib.util.find_spec(IPEX_MODULE) is None:
        raise ipex_missing("not installed")
    if distributed.backend == "ccl" and importlib.util.find_spec(CCL_MODULE) is None:
        raise ccl_missing("not installed")
    if distributed.strategy == "zero3" and importlib.util.find_spec(DEEPSPEED_MODULE) is None:
        raise deepspeed_missing("not installed")
    quantizes = quantize == "nf4"
    needs_quantizer = quantizes or find_optimizer(config.optimizer.name).package == QUANTIZER_MODULE
    if needs_quantizer and importlib.util.find_spec(QUANTIZER_MODULE) is None:
        raise bitsandbytes_missing("not installed", quantizes=quantizes)
    require_fp8_package(config.precision)


def require_fp8_package(settings: PrecisionSection) -> None:
    """If the package for fp8 is missing, raise ConfigError with the command that installs it."""
    if settings.fp8 != "off" and importlib.util.find_spec(FP8_MODULE) is None:
        raise ConfigError(
            f"precision.fp8 = {settings.fp8!r} needs torchao (not installed). Install it with: "
            f"{_FP8_INSTALL} (or use precision.fp8 = 'off')."
        )


def ipex_missing(reason: object) -> ConfigError:
    """Return the error for a missing package of engine.kind = 'ipex'."""
    return ConfigError(
        f"engine.kind = 'ipex' needs intel-extension-for-pytorch ({reason}). Install it with: "
        f"{IPEX_INSTALL} (or use engine.kind = 'native')."
    )


def ccl_missing(reason: object) -> ConfigError:
    """Return the error for a missing package of distributed.backend = 'ccl'."""
    return ConfigError(
        f"distributed.backend = 'ccl' needs oneccl_bind_pt ({reason}). Install it with: "
        f"{_CCL_INSTALL} (or use gloo)."
    )


def bitsandbytes_missing(reason: object, *, quantizes: bool) -> ConfigError:
    """Return the error for the missing package of 4-bit weights, or of the optimizer in 8 bits."""
    setting, instead = "model.quantize = 'nf4'", "model.quantize = 'none'"
    if not quantizes:
        setting, instead = "optimizer.name = 'adamw8bit'", "optimizer.name = 'adamw'"
    return ConfigError(
        f"{setting} needs bitsandbytes ({reason}). Install it with: {_QUANTIZER_INSTALL} (or use "
        f"{instead})."
    )


def deepspeed_missing(reason: object) -> ConfigError:
    """Return the error for a missing package of distributed.strategy = 'zero3'."""
    return ConfigError(
        f"distributed.strategy = 'zero3' needs deepspeed ({reason}). Install it with: "
        f"{_DEEPSPEED_INSTALL} (or use strategy = 'shard')."
    )
