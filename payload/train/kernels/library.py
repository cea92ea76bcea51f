"""The built library's functions, on tensors. Each checks that the sizes fit: C++ does not."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from payload.data.blocks import IGNORED_TARGET
from payload.train.kernels.build import built_library
from payload.train.kernels.unavailable import KernelsUnavailableError

_SUM_ROWS = 64
"""Rows for which a sum over rows has one part."""

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DOUBLE = ctypes.c_double

_SIGNATURES: dict[str, list[type]] = {
    "attention_forward": [*[_POINTER] * 3, *[_SIZE] * 4, _INT],
    "attention_backward": [*[_POINTER] * 5, *[_SIZE] * 4, _INT],
    "cross_entropy_bf16": [_POINTER, *[_SIZE] * 4, _POINTER, _SIZE, _FLOAT, _INT, _POINTER, _INT],
    "cross_entropy_fp32": [_POINTER, *[_SIZE] * 4, _POINTER, _SIZE, _FLOAT, _INT, _POINTER, _INT],
    "gelu_forward": [*[_POINTER] * 2, _SIZE, _INT],
    "gelu_backward": [*[_POINTER] * 3, _SIZE, _INT],
    "weight_gradient": [_POINTER, *[_SIZE] * 2, *[_POINTER] * 2, *[_SIZE] * 3, _INT, _INT],
    "sum_rows": [*[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "widen_add": [*[_POINTER] * 2, _SIZE, _INT],
    "add_rows": [*[_POINTER] * 3, *[_SIZE] * 2, _INT],
    "add_norm_forward": [*[_POINTER] * 4, _FLOAT, *[_POINTER] * 4, *[_SIZE] * 2, _INT],
    "add_norm_backward": [*[_POINTER] * 10, *[_SIZE] * 2, _INT],
    "sum_squares": [_POINTER, _POINTER, _SIZE, _POINTER, _INT],
    "adamw": [_POINTER, _SIZE, _FLOAT, _DOUBLE, _DOUBLE, _FLOAT, _INT],
}

_TAKES_MEMORY = {
    "attention_forward",
    "attention_backward",
    "weight_gradient",
    "sum_squares",
    "adamw",
}
"""Return whether there was too little of it; the others return nothing."""


class TensorUpdate(ctypes.Structure):
    """One tensor of an AdamW update: addresses of fp32 numbers, of the bf16 copy or None."""

    _fields_ = (
        ("weight", _POINTER),
        ("mean", _POINTER),
        ("square", _POINTER),
        ("grad", _POINTER),
        ("copy", _POINTER),
        ("count", _SIZE),
        ("keep", _FLOAT),
        ("step_size", _FLOAT),
        ("correction", _FLOAT),
    )


class Library:
    """The kernels, as loaded. Threads are torch's at the call."""

    def __init__(self, path: Path) -> None:
        """Load what `built_library` built. Raises KernelsUnavailableError."""
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailableError(f"{path} cannot be loaded: {error}") from None
        for name, types in _SIGNATURES.items():
            function = getattr(self._functions, f"tileforge_{name}")
            function.argtypes = types
            function.restype = _INT if name in _TAKES_MEMORY else None
        self.has_products: bool = bool(self._functions.tileforge_has_products())
        """Whether this CPU multiplies bf16 blocks; else layers and their gradients are torch's."""

    def attention_forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention: qkv (B, T, 3, H, D) bf16 to (B, T, H, D), and (B, H, T) log sums."""
        batch, length, three, heads, width = qkv.shape
        assert three == 3 and width % 2 == 0
        out = qkv.new_empty(batch, length, heads, width)
        log_sums = torch.empty(batch, heads, length)
        self._call("attention_forward", qkv, out, log_sums, batch, length, heads, width)
        return out, log_sums

    def attention_backward(
        self, qkv: Tensor, out: Tensor, log_sums: Tensor, grad_out: Tensor
    ) -> Tensor:
        """The gradient of qkv; `out` and `log_sums` are the forward pass's."""
        batch, length, _, heads, width = qkv.shape
        assert out.shape == grad_out.shape == (batch, length, heads, width)
        grad = torch.empty_like(qkv)
        sizes = (batch, length, heads, width)
        self._call("attention_backward", qkv, out, log_sums, grad_out, grad, *sizes)
        return grad

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, *, vocabulary: int, grad_scale: float | None
    ) -> Tensor:
        """Loss of each row, fp32; with a scale, `logits` become their gradient times it.

        `logits` are bf16 or fp32, (S, N, W) for S slices of the vocabulary; slices may lie apart.
        What is beyond the vocabulary in the last one stays.
        """
        slices, rows, width = logits.shape
        assert logits.stride()[1:] == (width, 1) and targets.shape == (rows,)
        assert (slices - 1) * width < vocabulary <= slices * width
        losses = torch.empty(rows)
        name = "cross_entropy_bf16" if logits.dtype == torch.bfloat16 else "cross_entropy_fp32"
        sizes = (rows, vocabulary, width, logits.stride(0))
        scale = 0.0 if grad_scale is None else grad_scale
        with_grad = int(grad_scale is not None)
        last = (targets.contiguous(), IGNORED_TARGET, scale, with_grad, losses)
        self._call(name, logits.data_ptr(), *sizes, *last)
        return losses

    def gelu_forward(self, x: Tensor) -> Tensor:
        """GPT-2's tanh form, bf16."""
        y = torch.empty_like(x)
        self._call("gelu_forward", x, y, x.numel())
        return y

    def gelu_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The output anew; `grad`, of the output, becomes the gradient of `x` in its place."""
        assert x.shape == grad.shape
        y = torch.empty_like(x)
        self._call("gelu_backward", x, grad, y, x.numel())
        return y

    def weight_gradient(self, grad: Tensor, x: Tensor, total: Tensor, *, add: bool) -> None:
        """The transpose of `grad` (N, R) times x (N, C), both bf16, to `total` (R, C) fp32.

        With `add`, `total` gains it. `grad` may be (S, N, W), S slices of R, which may lie apart;
        the last one may have columns too many.
        """
        slices = grad if grad.ndim == 3 else grad.unsqueeze(0)
        (number, tokens, slice_rows), (rows, width) = slices.shape, total.shape
        assert slices.stride()[1:] == (slice_rows, 1) and x.shape == (tokens, width)
        assert (number - 1) * slice_rows < rows <= number * slice_rows
        assert grad.dtype == x.dtype == torch.bfloat16 and total.dtype == torch.float32
        sizes = (tokens, rows, width)
        where = (slices.data_ptr(), slice_rows, slices.stride(0))
        self._call("weight_gradient", *where, x, total, *sizes, int(add))

    def sum_rows(self, x: Tensor) -> Tensor:
        """The sum of the rows of x (N, C) bf16, fp32: torch would widen all of x first."""
        rows, width = x.shape
        parts = torch.empty(-(-rows // _SUM_ROWS), width)
        self._call("sum_rows", x, parts, rows, width)
        return parts.sum(dim=0)

    def widen_add(self, x: Tensor, total: Tensor) -> None:
        """Add x, bf16, to `total`, fp32 of the same shape."""
        assert x.shape == total.shape and total.dtype == torch.float32
        self._call("widen_add", x, total, x.numel())

    def add_rows(self, total: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Add rows (N, C) to those of `total` (V, C) that indices (N,) name; all fp32."""
        assert rows.shape == (len(indices), total.shape[1]) and total.dtype == torch.float32
        assert len(indices) == 0 or 0 <= int(indices.min()) <= int(indices.max()) < len(total)
        self._call("add_rows", total, indices, rows.contiguous(), *rows.shape)

    def add_norm_forward(
        self, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, *, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (N, C) fp32 plus `added` bf16, its norm in bf16, and each row's mean and 1 / std."""
        rows, width = x.shape
        total = x if added is None else torch.empty_like(x)
        normed = torch.empty(rows, width, dtype=torch.bfloat16)
        mean, rstd = torch.empty(rows), torch.empty(rows)
        tensors = (total, normed, mean, rstd)
        self._call("add_norm_forward", x, added, weight, bias, eps, *tensors, rows, width)
        return tensors

    def add_norm_backward(
        self,
        saved: tuple[Tensor, Tensor, Tensor],
        weight: Tensor,
        grad_total: Tensor | None,
        grad_normed: Tensor,
        *,
        adds: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Gradients of x, `added` (when `adds`), weight and bias; `saved` is total, mean, rstd."""
        rows, width = saved[0].shape
        grad_x = torch.empty(rows, width)
        grad_added = torch.empty(rows, width, dtype=torch.bfloat16) if adds else None
        parts = torch.empty(2, -(-rows // _SUM_ROWS), width)
        grads = (grad_total, grad_normed, grad_x, grad_added, parts[0], parts[1])
        self._call("add_norm_backward", *saved, weight, *grads, rows, width)
        weight_grad, bias_grad = parts.sum(dim=1)
        return grad_x, grad_added, weight_grad, bias_grad

    def sum_squares(self, tensors: list[Tensor]) -> float:
        """The sum of the squares of all numbers, fp32, of all tensors; in double precision."""
        assert all(each.is_contiguous() and each.dtype == torch.float32 for each in tensors)
        addresses = torch.tensor([each.data_ptr() for each in tensors])
        counts = torch.tensor([each.numel() for each in tensors])
        total = torch.zeros((), dtype=torch.float64)
        self._call("sum_squares", addresses, counts, len(tensors), total)
        return float(total)

    def adamw(
        self,
        updates: list[TensorUpdate],
        *,
        grad_scale: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Change weights, means, squares and copies; the caller keeps the tensors alive."""
        array = (TensorUpdate * len(updates))(*updates)
        self._call("adamw", ctypes.addressof(array), len(updates), grad_scale, *betas, eps)

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        """Call a kernel. Raises MemoryError; what it was to write is undefined then."""
        pointers: list[float | None] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_contiguous()
                pointers.append(argument.data_ptr())
            else:
                pointers.append(argument)
        function = getattr(self._functions, f"tileforge_{name}")
        if function(*pointers, torch.get_num_threads()):
            raise MemoryError(f"no memory for the kernel {name}")


def load_library() -> Library:
    """Build if needed, and load. Raises KernelsUnavailableError."""
    return Library(built_library(Path.home() / ".cache" / "tileforge" / "kernels"))
