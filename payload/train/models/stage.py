"""A pipeline stage of a model: some of its layers, and what it sends to the stages beside it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FORWARD, _BACKWARD = 1, 2
"""Tags of what two neighbours send each other, each kind in the order of the passes."""


class Elsewhere(nn.Module):
    """Stands for a module that is on another stage; it is never called."""


@dataclass(slots=True, eq=False)
class Stage:
    """This rank's stage. Activations are fp32, (B, T, C)."""

    index: int
    stages: int
    layers: range
    """Numbers of the layers that are here."""
    ranks: tuple[int, ...]
    """The ranks that pass activations on, a stage each."""
    group: dist.ProcessGroup
    """Process group of these ranks."""
    width: int
    """C."""
    device: torch.device
    seconds: float = field(default=0.0, init=False)
    """Waited for neighbours since it was set to 0."""
    _received: deque[Tensor] = field(default_factory=deque, init=False)
    _under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque, init=False)

    def is_first(self) -> bool:
        """Say whether this stage has the token embedding."""
        return self.index == 0

    def is_last(self) -> bool:
        """Say whether this stage has the output head and the loss."""
        return self.index == self.stages - 1

    def receive(self, tokens: Tensor) -> Tensor:
        """Return what the stage before made of `tokens` (B, T); `send_back` takes its gradient."""
        x = torch.empty((*tokens.shape, self.width), device=self.device)
        self._wait_for(x, source=self.index - 1, tag=_FORWARD)
        if torch.is_grad_enabled():
            x.requires_grad_()
            self._received.append(x)
        return x

    def send(self, x: Tensor) -> None:
        """Begin to send the result of a pass to the next stage."""
        self._begin(x.detach(), to=self.index + 1, tag=_FORWARD)

    def receive_back(self, x: Tensor) -> Tensor:
        """Return the gradient of a result from the next stage."""
        grad = torch.empty(x.shape, device=self.device)
        self._wait_for(grad, source=self.index + 1, tag=_BACKWARD)
        return grad

    def send_back(self) -> None:
        """Begin to send the gradient of what was received longest ago to the stage before."""
        x = self._received.popleft()
        assert x.grad is not None, "the backward pass of what was received is done"
        self._begin(x.grad, to=self.index - 1, tag=_BACKWARD)

    def finish(self) -> None:
        """Wait until all that this stage sends has left."""
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
