"""The collectives of sharded ranks in a pass, and how long they wait for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Waiting:
    """Counts the seconds that collectives take, which no computing hides."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        found, self.seconds = self.seconds, 0.0
        return found


class _Comm:
    """The parts that FSDP2 asks of a collective: a buffer, and the call."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Comm):
    """gloo's all-gather of weights."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Put the ranks' inputs behind each other into the output; wait for it."""
        del async_op
        began_s = time.perf_counter()
        dist.all_gather_single(output_tensor, input_tensor, group=group)
        self._waiting.seconds += time.perf_counter() - began_s


class SumOfParts(_Comm):
    """A reduce-scatter of gradients: each rank sends every other one its part, and adds up.

    gloo's own is a whole all-reduce, of which all but a part is dropped
    (https://github.com/pytorch/pytorch/issues/149869). This one sends half as much. Sums are fp32,
    in the order of the ranks.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Put the sum of the ranks' inputs, this rank's part of it, into the output."""
        del async_op
        assert op == dist.ReduceOp.SUM, "the strategy has FSDP2 divide, not the collective"
        began_s = time.perf_counter()
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(dist.get_world_size(group), -1)
        if output_tensor.dtype == torch.float32:
            torch.sum(parts, 0, out=output_tensor)
        else:
            output_tensor.copy_(torch.sum(parts, 0, dtype=torch.float32))
        self._waiting.seconds += time.perf_counter() - began_s
