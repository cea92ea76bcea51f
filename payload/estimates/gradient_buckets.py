"""The buckets in which replicas exchange gradients during the backward pass, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from payload.config.launch_sections import DistributedSection
from payload.models.spec import ModelSpec

FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket in fp32 gradients; small, so that the exchange begins early. This size
and `BUCKET_BYTES` are as in DDP."""
BUCKET_BYTES = 25 * 2**20
"""A bucket is full once its gradients reach this size."""

# In n tokens of Python source, taken in random blocks, 1.2 n^0.7 tokens were distinct, within 25 %
# for up to 250,000 tokens. Prose has more distinct tokens, so the factor is three times as large.
_DISTINCT = 3.6
_DISTINCT_EXPONENT = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A group of gradients that are exchanged together."""

    elements: int
    ready: float
    """Fraction of the backward pass that is done when this bucket's gradients are complete."""


def gradient_bytes(spec: ModelSpec, settings: DistributedSection) -> int:
    """Return the bytes that each rank contributes to the exchange in a step."""
    return spec.num_trainable_params() * bytes_per_gradient(settings)


def bytes_per_gradient(settings: DistributedSection) -> int:
    """Return the bytes of a gradient element in the exchange."""
    return 2 if settings.grad_dtype == "bf16" else 4


def buckets(spec: ModelSpec, *, tokens: int | None = None) -> tuple[Bucket, ...]:
    """Return the exchange's buckets, in the order in which the backward pass fills them.

    If the token embedding is also the output head, the embedding's gradient begins first and is
    complete last. With kernels, this gradient is sent in two parts: the head's part first, and at
    the end the rows of the `tokens` that all ranks read in a micro-batch. Without kernels (no
    `tokens`), this gradient is in the last bucket.
    """
    sizes = spec.gradient_sizes()
    in_parts = tokens is not None and spec.is_tied()
    head = 6 * spec.embedding_size() / spec.flops_per_token()
    all_matrices = sum(each.elements for each in sizes if each.kind == "matrix")
    found: list[Bucket] = []
    if in_parts:
        found.append(Bucket(elements=spec.embedding_size(), ready=head))
    is_first, held, matrices = True, 0, 0
    for each in sizes:
        if each.kind == "embedding":
            continue
        held += each.elements
        matrices += each.elements * (each.kind == "matrix")
        limit = FIRST_BUCKET_BYTES if is_first else BUCKET_BYTES
        if held * 4 >= limit:
            ready = head + (1 - head) * matrices / max(all_matrices, 1)
            found.append(Bucket(elements=held, ready=ready))
            is_first, held = False, 0
    held += sum(each.elements for each in sizes if each.kind == "embedding")
    if in_parts:
        held -= spec.embedding_size()
    if held:
        found.append(Bucket(elements=held, ready=1.0))
    if in_parts and tokens is not None:
        rows = min(spec.vocab_size, round(_DISTINCT * tokens**_DISTINCT_EXPONENT))
        found.append(Bucket(elements=rows * spec.width(), ready=1.0))
    return tuple(found)
