"""4-bit linears: bitsandbytes' NF4 with double quantisation, computed in bf16 or fp32.

The layout and the bf16 computation are the same as in bitsandbytes' `Linear4bit`. A run in fp32
uses the same dequantised weights, rounded to bf16, so the base is the same on any CPU. All tensors
of a quantised linear are frozen parameters. Ranks exchange and compare these parameters like other
weights. I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from payload.models.nf4 import BLOCK_SIZE, GROUP_SIZE, num_blocks, num_groups
from payload.train.models.autocast import matmul_dtype
from payload.train.tensors.bitsandbytes_import import bitsandbytes_library
from payload.train.tensors.lazy_tensors import copy_in

_AT_ONCE = 2**18
"""Number of weights to quantise at a time, in whole blocks. bitsandbytes makes fp32 copies of
the weights. A small number limits the memory of these copies."""


class QuantizedLinear(nn.Module):
    """A frozen linear whose weight (O, I) is stored in 4 bits; `take` sets the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        """Replace `linear`, and keep its bias."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        elements, device = self.in_features * self.out_features, linear.weight.device
        self.weight = _frozen(torch.empty(-(-elements // 2), 1, dtype=torch.uint8, device=device))
        """The 4-bit weights, two in each byte."""
        self.scales = _frozen(torch.empty(num_blocks(elements), dtype=torch.uint8, device=device))
        self.scales_scales = _frozen(torch.empty(num_groups(elements), device=device))
        self.scales_mean = _frozen(torch.empty(1, device=device))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O), in autocast's dtype, or in the dtype of `x` without
        autocast."""
        dtype = matmul_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        # bitsandbytes' kernel for AVX-512 gives rows of unfinished blocks the wrong scales.
        if dtype == torch.float32 or self.in_features % BLOCK_SIZE:
            product = _DequantizedMatmul.apply(x.to(dtype), self)
            return cast(Tensor, product if bias is None else product + bias)
        found = _library().matmul_4bit(
            x.to(dtype), self.weight, quant_state=self._state(torch.Size(self.size())), bias=bias
        )
        return cast(Tensor, found)

    def size(self) -> tuple[int, int]:
        """Return the weight's shape, (O, I)."""
        return self.out_features, self.in_features

    def take(self, weight: Tensor) -> None:
        """Quantise `weight` (O, I) bf16 in several steps; one step would give the same bits."""
        functions, elements = _library().functional, weight.reshape(-1)
        scales = torch.empty(num_blocks(elements.numel()), device=weight.device)
        for start in range(0, elements.numel(), _AT_ONCE):
            packed, state = functions.quantize_4bit(
                elements[start : start + _AT_ONCE], blocksize=BLOCK_SIZE, quant_type="nf4"
            )
            first = start // 2
            self.weight.data[first : first + len(packed)] = packed
            first = start // BLOCK_SIZE
            scales[first : first + len(state.absmax)] = state.absmax
        mean = scales.mean()
        self.scales.data, nested = functions.quantize_blockwise(scales - mean, blocksize=GROUP_SIZE)
        self.scales_scales.data.copy_(nested.absmax)
        self.scales_mean.data.copy_(mean)

    def load_weight(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Round a checkpoint's tensor to bf16 and quantise it."""
        rounded = torch.empty(self.size(), dtype=torch.bfloat16, device=self.weight.device)
        copy_in(tensors, name, rounded)
        self.take(rounded)
        del rounded
        trim_free_memory()

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight, (O, I). All values are exact in bf16."""
        # As one row, because blocks run across rows. For AVX-512, bitsandbytes 0.50.2 takes a
        # row's scales from `row * (inputs // block)` on, also if a block began in the row before.
        state = self._state(torch.Size((self.in_features * self.out_features,)))
        found: Tensor = _library().functional.dequantize_4bit(self.weight.detach(), state)
        return found.view(self.size()).to(dtype)

    def _state(self, shape: torch.Size) -> Any:
        functions, device = _library().functional, self.weight.device
        nested = functions.QuantState(
            absmax=self.scales_scales.detach(),
            code=_scales_code(device),
            blocksize=GROUP_SIZE,
            dtype=torch.float32,
        )
        return functions.QuantState(
            absmax=self.scales.detach(),
            shape=shape,
            code=functions.get_4bit_type("nf4", device=device),
            blocksize=BLOCK_SIZE,
            quant_type="nf4",
            dtype=torch.bfloat16,
            offset=self.scales_mean.detach()[0],
            state2=nested,
        )


class _DequantizedMatmul(torch.autograd.Function):
    """A matmul with a quantised weight, dequantised in forward and backward to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return x @ linear.dequantized(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.linear.dequantized(gradient.dtype), None


def shrink(model: nn.Module, paths: list[str], *, trained: set[Tensor]) -> None:
    """Convert the linears at `paths` to 4 bits, and all other weights except `trained` to bf16.

    The converted weights are uninitialised until the caller loads them.
    """
    for path in paths:
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(path, QuantizedLinear(linear))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_packed = isinstance(module, QuantizedLinear) and name != "bias"
            if not is_packed and parameter not in trained:
                parameter.data = torch.empty_like(parameter, dtype=torch.bfloat16)


def loading_targets(
    module: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor | QuantizedLinear]:
    """Return the destinations of a checkpoint's tensors by name: the `tensors` of `module`.

    A quantised linear is a single destination, although its packed weight and its scales are
    several tensors.
    """
    found: dict[str, Tensor | QuantizedLinear] = dict(tensors)
    for path, each in module.named_modules():
        if isinstance(each, QuantizedLinear):
            for name, _ in each.named_parameters():
                if name != "bias":
                    del found[f"{path}.{name}"]
            found[f"{path}.weight"] = each
    return found


def trim_free_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed memory between the weights in use, and allocates new memory for the next
    linear. Without this call, loading a 0.3B model in 4 bits takes a fifth more memory
    (benchmarks/loading.py).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # Only in glibc.
        trim(0)


def dequantize(model: nn.Module) -> None:
    """Convert quantised linears to plain ones, and all weights to fp32."""
    for path, each in list(model.named_modules()):
        if isinstance(each, QuantizedLinear):
            plain = nn.Linear(
                each.in_features, each.out_features, bias=each.bias is not None, device="meta"
            )
            plain.weight = nn.Parameter(each.dequantized(torch.float32))
            if each.bias is not None:
                plain.bias = each.bias
            model.set_submodule(path, plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()


def require_quantizer() -> None:
    """Raise ConfigError with the install command if bitsandbytes is missing."""
    _library()


def _library() -> Any:
    return bitsandbytes_library(quantizes=True)


@lru_cache(maxsize=4)
def _scales_code(device: torch.device) -> Tensor:
    """Return the 256 values to which a block's scale is rounded."""
    return cast(Tensor, _library().functional.create_dynamic_map().to(device))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
