"""A pipeline stage: some layers of a model, and the messages to and from its neighbours."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FORWARD, _BACKWARD = 1, 2
"""Message tags; neighbours send the messages of one tag in the order of micro-batches."""


class OtherStageModule(nn.Module):
    """Placeholder for a module of another stage. It is never called."""


@dataclass(slots=True, eq=False)
class Stage:
    """The pipeline stage of this rank. It sends and receives activations in fp32, (B, T, C)."""

    index: int
    stages: int
    layers: range
    """Indices of this stage's layers."""
    ranks: tuple[int, ...]
    """One rank of each stage, in the order of the stages."""
    group: dist.ProcessGroup
    """Process group of these ranks."""
    width: int
    """The width C of the activations."""
    device: torch.device
    seconds: float = field(default=0.0, init=False)
    """Seconds spent waiting for neighbours since the last reset to 0."""
    _received: deque[Tensor] = field(default_factory=deque, init=False)
    _under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque, init=False)

    def is_first(self) -> bool:
        """Return whether this stage has the token embedding."""
        return self.index == 0

    def is_last(self) -> bool:
        """Return whether this stage has the output head and the loss."""
        return self.index == self.stages - 1

    def receive(self, tokens: Tensor) -> Tensor:
        """Return the previous stage's output for `tokens` (B, T), as a leaf with gradient."""
        x = torch.empty((*tokens.shape, self.width), device=self.device)
        self._wait_for(x, source=self.index - 1, tag=_FORWARD)
        if torch.is_grad_enabled():
            x.requires_grad_()
            self._received.append(x)
        return x

    def send(self, x: Tensor) -> None:
        """Begin to send a micro-batch's activations (B, T, C) to the next stage."""
        self._begin(x.detach(), to=self.index + 1, tag=_FORWARD)

    def receive_back(self, x: Tensor) -> Tensor:
        """Receive the gradient of this stage's output from the next stage."""
        grad = torch.empty(x.shape, device=self.device)
        self._wait_for(grad, source=self.index + 1, tag=_BACKWARD)
        return grad

    def send_back(self) -> None:
        """Begin to send the gradient of the oldest received activations to the previous stage."""
        x = self._received.popleft()
        assert x.grad is not None, "their backward pass is complete"
        self._begin(x.grad, to=self.index - 1, tag=_BACKWARD)

    def finish(self) -> None:
        """Wait until all messages of this stage are sent."""
        began_s = time.perf_counter()
        while self._under_way:
            self._under_way.popleft()[0].wait()
        self.seconds += time.perf_counter() - began_s

    def _begin(self, x: Tensor, *, to: int, tag: int) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        sent = x.to(torch.float32).contiguous()
        work = dist.isend(sent, dst=self.ranks[to], group=self.group, tag=tag)
        self._under_way.append((work, sent))

    def _wait_for(self, x: Tensor, *, source: int, tag: int) -> None:
        began_s = time.perf_counter()
        dist.recv(x, src=self.ranks[source], group=self.group, tag=tag)
        self.seconds += time.perf_counter() - began_s
