"""Divides layers into pipeline stages, balanced by FLOPs, including the FLOPs of the output
head."""

from __future__ import annotations

from typing import Protocol


class Layered(Protocol):
    """The sizes and costs that determine how layers are divided into stages; see ModelSpec."""

    def num_layers(self) -> int: ...
    def num_params(self) -> int: ...
    def width(self) -> int: ...
    def head_rows(self) -> int: ...
    def embedding_size(self) -> int: ...
    def outer_elements(self) -> int: ...
    def flops_per_token(self) -> int: ...


def stage_layers(spec: Layered, stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, in order; each stage has at least one layer.

    The head's matmuls are on the last stage, and the lookup in the token embedding costs nothing.
    If several divisions are equally fast, the division with larger last stages is chosen, because
    earlier stages keep the activations of more micro-batches.
    """
    layers = spec.num_layers()
    assert 1 <= stages <= layers, "require_split rejects fewer layers than stages"
    if stages == 1:
        return (range(layers),)
    head = 6 * spec.head_rows() * spec.width()
    of_layer = max(1.0, (spec.flops_per_token() - head) / layers)

    def slowest(last: int) -> float:
        others = -(-(layers - last) // (stages - 1))
        return max(last * of_layer + head, others * of_layer)

    last = min(range(layers - stages + 1, 0, -1), key=slowest)
    each, more = divmod(layers - last, stages - 1)
    counts = [each + (stage >= stages - 1 - more) for stage in range(stages - 1)] + [last]
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def slowest_share(spec: Layered, stages: int) -> float:
    """Return the fraction of the model's FLOPs that the slowest stage computes."""
    head = 6 * spec.head_rows() * spec.width()
    of_layer = (spec.flops_per_token() - head) / spec.num_layers()
    costs = [len(each) * of_layer for each in stage_layers(spec, stages)]
    costs[-1] += head
    return max(costs) / sum(costs)


def largest_stage(spec: Layered, stages: int) -> float:
    """Return the fraction of all weights that the largest stage holds.

    The last stage has the output head. If the head is the token embedding, the first stage also has
    a copy.
    """
    return max(stage_weights(spec, stages)) / spec.num_params()


def stage_weights(spec: Layered, stages: int) -> list[float]:
    """Return the number of weights of each stage."""
    if stages == 1:
        return [float(spec.num_params())]
    of_layer = (spec.num_params() - spec.outer_elements()) / spec.num_layers()
    layers, outer = stage_layers(spec, stages), outer_weights(spec, stages)
    return [len(each) * of_layer + more for each, more in zip(layers, outer, strict=True)]


def outer_weights(spec: Layered, stages: int) -> list[float]:
    """Return the number of each stage's weights outside the layers."""
    if stages == 1:
        return [float(spec.outer_elements())]
    found = [0.0] * stages
    found[0] += spec.embedding_size()
    found[-1] += spec.head_rows() * spec.width()
    return found
