"""Averages gradients over ranks in buckets, overlapped with the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from payload.config.launch_sections import DistributedSection
from payload.kernels.accumulate import gradient_dtype
from payload.train.models.base import CausalLM, trainable
from payload.train.ranks.world import World
from payload.train.strategies.buckets import Bucket, make_buckets
from payload.train.strategies.embedding_gradients import TokenExchange


@dataclass(frozen=True, slots=True)
class _PendingSum:
    """An all-reduce in progress."""

    elements: Tensor
    sent: Tensor
    """The tensor `elements`, or a copy of `elements` in bf16."""
    work: Any

    def finish(self) -> None:
        self.work.wait()
        if self.sent is not self.elements:
            self.elements.copy_(self.sent)


class GradientExchange:
    """Averages the gradients of all ranks, in fp32 or bf16; does nothing on one rank.

    torch's DDP is not used: it imports torch.compile's machinery, which takes over a second of CPU
    time per rank. DDP also regroups its buckets after the first micro-batch, so a resumed run would
    need an extra micro-batch to round in the same way. The buckets of this class are the same on
    all ranks and are sent in the same order.
    """

    def __init__(
        self,
        settings: DistributedSection,
        world: World,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Average over `group`, the ranks with the same part of a model; None = all ranks."""
        self._group = group
        self._num_ranks = world.world_size if group is None else dist.get_world_size(group)
        self._as_bf16 = settings.grad_dtype == "bf16"
        self._alone: list[nn.Parameter] = []
        """The trainable parameters of a rank that exchanges nothing."""
        self._buckets: list[Bucket] = []
        self._nodes: list[object] = []
        """The nodes of autograd's graph that hold the hooks; this reference keeps them alive."""
        self._tokens: TokenExchange | None = None
        """Set if the kernels handle the two parts of the token embedding's gradient."""
        self._full: set[Bucket] = set()
        self._pending: list[_PendingSum] = []
        self._is_last_pass = False

    def attach(self, model: CausalLM) -> None:
        """Broadcast rank 0's parameters, and register hooks that average the trainable gradients.

        Call this after the model's kernels are set. With a `group`, nothing is broadcast: each rank
        already has its part of rank 0's parameters.
        """
        if self._num_ranks == 1:
            self._alone = [parameter for _, parameter in trainable(model)]
            return
        if self._group is None:
            for each in (*model.parameters(), *model.buffers()):
                dist.broadcast(each.detach(), src=0)
        parameters = [parameter for _, parameter in trainable(model)]
        weight = model.tied_weight()
        is_tied = weight is not None and weight.requires_grad
        if model.kernels is not None and weight is not None and is_tied and self._group is None:
            first, *hooked = self._buckets = make_buckets(parameters, first=weight)
            self._tokens = model.kernels.token_gradient = TokenExchange(
                weight,
                model.kernels.token_gradient.library,
                place=first.gradient_view(weight),
                head_is_done=lambda: self._take(weight, first),
            )
        else:
            hooked = self._buckets = make_buckets(parameters)
        if model.kernels is not None:
            places: dict[Tensor, Tensor] = {
                each: bucket.gradient_view(each) for bucket in hooked for each in bucket.parameters
            }
            model.kernels.make_gradients_at(places.__getitem__)
        for bucket in hooked:
            for parameter in bucket.parameters:
                self._nodes.append(_call_after_gradient(parameter, bucket, self._on_gradient))

    def begin(self, tokens: Tensor) -> None:
        """Average the gradients in the step's last backward pass, which runs next.

        `tokens` are the tokens of that pass's micro-batch.
        """
        self._is_last_pass = True
        if self._tokens is not None:
            self._tokens.begin(tokens)

    def finish(self) -> float:
        """Set the averaged gradients; return the seconds spent waiting.

        A parameter that no micro-batch used, such as an expert without tokens, gets a gradient of
        zeros, on any number of ranks. Raises RuntimeError if a different rank has disappeared.
        """
        began_s = time.perf_counter()
        for parameter in self._alone:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        for bucket in self._buckets[len(self._pending) :]:
            bucket.complete()
            self._full.add(bucket)
        self._send_in_order()
        rows = None if self._tokens is None else self._tokens.rows()
        if rows is not None:
            self._send(rows.gradient)
        for each in self._pending:
            each.finish()
        if rows is not None:
            rows.add()
        for bucket in self._buckets:
            bucket.reset()
        self._full.clear()
        self._pending.clear()
        self._is_last_pass = False
        return time.perf_counter() - began_s if self._buckets else 0.0

    def _on_gradient(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Move a micro-batch's gradient into the bucket, so that only one copy is in memory."""
        if self._is_last_pass:
            self._take(parameter, bucket)
        elif parameter.grad is not None:
            bucket.move(parameter)

    def _take(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        if self._is_last_pass and bucket.take(parameter):
            self._full.add(bucket)
            self._send_in_order()

    def _send_in_order(self) -> None:
        """Send full buckets in order, because gloo matches the ranks' all-reduces by order."""
        while len(self._pending) < len(self._buckets):
            bucket = self._buckets[len(self._pending)]
            if bucket not in self._full:
                return
            self._send(bucket.flat)

    def _send(self, elements: Tensor) -> None:
        sent = elements.to(torch.bfloat16) if self._as_bf16 else elements
        sent.div_(self._num_ranks)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        self._pending.append(_PendingSum(elements, sent, work))


def _call_after_gradient(
    parameter: nn.Parameter, bucket: Bucket, call: Callable[[nn.Parameter, Bucket], None]
) -> object:
    """Run `call` after the parameter's backward pass; return an object that must stay alive.

    A hook on the parameter would not run for a backward function that adds to the parameter's
    gradient itself and returns None. The kernels have such functions. The parameter's node in
    autograd's graph runs in both cases.
    """
    view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    (node, _), *_ = view.grad_fn.next_functions
    assert node is not None
    node.register_hook(lambda *_: call(parameter, bucket))
    return node
