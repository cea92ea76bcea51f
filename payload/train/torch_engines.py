"""Applies the engine that runs the model: stock torch, or Intel's archived extension."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from payload.config.engine_packages import (
    DEEPSPEED_MODULE,
    deepspeed_missing,
    ipex_missing,
    require_compiler,
)
from payload.config.launch_sections import DistributedSection
from payload.config.training_sections import EngineSection
from payload.kernels.code_caches import keep_inductor_home
from payload.kernels.kernels import find_kernels
from payload.models.spec import RankSetting
from payload.train.models.base import CausalLM
from payload.train.optimizers.optimizer import Optimizers
from payload.train.ranks.world import World

_MOST_COMPILATIONS = 64
"""Number of compilations of a function after which torch would run it without compiling."""

log = logging.getLogger(__name__)


def require_engine(settings: EngineSection) -> None:
    """Raise ConfigError with the install command if the engine or its compiler is missing."""
    require_compiler(settings)
    if settings.kind == "ipex":
        try:
            import intel_extension_for_pytorch  # noqa: F401
        except ImportError as error:
            raise ipex_missing(error) from None


def require_strategy(settings: DistributedSection) -> None:
    """Raise ConfigError with the install command if the strategy's package is missing."""
    if settings.strategy == "zero3" and importlib.util.find_spec(DEEPSPEED_MODULE) is None:
        raise deepspeed_missing("not installed")


def without_compilation(settings: EngineSection) -> AbstractContextManager[None]:
    """Return a context in which nothing is compiled: an evaluation computes as in other runs."""
    if not settings.compile:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def apply_engine(
    model: CausalLM,
    optimizers: Optimizers,
    *,
    settings: EngineSection,
    world: World,
    setting: RankSetting | None = None,
) -> torch.nn.Module:
    """Return the module to train instead of `model`; parameters stay the same fp32 tensors.

    `setting` describes the rank's training and selects the gradients kept in bf16; with None, all
    gradients are fp32. With ipex, weights also stay fp32 (no `dtype=`, no prepacking), so
    checkpoints do not depend on the engine. bf16 comes from autocast, as in the native engine.
    """
    wrapped: torch.nn.Module = model
    if settings.kind == "ipex":
        import intel_extension_for_pytorch as ipex

        wrapped, _ = ipex.optimize(
            model, optimizer=optimizers.members[-1], inplace=True, level="O1", weights_prepack=False
        )
    if settings.compile:
        keep_inductor_home()
        # Layers of equal shapes share one compilation: a model of 12 layers took a third of the
        # time, with equal steps.
        for each in model.layers() or [wrapped]:
            each.compile()
        # Layers of several kinds and batches of several shapes share one limit.
        torch._dynamo.config.recompile_limit = _MOST_COMPILATIONS
    if settings.wants_kernels():
        model.kernels = find_kernels()
        note = model.kernels.layers_note("bf16" if setting is None else setting.dtype)
        if note is not None:
            log.info(f"kernels   {note}")
        for optimizer in optimizers.members:
            optimizer.register_step_post_hook(model.kernels.weights_changed)
        # The kernels' update rounds differently from torch's, and all ranks must get the same
        # weights.
        num_with_update = world.sum(torch.tensor(float(model.kernels.has_update)))
        if num_with_update == world.world_size:
            optimizers.kernels = model.kernels
            if setting is not None:
                optimizers.keep_bf16_gradients(model.bf16_gradients(setting))
    return wrapped
