"""The collectives of sharded ranks during training, with the time that the ranks wait for them."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveTimer:
    """Counts the seconds of collectives that do not overlap with computation."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        found, self.seconds = self.seconds, 0.0
        return found


class Buffers:
    """Reuses memory for collectives: a buffer is free once no tensor refers to it.

    All layers have the same size, and at most two are in progress. Newly mapped memory costs more
    than the copy into it, because each page is faulted in and zeroed.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[np.ndarray[Any, Any], weakref.ref[Any]]] = []

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of `elements` elements."""
        if elements == 0:  # numpy's empty array has no bytes to view as another dtype
            return torch.empty(0, dtype=dtype)
        num_bytes = elements * dtype.itemsize
        place = next(
            (
                index
                for index, (memory, view) in enumerate(self._kept)
                if view() is None and memory.nbytes == num_bytes
            ),
            len(self._kept),
        )
        memory = np.empty(num_bytes, np.uint8) if place == len(self._kept) else self._kept[place][0]
        # A tensor's storage and its views refer to this object, and no other object does.
        view = memory.view()
        self._kept[place : place + 1] = [(memory, weakref.ref(view))]
        return torch.from_numpy(view).view(dtype)


class _Comm:
    """The interface that FSDP2 expects of a collective: it allocates a buffer and is callable."""

    def __init__(self, timer: CollectiveTimer, buffers: Buffers | None = None) -> None:
        self._timer = timer
        self._buffers = buffers
        """Memory that a layer's collectives reuse; None = allocate at each call."""

    def _empty(self, elements: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._buffers is None:
            return torch.empty(elements, dtype=dtype, device=device)
        return self._buffers.take(elements, dtype)


class Gather(_Comm):
    """An all-gather of weights: each rank sends its shard to all others at the same time.

    gloo's all-gather took three times as long between two ranks (2026-11-25, two cores).
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer for the output; the input is a slice of it."""
        return self._empty(math.prod(map(int, size)), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Concatenate the ranks' inputs in the output, and wait until this is complete."""
        del async_op
        began_s = time.perf_counter()
        gather(output_tensor, input_tensor, group=group)
        self._timer.seconds += time.perf_counter() - began_s


def gather(output: Tensor, part: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Concatenate the ranks' parts, which all have the same size, in `output`."""
    parts, rank = output.view(dist.get_world_size(group), -1), dist.get_rank(group)
    others = _others(group)
    works = [dist.irecv(parts[other], group=group, group_src=other) for other in others]
    works += [dist.isend(part, group=group, group_dst=other) for other in others]
    if parts[rank].data_ptr() != part.data_ptr():  # FSDP2's input is a slice of its output
        parts[rank].copy_(part.view(-1))
    _wait(works)


def _exchange(parts: Tensor, buffer: Tensor, *, group: dist.ProcessGroup) -> list[Tensor]:
    """Send every other rank its part; return the parts for this rank, in rank order.

    `buffer` receives the other ranks' parts.
    """
    others = _others(group)
    received = dict(zip(others, buffer, strict=True))
    works = [dist.irecv(received[other], group=group, group_src=other) for other in others]
    works += [dist.isend(parts[other], group=group, group_dst=other) for other in others]
    _wait(works)
    rank = dist.get_rank(group)
    return [parts[each] if each == rank else received[each] for each in range(len(parts))]


def _others(group: dist.ProcessGroup | None) -> list[int]:
    rank = dist.get_rank(group)
    return [other for other in range(dist.get_world_size(group)) if other != rank]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "every rank is in its own group"
        work.wait()


class SumOfParts(_Comm):
    """A reduce-scatter of gradients: each rank receives its part from all ranks and adds the parts
    up.

    gloo's reduce-scatter runs a full all-reduce and drops all other parts
    (https://github.com/pytorch/pytorch/issues/149869). This class sends half as much, and adds in
    fp32, in the order of the ranks.
    """

    def __init__(self, timer: CollectiveTimer, buffers: Buffers | None = None) -> None:
        super().__init__(timer, buffers)
        self._has_input = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer for the input, and at the next call a buffer for the output.

        The output becomes the gradient and is kept until the update, so its buffer is not reused.
        """
        self._has_input = not self._has_input
        if self._has_input:
            return self._empty(math.prod(map(int, size)), dtype=dtype, device=device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Set the output to this rank's part of the sum of all ranks' inputs."""
        del async_op
        assert op == dist.ReduceOp.SUM, "FSDP2 divides, not the collective"
        began_s = time.perf_counter()
        parts = input_tensor.view(dist.get_world_size(group), -1)
        others = input_tensor.numel() - parts.shape[1]
        buffer = self._empty(others, dtype=parts.dtype, device=parts.device)
        received = _exchange(parts, buffer.view(-1, parts.shape[1]), group=group)
        total = output_tensor
        if output_tensor.dtype != torch.float32:
            total = torch.empty_like(output_tensor, dtype=torch.float32)
            received = [part.float() for part in received]
        torch.add(received[0], received[1], out=total)
        for part in received[2:]:
            total.add_(part)
        if total is not output_tensor:
            output_tensor.copy_(total)
        self._timer.seconds += time.perf_counter() - began_s
