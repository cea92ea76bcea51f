"""Gradients of several passes, added in place, against the sums that autograd makes."""

# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.nn.parallel import DistributedDataParallel

from payload.train.kernels.kernels import Kernels
from payload.train.kernels.library import Library
from payload.train.model import GPT
from tests.train.test_kernels import bf16, error
from tests.train.test_model import make_model, tokens

PASSES = 3


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(model: nn.Module, kernels: Kernels | None, *, dtype: str) -> dict[str, Tensor]:
    """Of a mean over passes, each on its own tokens, as the trainer takes them."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(plain, GPT)
    plain.kernels = kernels
    for index in range(PASSES):
        batch = tokens(3, 40).roll(index, dims=1)
        last = index == PASSES - 1
        waits = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            with bf16() if dtype == "bf16" else nullcontext():
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / PASSES).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 2e-6), ("bf16", 2e-2)])
@pytest.mark.parametrize("with_library", [True, False])
def test_passes_add_up_to_the_reference_s_gradients(
    library: Library, with_library: bool, dtype: str, bound: float
) -> None:
    model = make_model()
    expected = gradients(copy.deepcopy(model), None, dtype=dtype)
    found = gradients(model, Kernels(library if with_library else None), dtype=dtype)
    assert found.keys() == expected.keys()
    for name, true in expected.items():
        assert error(found[name], true) < bound, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ddp_exchanges_the_sums(library: Library, alone: None, dtype: str) -> None:
    model, sent = make_model(), []
    expected = gradients(copy.deepcopy(model), Kernels(library), dtype=dtype)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def record(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().clone())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().mul_(2))
        return done

    wrapped.register_comm_hook(None, record)
    found = gradients(wrapped, Kernels(library), dtype=dtype)
    assert sum(each.numel() for each in sent) == sum(each.numel() for each in expected.values())
    # What came back from the exchange is what the update will see.
    assert all(torch.equal(found[name], 2 * value) for name, value in expected.items())


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 65), (300, 192)])
def test_rows_are_added_where_indices_say(library: Library, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    total, added = (torch.randn(size, width, generator=generator) for size in (11, rows))
    indices = torch.randint(11, (rows,), generator=generator)
    expected = total.index_add(0, indices, added)
    library.add_rows(total, indices, added)
    assert torch.equal(total, expected)
