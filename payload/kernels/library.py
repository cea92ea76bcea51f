"""The built library's functions, on tensors.

The C++ code receives addresses and sizes, and checks neither. Each function therefore raises
ValueError for tensors of a wrong dtype or shape, before it calls the C++ code. `assert` is not
used, because `python -O` removes it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from payload.formats.data_folder import IGNORED_TARGET
from payload.kernels.build import ISA, built_library, default_cache
from payload.kernels.unavailable import KernelsUnavailableError

SUM_ROWS = 64
"""Number of rows that are added up into one partial sum."""

Slices = Sequence[Tensor]
"""Column slices of a matrix; all have the same number of columns."""

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DOUBLE = ctypes.c_double

_ELEMENT_SIGNATURES: dict[str, list[type]] = {
    "attention_forward": [*[_POINTER] * 5, *[_SIZE] * 5, _FLOAT, _INT],
    "attention_backward": [*[_POINTER] * 7, *[_SIZE] * 5, _FLOAT, _INT],
    "cross_entropy": [_POINTER, *[_SIZE] * 3, _POINTER, _SIZE, _FLOAT, _INT, _POINTER, _INT],
    "gelu_forward": [*[_POINTER] * 2, _SIZE, _INT],
    "gelu_backward": [*[_POINTER] * 3, _SIZE, _INT],
    "sum_rows": [*[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "add_norm_forward": [*[_POINTER] * 4, _FLOAT, *[_POINTER] * 4, *[_SIZE] * 2, _INT],
    "add_norm_backward": [*[_POINTER] * 10, *[_SIZE] * 2, _INT],
    "rms_norm_forward": [
        *[*[_POINTER] * 2, _FLOAT, _POINTER, *[_FLOAT] * 2],
        *[*[_POINTER] * 3, *[_SIZE] * 2, _INT],
    ],
    "branch_rms_norm_forward": [
        *[*[_POINTER] * 2, *[_FLOAT] * 2, *[_POINTER] * 2, *[_SIZE] * 2, _INT]
    ],
    "rms_norm_backward": [
        *[*[_POINTER] * 3, _FLOAT, *[_POINTER] * 4, _FLOAT, _POINTER, *[_SIZE] * 2, _INT]
    ],
    "branch_rms_norm_backward": [*[_POINTER] * 3, _FLOAT, *[_POINTER] * 3, *[_SIZE] * 2, _INT],
    "rotate": [*[_POINTER] * 3, _FLOAT, *[_SIZE] * 6, _INT],
    "norm_rotate_forward": [
        *[*[_POINTER] * 2, _INT, *[_FLOAT] * 2, *[_POINTER] * 3, *[_SIZE] * 6, _INT]
    ],
    "norm_rotate_backward": [
        *[*[_POINTER] * 2, _INT, *[_FLOAT] * 2, *[_POINTER] * 4, *[_SIZE] * 6, _INT]
    ],
    "gated_forward": [*[_POINTER] * 2, _INT, *[_SIZE] * 2, _INT],
    "gated_backward": [*[_POINTER] * 3, _INT, *[_SIZE] * 2, _INT],
    "short_convolution_forward": [*[_POINTER] * 4, *[_SIZE] * 5, _INT],
    "short_convolution_backward": [*[_POINTER] * 7, *[_SIZE] * 5, _INT],
    "delta_rule_forward": [*[_POINTER] * 5, *[_SIZE] * 6, _INT],
    "delta_rule_backward": [*[_POINTER] * 8, *[_SIZE] * 6, _INT],
    "gated_norm_forward": [*[_POINTER] * 2, _FLOAT, *[_POINTER] * 2, *[_SIZE] * 5, _INT],
    "gated_norm_backward": [*[_POINTER] * 2, _FLOAT, *[_POINTER] * 5, *[_SIZE] * 5, _INT],
}
"""Functions that exist for both dtypes in `ELEMENTS`, with the dtype's name as suffix."""

_SIGNATURES: dict[str, list[type]] = {
    "weight_gradient": [_POINTER, _SIZE, *[_POINTER] * 4, *[_SIZE] * 3, *[_INT] * 2],
    "widen_add": [*[_POINTER] * 2, _SIZE, _INT],
    "add_rows": [*[_POINTER] * 3, *[_SIZE] * 2, _INT],
    "sum_squares": [*[_POINTER] * 3, _SIZE, _POINTER, _INT],
    "adamw": [_POINTER, _SIZE, _FLOAT, _DOUBLE, _DOUBLE, _FLOAT, _INT],
}

_TAKES_MEMORY = {
    "attention_forward",
    "attention_backward",
    "delta_rule_forward",
    "delta_rule_backward",
    "weight_gradient",
    "sum_squares",
    "adamw",
}
"""Functions that return whether they ran out of memory; all other functions return nothing."""

_MULTIPLIES_BF16 = {
    "weight_gradient",
    *(f"{name}_bf16" for name in _ELEMENT_SIGNATURES if name.startswith(("attention", "delta"))),
}
"""Functions with bf16 matmuls. If torch does not support them on a CPU, a call would end the
process."""

ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""The dtypes of matmuls and of the activations between them, with their names in the library."""


class TensorUpdate(ctypes.Structure):
    """The addresses and constants for the AdamW update of one tensor.

    The gradient is at `grad` in fp32 or at `rounded_grad` in bf16; the other address is null.
    `copy` is the address of the bf16 copy, or null. All other tensors are fp32.
    """

    _fields_ = (
        ("weight", _POINTER),
        ("mean", _POINTER),
        ("square", _POINTER),
        ("grad", _POINTER),
        ("rounded_grad", _POINTER),
        ("copy", _POINTER),
        ("count", _SIZE),
        ("keep", _FLOAT),
        ("step_size", _FLOAT),
        ("correction", _FLOAT),
    )


class Library:
    """The loaded kernels; each call uses as many threads as torch does at that time."""

    def __init__(self, path: Path) -> None:
        """Load the result of `built_library`. Raises KernelsUnavailableError."""
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailableError(f"{path} cannot be loaded: {error}") from None
        self._functions.tileforge_missing_instructions.restype = ctypes.c_char_p
        missing = self._functions.tileforge_missing_instructions()
        if missing is not None:
            raise KernelsUnavailableError(f"{path} needs {missing.decode()}, which this CPU lacks")
        every = {name: (name, types) for name, types in _SIGNATURES.items()}
        for suffix in ELEMENTS.values():
            every |= {f"{n}_{suffix}": (n, types) for n, types in _ELEMENT_SIGNATURES.items()}
        for symbol, (name, types) in every.items():
            function = getattr(self._functions, f"tileforge_{symbol}")
            function.argtypes = types
            function.restype = _INT if name in _TAKES_MEMORY else None
        self.has_products: bool = bool(self._functions.tileforge_has_products())
        """True if this CPU has bf16 matmul instructions; otherwise a run computes in fp32."""

    def attention_forward(
        self, qkv: Tensor, *, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention (B, T, H, D) of qkv (B, T, 3, H, D), and log sums (B, H, T)."""
        _require_qkv(qkv)
        flat = qkv.flatten(2, 3)
        return self.grouped_attention_forward(flat, key_heads=qkv.shape[3], starts=starts)

    def attention_backward(
        self,
        qkv: Tensor,
        out: Tensor,
        log_sums: Tensor,
        grad_out: Tensor,
        *,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of qkv. `out` and `log_sums` are results of the forward pass."""
        _require_qkv(qkv)
        flat, key_heads = qkv.flatten(2, 3), qkv.shape[3]
        grad = self.grouped_attention_backward(
            flat, out, log_sums, grad_out, key_heads=key_heads, starts=starts
        )
        return grad.view_as(qkv)

    def grouped_attention_forward(
        self,
        qkv: Tensor,
        *,
        key_heads: int,
        qk: Tensor | None = None,
        scale: float | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention (B, T, H, D) and its log sums (B, H, T).

        `qkv` is (B, T, H + 2 K, D), bf16 or fp32: query heads, then K heads of keys and K heads of
        values, each shared by H / K query heads. If `qk` (B, T, H + K, D) is given, it replaces
        queries and keys. A token attends to the tokens from `starts` (B, T) int64 up to itself;
        None = from the first token. The default scale is one over the root of D.
        """
        batch, length, heads, width = _attention_sizes(qkv, qk, starts, key_heads)
        out = qkv.new_empty(batch, length, heads, width)
        log_sums = torch.empty(batch, heads, length)
        sizes = (batch, length, heads, key_heads, width, scale or 0.0)
        self.call_on(qkv.dtype, "attention_forward", qkv, qk, starts, out, log_sums, *sizes)
        return out, log_sums

    def grouped_attention_backward(
        self,
        qkv: Tensor,
        out: Tensor,
        log_sums: Tensor,
        grad_out: Tensor,
        *,
        key_heads: int,
        qk: Tensor | None = None,
        scale: float | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of qkv; if `qk` is given, the gradient of `qk` is the part for
        queries and keys.

        `out` and `log_sums` are from the forward pass.
        """
        batch, length, heads, width = _attention_sizes(qkv, qk, starts, key_heads)
        sizes = (batch, length, heads, width)
        require_tensor("out", out, qkv.dtype, sizes)
        require_tensor("log_sums", log_sums, torch.float32, (batch, heads, length))
        require_tensor("grad_out", grad_out, qkv.dtype, sizes)
        grad = torch.empty_like(qkv)
        tensors = (qkv, qk, starts, out, log_sums, grad_out, grad)
        last = (batch, length, heads, key_heads, width, scale or 0.0)
        self.call_on(qkv.dtype, "attention_backward", *tensors, *last)
        return grad

    def cross_entropy(
        self, logits: Slices, targets: Tensor, *, vocabulary: int, grad_scale: float | None
    ) -> Tensor:
        """Return the loss of each row, fp32; with a scale, overwrite `logits` with their gradient.

        The gradient is multiplied by the scale. `logits` are bf16 or fp32, (N, W) for each of S
        slices of the vocabulary. Columns beyond the vocabulary in the last slice are unchanged.
        """
        dtype = logits[0].dtype
        rows, width = _require_slices(logits, vocabulary, dtype)
        require_tensor("targets", targets, torch.int64, (rows,))
        is_word = (targets >= 0) & (targets < vocabulary) | (targets == IGNORED_TARGET)
        _require(bool(is_word.all()), "a target is outside the vocabulary")
        losses = torch.empty(rows)
        sizes = (rows, vocabulary, width)
        scale = 0.0 if grad_scale is None else grad_scale
        with_grad = int(grad_scale is not None)
        last = (targets.contiguous(), IGNORED_TARGET, scale, with_grad, losses)
        self.call_on(dtype, "cross_entropy", _addresses(logits), *sizes, *last)
        return losses

    def gelu_forward(self, x: Tensor) -> Tensor:
        """Return GELU of x, bf16 or fp32, in GPT-2's tanh form."""
        require_tensor("x", x, element(x))
        y = torch.empty_like(x)
        self.call_on(x.dtype, "gelu_forward", x, y, x.numel())
        return y

    def gelu_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the recomputed output of GELU. Overwrite `grad`, the output's gradient, with the
        gradient of `x`."""
        require_tensor("x", x, element(x))
        require_tensor("grad", grad, x.dtype, x.shape)
        y = torch.empty_like(x)
        self.call_on(x.dtype, "gelu_backward", x, grad, y, x.numel())
        return y

    def weight_gradient(
        self, grad: Tensor | Slices, x: Tensor, total: Tensor, *, add: bool
    ) -> None:
        """Compute the transpose of `grad` (N, R) times x (N, C), both bf16, into `total` (R, C).

        With `add`, the product is added to `total`, which must then be fp32. The sums are fp32; a
        bf16 `total` receives them rounded. `grad` may be S slices of R, (N, W) each; the last slice
        may have extra columns.
        """
        slices = (grad,) if isinstance(grad, Tensor) else grad
        rows, width = total.shape
        tokens, _ = _require_slices(slices, rows, torch.bfloat16)
        require_tensor("x", x, torch.bfloat16, (tokens, width))
        self._weight_gradients(slices, x, [(total, add)])

    def weight_gradients(self, grad: Tensor, x: Tensor, totals: list[tuple[Tensor, bool]]) -> None:
        """Compute `weight_gradient` for several weights; `totals` has each (total, add).

        The columns of `grad` (N, R) belong to the first weight, then to the next, and so on.
        """
        require_tensor("grad", grad, torch.bfloat16)
        _require(grad.ndim == 2 and len(grad) == len(x), "grad is not (N, R)")
        require_tensor("x", x, torch.bfloat16)
        rows = sum(len(total) for total, _ in totals)
        _require(grad.shape[1] == rows, "grad has too many or too few columns")
        self._weight_gradients((grad,), x, totals)

    def _weight_gradients(
        self, slices: Slices, x: Tensor, totals: list[tuple[Tensor, bool]]
    ) -> None:
        tokens, width = x.shape
        rounds = totals[0][0].dtype is torch.bfloat16
        for total, add in totals:
            dtype = torch.bfloat16 if rounds else torch.float32
            require_tensor("total", total, dtype, (len(total), width))
            _require(not (rounds and add), "a bf16 total cannot be added to")
        addresses = torch.tensor([total.data_ptr() for total, _ in totals])
        rows = torch.tensor([len(total) for total, _ in totals])
        adds = torch.tensor([int(add) for _, add in totals])
        last = (len(totals), tokens, width, int(rounds))
        where = (_addresses(slices), slices[0].shape[1])
        self.call("weight_gradient", *where, x, addresses, rows, adds, *last)

    def sum_rows(self, x: Tensor) -> Tensor:
        """Return the sum of the rows of x (N, C) in fp32.

        x is bf16 or fp32; a bf16 x is never converted as a whole.
        """
        require_tensor("x", x, element(x))
        rows, width = x.shape
        parts = torch.empty(-(-rows // SUM_ROWS), width)
        self.call_on(x.dtype, "sum_rows", x, parts, rows, width)
        return parts.sum(dim=0)

    def widen_add(self, x: Tensor, total: Tensor) -> None:
        """Add x, bf16, to `total`, fp32 of the same shape."""
        require_tensor("x", x, torch.bfloat16)
        require_tensor("total", total, torch.float32, x.shape)
        self.call("widen_add", x, total, x.numel())

    def add_rows(self, total: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Add rows (N, C) to the rows of `total` (V, C) at `indices` (N,); all fp32."""
        rows = rows.contiguous()
        require_tensor("total", total, torch.float32)
        require_tensor("indices", indices, torch.int64, (len(indices),))
        require_tensor("rows", rows, torch.float32, (len(indices), total.shape[1]))
        if len(indices):
            is_row = 0 <= int(indices.min()) <= int(indices.max()) < len(total)
            _require(is_row, "an index is outside `total`")
        self.call("add_rows", total, indices, rows, *rows.shape)

    def add_norm_forward(
        self,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        *,
        eps: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x (N, C) + `added` in fp32, its norm in `dtype`, and each row's mean and 1 / std.

        `added` has the same `dtype`, x is fp32.
        """
        rows, width = x.shape
        require_tensor("x", x, torch.float32)
        require_tensor("added", added, dtype, x.shape)
        require_tensor("weight", weight, torch.float32, (width,))
        require_tensor("bias", bias, torch.float32, (width,))
        total = x if added is None else torch.empty_like(x)
        normed = torch.empty(rows, width, dtype=dtype)
        mean, rstd = torch.empty(rows), torch.empty(rows)
        tensors = (total, normed, mean, rstd)
        numbers = (*tensors, rows, width)
        self.call_on(dtype, "add_norm_forward", x, added, weight, bias, eps, *numbers)
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
        """Return the gradients of x, `added` (if `adds`), weight and bias.

        `saved` holds the forward pass's total, mean and rstd.
        """
        total, mean, rstd = saved
        rows, width = total.shape
        require_tensor("total", total, torch.float32)
        for name, each in (("mean", mean), ("rstd", rstd)):
            require_tensor(name, each, torch.float32, (rows,))
        require_tensor("weight", weight, torch.float32, (width,))
        require_tensor("grad_total", grad_total, torch.float32, total.shape)
        dtype = element(grad_normed)
        require_tensor("grad_normed", grad_normed, dtype, total.shape)
        grad_x = torch.empty(rows, width)
        grad_added = torch.empty(rows, width, dtype=dtype) if adds else None
        parts = torch.empty(2, -(-rows // SUM_ROWS), width)
        grads = (grad_total, grad_normed, grad_x, grad_added, parts[0], parts[1])
        self.call_on(dtype, "add_norm_backward", *saved, weight, *grads, rows, width)
        weight_grad, bias_grad = parts.sum(dim=1)
        return grad_x, grad_added, weight_grad, bias_grad

    def sum_squares(self, tensors: list[Tensor]) -> float:
        """Return the sum of squares over all elements in fp64; the tensors are fp32 or bf16."""
        for each in tensors:
            _require(each.dtype in (torch.float32, torch.bfloat16), "a tensor of another dtype")
            require_tensor("a tensor", each, each.dtype)
        addresses = torch.tensor([each.data_ptr() for each in tensors])
        is_bf16 = torch.tensor([int(each.dtype is torch.bfloat16) for each in tensors])
        counts = torch.tensor([each.numel() for each in tensors])
        total = torch.zeros((), dtype=torch.float64)
        self.call("sum_squares", addresses, is_bf16, counts, len(tensors), total)
        return float(total)

    def adamw(
        self,
        updates: list[TensorUpdate],
        *,
        grad_scale: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Update weights, moments and copies in place; the caller keeps the tensors alive."""
        array = (TensorUpdate * len(updates))(*updates)
        self.call("adamw", ctypes.addressof(array), len(updates), grad_scale, *betas, eps)

    def call_on(self, dtype: torch.dtype, name: str, *arguments: Tensor | float | None) -> None:
        """Call the version of a kernel for elements of this dtype, as `call` does."""
        _require(dtype in ELEMENTS, f"elements of {dtype}")
        self.call(f"{name}_{ELEMENTS[dtype]}", *arguments)

    def call(self, name: str, *arguments: Tensor | float | None) -> None:
        """Call a kernel. Raises MemoryError; in this case the output is undefined.

        Raises ValueError for a bf16 matmul that torch does not support on this CPU.
        """
        can_run = self.has_products or name not in _MULTIPLIES_BF16
        _require(can_run, f"{name} needs bf16 matmuls, which torch lacks on this CPU")
        pointers: list[float | None] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                _require(argument.is_contiguous(), "a tensor is not contiguous")
                pointers.append(argument.data_ptr())
            else:
                pointers.append(argument)
        function = getattr(self._functions, f"tileforge_{name}")
        if function(*pointers, torch.get_num_threads()):
            raise MemoryError(f"no memory for the kernel {name}")


def require_tensor(
    name: str, tensor: Tensor | None, dtype: torch.dtype, size: tuple[int, ...] | None = None
) -> None:
    """Raise ValueError if a tensor is not contiguous or has a wrong dtype or size.

    None is accepted.
    """
    if tensor is None:
        return
    is_right = tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu
    if not is_right or (size is not None and tensor.shape != size):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}: the kernel needs contiguous {dtype} {'' if size is None else size}"
        )


def require_starts(starts: Tensor | None, batch: int, length: int) -> None:
    """Raise ValueError for invalid document starts.

    For each token, `starts` (B, T) has the position of the first token of the same document.
    """
    require_tensor("starts", starts, torch.int64, (batch, length))
    if starts is not None and length:
        positions = torch.arange(length)
        fits = (starts >= 0) & (starts <= positions)
        _require(bool(fits.all()), "a token's start is negative or after the token")
        _require(bool((starts.diff() >= 0).all()), "starts decrease")


def element(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the kernel for a tensor: fp32 for an fp32 tensor, otherwise bf16."""
    return torch.float32 if tensor.dtype is torch.float32 else torch.bfloat16


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(f"a kernel's arguments do not fit: {problem}")


def _require_qkv(qkv: Tensor) -> None:
    require_tensor("qkv", qkv, element(qkv))
    _require(qkv.ndim == 5 and qkv.shape[2] == 3, "qkv is not (B, T, 3, H, D)")
    _require(qkv.shape[4] % 2 == 0, "a head's width is odd")


def _attention_sizes(
    qkv: Tensor, qk: Tensor | None, starts: Tensor | None, key_heads: int
) -> tuple[int, int, int, int]:
    """Return B, T, H and D. Raises ValueError for tensors that do not fit each other."""
    require_tensor("qkv", qkv, element(qkv))
    _require(qkv.ndim == 4, "qkv is not (B, T, H + 2 K, D)")
    batch, length, all_heads, width = qkv.shape
    heads = all_heads - 2 * key_heads
    _require(width % 2 == 0, "a head's width is odd")
    _require(
        key_heads > 0 and heads > 0 and heads % key_heads == 0,
        "the query heads are not a multiple of the key heads",
    )
    require_tensor("qk", qk, qkv.dtype, (batch, length, heads + key_heads, width))
    require_starts(starts, batch, length)
    return batch, length, heads, width


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([each.data_ptr() for each in tensors])


def _require_slices(slices: Slices, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (N, W) of each slice. Raises ValueError for invalid or too many slices."""
    _require(slices[0].ndim == 2, "a slice is not (N, W)")
    rows, width = slices[0].shape
    for each in slices:
        require_tensor("a slice", each, dtype, (rows, width))
    number = len(slices)
    _require((number - 1) * width < columns <= number * width, "too many or too few slices")
    return rows, width


def load_library() -> Library:
    """Load the library, which is built if missing. Raises KernelsUnavailableError.

    The environment variable TILEFORGE_CPU_ISA limits its instruction set.
    """
    return Library(built_library(default_cache(), isa=os.environ.get(ISA)))
