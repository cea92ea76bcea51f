"""Weight gradients from blocked products, against the same sums in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from payload.kernels.library import Library
from tests.train.test_kernels import BF16, error, random

pytestmark = [pytest.mark.bf16, pytest.mark.usefixtures("fresh_memory_is_nan")]

# Sums of a few thousand products of bf16 elements, which are exact in fp32, in order.
SUMS = 1e-6


def in_slices(grad: Tensor, *, width: int) -> list[Tensor]:
    """Return (N, R) as S slices (N, W) with a row between them; unused elements are NaN."""
    number = -(-grad.shape[1] // width)
    buffer = grad.new_full((number, len(grad) + 1, width), float("nan"))[:, : len(grad)]
    for slice_, part in zip(buffer, torch.split(grad, width, dim=1), strict=True):
        slice_[:, : part.shape[1]] = part
    return list(buffer)


@pytest.mark.parametrize(
    ("tokens", "rows", "width"),
    [
        (1, 1, 1),
        (2, 16, 64),
        (31, 40, 66),
        (33, 257, 80),
        (64, 129, 200),
        (1024, 256, 64),
        (1057, 272, 70),
        (2111, 520, 130),
        (300, 800, 1700),
        (260, 1100, 1250),
    ],
)
def test_a_weight_s_gradient_is_the_sum_over_tokens(
    library: Library, threads: int, tokens: int, rows: int, width: int
) -> None:
    grad, x = random(tokens, rows).to(BF16), random(tokens, width, seed=1).to(BF16)
    true = grad.double().t() @ x.double()
    total = torch.empty(rows, width)
    library.weight_gradient(grad, x, total, add=False)
    assert error(total, true) < SUMS
    library.weight_gradient(grad, x, total, add=True)
    assert error(total, 2 * true) < SUMS


@pytest.mark.parametrize(
    ("tokens", "rows", "width"), [(1, 1, 1), (33, 257, 80), (1057, 272, 70), (2111, 520, 1090)]
)
def test_a_weight_s_gradient_in_bf16_is_the_fp32_one_rounded_once(
    library: Library, threads: int, tokens: int, rows: int, width: int
) -> None:
    grad, x = random(tokens, rows).to(BF16), random(tokens, width, seed=1).to(BF16)
    exact, total = torch.empty(rows, width), torch.empty(rows, width, dtype=BF16)
    library.weight_gradient(grad, x, exact, add=False)
    library.weight_gradient(grad, x, total, add=False)
    assert torch.equal(total, exact.to(BF16))
    with pytest.raises(ValueError, match="cannot be added to"):
        library.weight_gradient(grad, x, total, add=True)
    parts = [torch.empty(each, width, dtype=BF16) for each in (rows // 3, rows - rows // 3)]
    library.weight_gradients(grad, x, [(each, False) for each in parts])
    assert torch.equal(torch.cat(parts), total)


@pytest.mark.parametrize(("rows", "width"), [(200, 64), (192, 64), (700, 256), (1000, 384)])
def test_rows_in_slices_are_rows(library: Library, threads: int, rows: int, width: int) -> None:
    grad, x = random(77, rows).to(BF16), random(77, 48, seed=1).to(BF16)
    whole, pieces = torch.empty(rows, 48), torch.empty(rows, 48)
    library.weight_gradient(grad, x, whole, add=False)
    library.weight_gradient(in_slices(grad, width=width), x, pieces, add=False)
    assert torch.equal(whole, pieces)


def test_a_weight_s_gradient_does_not_depend_on_the_number_of_threads(library: Library) -> None:
    grad, x = random(1100, 600).to(BF16), random(1100, 200, seed=1).to(BF16)
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 5, 16):
        torch.set_num_threads(count)
        total = torch.empty(600, 200)
        library.weight_gradient(grad, x, total, add=False)
        found.append(total)
    torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("width", [30, 70, 130])
def test_what_lies_around_a_gradient_stays(library: Library, width: int) -> None:
    buffer = torch.full((302, width), float("nan"))
    grad, x = random(40, 300).to(BF16), random(40, width, seed=1).to(BF16)
    library.weight_gradient(grad, x, buffer[1:-1], add=False)
    assert buffer[1:-1].isfinite().all()
    assert buffer[[0, -1]].isnan().all()
