"""LoRA: a frozen base, and two low-rank matrices for each target linear.

Adapters are read and written in PEFT's layout. N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError, ConfigError
from payload.formats.hf_folder import CLASSIFIER_CONFIG_FILE, own_file
from payload.kernels.linears import make_adjacent
from payload.models.adapter import (
    ALL_LINEAR,
    AdaptedSpec,
    is_parameter_target,
    is_target,
    parameter_names,
    scale,
    target_names,
    token_ids,
)
from payload.models.spec import ParameterSize
from payload.train.models.base import CausalLM
from payload.train.models.hf_layout import require_tensors
from payload.train.models.quantized import (
    QuantizedLinear,
    dequantize,
    require_quantizer,
    shrink,
)
from payload.train.tensors.lazy_tensors import LazyTensors
from payload.train.tensors.tensor_file import write_tensors
from payload.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AdapterConfig,
    render_adapter_config,
)

_PEFT_PREFIX = "base_model.model."
_ROWS = "token_adapter.trainable_tokens_delta"
"""PEFT's name of trained rows. The rows replace rows of the base instead of being added."""
_BASE_ROWS = "token_adapter.base_layer.weight"
"""PEFT's name of the embedding of a base that was resized before training."""


class LoraLinear(nn.Module):
    """A frozen linear with an adapter: `linear(x) + scale * B(A(dropout(x)))`.

    This module replaces the linear and keeps the names of its parameters, so the base's weights
    load and save unchanged.
    """

    def __init__(self, linear: nn.Linear | QuantizedLinear, settings: AdapterSection) -> None:
        super().__init__()
        self.keep(linear)
        self.dropout = settings.dropout
        self.scale = scale(rank=settings.rank, alpha=settings.alpha, rslora=settings.rslora)
        outputs, inputs = linear.out_features, linear.in_features
        # As in PEFT: A is initialised like torch's linears and B is zero, so training starts from
        # the base.
        first = torch.empty(settings.rank, inputs)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        self.lora_A = nn.Parameter(first)
        self.lora_B = nn.Parameter(torch.zeros(outputs, settings.rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (..., I) to outputs (..., O)."""
        below = functional.dropout(x, self.dropout, self.training)
        base = self.base(x)
        low = functional.linear(below, self.lora_A)
        added: Tensor = base + self.scale * functional.linear(low, self.lora_B)
        return added

    def keep(self, linear: nn.Module) -> None:
        """Use the parameters of the frozen linear."""
        assert isinstance(linear, nn.Linear)
        self.weight, self.bias = linear.weight, linear.bias

    def base(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O), without the adapter."""
        weight = self.weight
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)
        return functional.linear(x, weight, self.bias)

    def plain(self) -> tuple[Tensor, nn.Parameter | None]:
        """Return the frozen linear's weight (O, I) in fp32, and its bias."""
        return self.weight.detach().float(), self.bias

    def delta(self) -> Tensor:
        """Return the adapter's change of the weight, (O, I) fp32."""
        return self.scale * (self.lora_B.detach() @ self.lora_A.detach())

    def merged(self) -> Tensor:
        """Return the weight with the adapter merged into it, (O, I) fp32."""
        return self.plain()[0] + self.delta()


class DoraLinear(LoraLinear):
    """LoRA with a trained norm for each output's weights: DoRA.

    Source: https://arxiv.org/abs/2402.09353. As in PEFT, no gradient flows through the norm of the
    merged weight. The kernels do not support DoRA.
    """

    def __init__(self, linear: nn.Linear | QuantizedLinear, settings: AdapterSection) -> None:
        super().__init__(linear, settings)
        lengths = torch.linalg.norm(self.plain()[0], dim=1)
        self.lora_magnitude_vector = nn.Parameter(lengths)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        below = functional.dropout(x, self.dropout, self.training)
        base, factor = self.base(x), self._factor()
        turned = self.base(below) if self.dropout and self.training else base
        if self.bias is not None:
            turned = turned - self.bias
        low = functional.linear(below, self.lora_A)
        added = self.scale * functional.linear(low, self.lora_B)
        found: Tensor = base + (factor - 1) * turned + factor * added
        return found

    def _factor(self) -> Tensor:
        """Return the factor that scales each output feature, (O,)."""
        device = self.lora_magnitude_vector.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            lengths = torch.linalg.norm(self.plain()[0] + self.delta(), dim=1)
        factor: Tensor = self.lora_magnitude_vector / lengths
        return factor

    def merged(self) -> Tensor:
        """Return the weight with the adapter merged into it, (O, I) fp32."""
        return self._factor().detach().unsqueeze(1) * super().merged()


class QuantizedLoraLinear(LoraLinear):
    """LoRA on a 4-bit linear, which the kernels do not support."""

    linear: QuantizedLinear

    def keep(self, linear: nn.Module) -> None:
        """Use the frozen linear as a submodule."""
        assert isinstance(linear, QuantizedLinear)
        self.linear = linear

    def base(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O), without the adapter."""
        found: Tensor = self.linear(x)
        return found

    def plain(self) -> tuple[Tensor, nn.Parameter | None]:
        """Return the dequantised weight (O, I) in fp32, and the bias."""
        return self.linear.dequantized(torch.float32), self.linear.bias


class LoraParameters(nn.Module):
    """A module with adapters on parameters outside of linears: `parameter + scale * B A`.

    A stack of matrices, such as the experts of a layer, has one adapter for each matrix.
    """

    def __init__(self, base_layer: nn.Module, settings: AdapterSection) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.rank = settings.rank
        self.scale = scale(rank=settings.rank, alpha=settings.alpha, rslora=settings.rslora)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()

    def adapt(self, name: str, size: ParameterSize) -> None:
        """Add an adapter to the parameter `name` of the module, initialised as in PEFT."""
        first = torch.empty(size.stack * self.rank, size.inputs)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        self.lora_A[name] = nn.Parameter(first)
        self.lora_B[name] = nn.Parameter(torch.zeros(size.outputs, self.rank * size.stack))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the module with the adapted parameters."""
        changed = {
            name: self.base_layer.get_parameter(name) + self.delta(name) for name in self.lora_A
        }
        return functional_call(self.base_layer, changed, args, options)

    def delta(self, name: str) -> Tensor:
        """Return the adapter's change of a parameter, in its shape and dtype.

        Source of the layout: PEFT, tuners/lora/layer.py, `ParamWrapper`.
        """
        parameter = self.base_layer.get_parameter(name)
        with torch.autocast(parameter.device.type, enabled=False):
            first = self.lora_A[name].unflatten(0, (-1, self.rank))
            second = self.lora_B[name].unflatten(1, (self.rank, -1)).permute(2, 0, 1)
            change: Tensor = self.scale * (second @ first)
        if parameter.dim() == 3 and getattr(self.base_layer, "is_transposed", False):
            change = change.transpose(1, 2)
        return change.reshape(parameter.shape).to(parameter.dtype)

    def merge(self) -> nn.Module:
        """Return the module with the adapters merged into its parameters."""
        for name in self.lora_A:
            with torch.no_grad():
                self.base_layer.get_parameter(name).add_(self.delta(name))
        return self.base_layer


def add_adapter(
    model: CausalLM, settings: AdapterSection, *, seed: int, token_heads: bool = True
) -> None:
    """Freeze `model` and add an adapter to each target linear and parameter.

    `token_heads` is False if the trained tokens have no trained rows in a separate output head.
    Raises ConfigError for a target or token that the model lacks.
    """
    AdaptedSpec.of(
        model.spec,
        rank=settings.rank,
        target=settings.target,
        dropout=settings.dropout,
        is_dora=settings.dora,
        train_tokens=settings.train_tokens,
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.trained_beside_adapter().values():
        parameter.requires_grad_(True)
    names = target_names(settings.target)
    torch.manual_seed(seed)
    linears = _layer_linears(model)
    for path in linears:
        # PEFT can list full paths, as for all linears of a small GPT-2.
        if is_target(model.hf_name(path), names):
            linear = model.get_submodule(path)
            assert isinstance(linear, nn.Linear | QuantizedLinear)
            is_quantized = isinstance(linear, QuantizedLinear)
            plain = DoraLinear if settings.dora else LoraLinear
            adapted = (QuantizedLoraLinear if is_quantized else plain)(linear, settings)
            model.set_submodule(path, adapted)
    others = model.parameters_beside_linears()
    linears_in_hf = map(model.hf_name, linears)
    chosen = parameter_names(names, linears_in_hf, (each.name for each in others))
    for each in others:
        if is_parameter_target(each.name, chosen):
            path, _, name = each.name.rpartition(".")
            module = model.get_submodule(path)
            if not isinstance(module, LoraParameters):
                module = LoraParameters(module, settings)
                model.set_submodule(path, module)
            module.adapt(name, each)
    if tokens := token_ids(settings.train_tokens):
        paths = [path for path in (model.embedding_module(), model.head_module()) if path]
        if any(isinstance(model.get_submodule(path), LoraParameters) for path in paths):
            raise ConfigError(
                "adapter.target names the embedding or the output head, and adapter.train_tokens "
                "trains rows of the same weight in full. Use only one of the two settings."
            )
        model.train_tokens(tokens, with_head=token_heads)
    model.adapter = settings
    model.head_changed()


def quantize_base(model: CausalLM) -> None:
    """Convert the layers' linears to 4 bits and all other base weights to bf16, before loading.

    `require_fit` has rejected unsupported models. Raises ConfigError without bitsandbytes.
    """
    assert model.spec.why_not_quantized() is None
    require_quantizer()
    shrink(model, _layer_linears(model), trained=set(model.trained_beside_adapter().values()))


def cast_base_to_bf16(model: CausalLM) -> None:
    """Convert the frozen linears of an adapter's base to bf16, as autocast would at each use.

    Linears with the same input become adjacent in memory, as the kernels need for a joint matmul.
    """
    if model.adapter is None:
        return
    groups = model.joined_linears()
    joined = {path for paths in groups for path in paths}
    others = [
        (name,)
        for name, each in model.named_modules()
        if type(each) is LoraLinear and name not in joined
    ]
    for paths in (*groups, *others):
        modules = [model.get_submodule(path) for path in paths]
        if any(isinstance(each, QuantizedLinear | QuantizedLoraLinear) for each in modules):
            continue
        make_adjacent([cast(Tensor, each.weight) for each in modules])


def cast_base_to_fp32(model: CausalLM) -> None:
    """Convert the bf16 weights of a quantised base to fp32 without rounding, for a run in fp32.

    A base that is not quantised is already in fp32.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def adapter_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Return the tensors of the adapter and all weights trained with it, under PEFT's names."""
    beside = model.trained_beside_adapter()
    return {
        **{_peft_name(model, path, part): value for path, part, value in _adapter_parts(model)},
        **{_peft_name(model, path, _ROWS): rows for path, rows in model.token_rows().items()},
        **{f"{_PEFT_PREFIX}{name}": value for name, value in beside.items()},
    }


def save_adapter(
    model: CausalLM,
    folder: Path,
    *,
    base: tuple[str, str | None],
    progressed: Callable[[], None] = lambda: None,
) -> str:
    """Write the adapter in PEFT's layout.

    `base` is the folder or name of the base model, and its revision. Return the sha256
    of the weights' file. Raises OSError.
    """
    save_adapter_config(model, folder, base=base)
    return write_tensors(
        folder / ADAPTER_FILE,
        adapter_tensors(model),
        metadata={"format": "pt"},
        progressed=progressed,
    )


def save_adapter_config(model: CausalLM, folder: Path, *, base: tuple[str, str | None]) -> None:
    """Write the adapter's config file in PEFT's layout.

    `base` is the folder or name of the base model, and its revision. Raises OSError.
    """
    assert model.adapter is not None
    source, revision = base
    beside = tuple(name.partition(".")[0] for name in model.trained_beside_adapter())
    config = AdapterConfig(
        settings=model.adapter, base=source, revision=revision, modules_to_save=beside
    )
    modules, parameters = _peft_targets(model, model.adapter)
    content = render_adapter_config(
        config,
        modules=modules,
        parameters=parameters,
        transposed=model.transposes_linears(),
        token_modules=[model.hf_name(path).rpartition(".")[2] for path in model.token_rows()],
    )
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    if beside:
        # This file holds the labels, which PEFT's own files lack.
        labelled = json.dumps(model.hf_config(), indent=2) + "\n"
        (folder / CLASSIFIER_CONFIG_FILE).write_text(labelled, "utf-8")


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the adapter's weights in `folder`. Raises CheckpointError."""
    fix = "Use a folder with a LoRA adapter in PEFT's layout, or another checkpoint."
    return dict(LazyTensors(own_file(folder, ADAPTER_FILE), fix=fix))


def load_adapter(model: CausalLM, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Set the adapter of `model` from tensors under PEFT's names.

    Raises CheckpointError, naming `where`, if the tensors do not fit this adapter.
    """
    expected = adapter_tensors(model)
    require_tensors(
        expected,
        tensors,
        where=where,
        subject="this model's adapter",
        source="this model needs",
        fix="Use the base and the settings of the adapter's training.",
    )
    for name, target in expected.items():
        value = tensors[name]
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{where}: {name} holds NaN or infinity. Use another checkpoint.")
        with torch.no_grad():
            target.copy_(value)


def load_resized_rows(model: CausalLM, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set the embedding and the head from the rows that PEFT stores for a resized base.

    Return all other tensors. PEFT stores the rows of a tied head twice; the second copies are also
    left out.
    """
    rest, embedding = dict(tensors), model.embedding_module()
    if model.spec.is_tied():
        own = _peft_name(model, embedding, "token_adapter.")
        for name in tensors:
            if name.endswith((_ROWS, _BASE_ROWS)) and not name.startswith(own):
                del rest[name]
    for path in (embedding, model.head_module()):
        # PEFT's name depends on whether this module has trained rows.
        names = [_peft_name(model, path, part) for part in (_BASE_ROWS, "weight")] if path else []
        rows = next((rest.pop(name) for name in names if name in rest), None)
        if path is None or rows is None:
            continue
        if len(rows) > model.spec.vocab_size:
            model.add_tokens(model.spec.vocab_size, len(rows))
        weight = model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        if rows.shape == weight.shape:
            with torch.no_grad():
                weight.copy_(rows)
    return rest


def merge_adapter(
    model: CausalLM, *, merged_one: Callable[[Tensor, Tensor], None] = lambda _base, _merged: None
) -> None:
    """Add the adapter to the base's weights, then remove the adapter.

    The result is a plain fp32 model.

    A quantised base is dequantised: the result computes the same values, but uses the memory of
    fp32 weights. `merged_one` receives each weight with an adapter before and after the merge.
    """
    for path in [name for name, each in model.named_modules() if isinstance(each, LoraLinear)]:
        adapted = model.get_submodule(path)
        assert isinstance(adapted, LoraLinear)
        (plain, bias), weight = adapted.plain(), adapted.merged()
        merged_one(plain, weight)
        outputs, inputs = weight.shape
        merged = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
        merged.weight = nn.Parameter(weight)
        if bias is not None:
            merged.bias = bias
        model.set_submodule(path, merged)
    for path, each in list(model.named_modules()):
        if isinstance(each, LoraParameters):
            for name in each.lora_A:
                plain = each.base_layer.get_parameter(name).detach().float()
                merged_one(plain, plain + each.delta(name))
            model.set_submodule(path, each.merge())
    model.merge_tokens()
    dequantize(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.adapter = None
    model.head_changed()


def _peft_targets(model: CausalLM, settings: AdapterSection) -> tuple[list[str], list[str]]:
    """Return PEFT's `target_modules` and `target_parameters` of the model's adapter."""
    names = target_names(settings.target)
    others = tuple(each.name for each in model.parameters_beside_linears())
    linears = [name for name, each in model.named_modules() if isinstance(each, LoraLinear)]
    parameters = list(parameter_names(names, map(model.hf_name, linears), others))
    modules = [each for each in names or () if each not in (ALL_LINEAR, *parameters)]
    if model.spec.whole is not None:
        # A linear of another tower can have the same name.
        modules = [model.peft_path(each) for each in linears]
    elif names is None or ALL_LINEAR in names:
        modules = _module_names(model)
    for name in modules:
        # PEFT supports no dropout on a parameter.
        is_plain = not settings.dropout and not settings.dora
        if is_plain and model.peft_reads_as_expert(name):
            parameters.append(f"{name}.weight")
        elif name.endswith(".weight"):
            parameters.append(name)
    modules = [each for each in modules if not {each, f"{each}.weight"} & set(parameters)]
    return modules, parameters


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether the module maps each row of its input to one tensor.

    Some subclasses, such as routers, return more. Grouped linears reshape their input.
    """
    if isinstance(module, QuantizedLinear):
        return True
    if not isinstance(module, nn.Linear):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    with torch.no_grad():
        weight = module.weight
        zeros = torch.zeros(1, module.in_features, dtype=weight.dtype, device=weight.device)
        try:
            return isinstance(module(zeros), Tensor)
        except RuntimeError:  # of another shape than a linear takes
            return False


def _module_names(model: CausalLM) -> list[str]:
    """Return PEFT's `target_modules`: names that match only the linears with an adapter.

    A name is the last part of the module's path, or more parts if necessary. For example, `0` would
    also match a layer, but `projections.0` does not.
    """
    adapted: list[str] = []
    others: set[str] = set()
    for path, module in model.named_modules():
        parts = model.hf_name(path).split(".")
        if isinstance(module, LoraLinear):
            adapted.append(".".join(parts))
        else:
            others.update(".".join(parts[first:]) for first in range(len(parts)))
    names: set[str] = set()
    for whole in adapted:
        parts = whole.split(".")
        endings = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        names.add(next((each for each in endings if each not in others), whole))
    return sorted(names)


def _layer_linears(model: CausalLM) -> list[str]:
    """Return the paths of the layers' linears, without the output head."""
    head, beside = model.head_weight(), model.trained_beside_adapter().values()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear)
        and is_plain_linear(module)
        and model.is_adaptable(name)
        and module.weight is not head
        and not any(module.weight is each for each in beside)
        and not name.endswith("lm_head")
    ]


def _adapter_parts(model: CausalLM) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (module path, PEFT's parameter name, tensor) for each tensor of the adapter."""
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield path, "lora_A.weight", module.lora_A
            yield path, "lora_B.weight", module.lora_B
        if isinstance(module, DoraLinear):
            yield path, "lora_magnitude_vector", module.lora_magnitude_vector
        if isinstance(module, LoraParameters):
            # PEFT nests one wrapper for each parameter; the last parameter's is the outermost.
            for depth, name in enumerate(reversed(list(module.lora_A))):
                nested = path + ".base_layer" * depth
                yield nested, "lora_A.weight", module.lora_A[name]
                yield nested, "lora_B.weight", module.lora_B[name]


def _peft_name(model: CausalLM, path: str, part: str) -> str:
    return f"{_PEFT_PREFIX}{model.peft_path(path)}.{part}"
