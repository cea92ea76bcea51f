"""How gradients become one: DDP's buckets, summed over ranks while the backward pass goes on."""

# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.

import time
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from payload.run_config import DistributedSection

# Gradients live in the buckets, one copy less; nothing reads them between buckets.
DDP_SETTINGS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)


class GradientExchange:
    """DDP's communication hook: averages a bucket, in fp32 or bf16, and keeps time.

    torch's own bf16 hook is refused on CPU, though gloo sums bf16: the check is for NCCL
    (torch 2.13, nn/parallel/distributed.py, `_check_comm_hook`).
    """

    def __init__(self, settings: DistributedSection) -> None:
        self._as_bf16 = settings.grad_dtype == "bf16"
        self._last_bucket_s = 0.0

    def attach(self, model: torch.nn.Module) -> None:
        """Use this exchange for `model` if it is a DDP module; alone there is nothing to sum."""
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._average)

    def exposed_time_s(self, *, backward_done_s: float) -> float:
        """How long the backward pass that ended then had waited for its last bucket."""
        return max(0.0, backward_done_s - self._last_bucket_s) if self._last_bucket_s else 0.0

    def _average(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = buffer.to(torch.bfloat16) if self._as_bf16 else buffer
        sent.div_(dist.get_world_size())
        work = cast(Any, dist.all_reduce(sent, async_op=True))
        if bucket.is_last():
            self._last_bucket_s = time.perf_counter()

        def _received(done: torch.futures.Future[Any]) -> torch.Tensor:
            summed = done.value()[0]
            return buffer.copy_(summed) if self._as_bf16 else cast(torch.Tensor, summed)

        return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(_received))
