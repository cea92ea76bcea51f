"""What a trial's figures mean for a run: slow nodes, a slow network. Pure; all are warnings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from payload.inventory import Node
from payload.models.spec import ModelSpec, typical_mfu
from payload.orchestrate.findings import Finding
from payload.orchestrate.measured import BF16_MIN_GAIN, Measured
from payload.run_config import RunConfig
from payload.step_time import Network, run_step_time

_SLOW_NODE_SHARE = 0.8
_SLOW_LINK_SHARE = 0.5
# Part of the exchange hides behind the backward pass, which is two thirds of the computing.
_MOST_SYNC_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run's step on the nodes that were measured."""

    what: str
    """The run in words."""
    sync_s: float
    """If nothing of it overlapped; 0 with one rank."""
    compute_s: float
    step_s: float
    """With what the backward pass does not hide of the synchronisation."""


def predict(config: RunConfig, spec: ModelSpec, measured: Measured) -> Prediction:
    """Times of one step."""
    link = measured.link_bytes_per_s()
    flops = config.tokens_per_step() * spec.flops_per_token()
    mfu = typical_mfu(kernels=config.uses_kernels())
    compute_s = flops / (measured.peak_flops_per_s(config.precision.dtype) * mfu)
    # One rank has no link.
    network = Network(ranks=measured.world_size, bytes_per_s=link or 1.0)
    step = run_step_time(config, spec, compute_s=compute_s, network=network)
    return Prediction(
        what=f"{spec.num_params() / 1e6:.3g}M parameters, {config.batch.global_batch_size} "
        f"sequences of {config.data.sequence_length} tokens a step",
        sync_s=step.exchange_s,
        compute_s=compute_s,
        step_s=step.total_s(),
    )


def summary(measured: Measured, prediction: Prediction) -> str:
    """One line about the network and what it means."""
    link = measured.link_bytes_per_s()
    if link is None or measured.latency_s is None:
        return (
            f"one rank, nothing to exchange; predicted for {prediction.what}: "
            f"{_seconds(prediction.compute_s)} of computing"
        )
    return (
        f"all-reduce over {measured.world_size} ranks: {bits_text(link)} each way, "
        f"{measured.latency_s * 1e3:.1f} ms; predicted for {prediction.what}: "
        f"{_seconds(prediction.sync_s)} of synchronisation beside "
        f"{_seconds(prediction.compute_s)} of computing, {_seconds(prediction.step_s)} a step"
    )


def speed_findings(nodes: Sequence[Node], measured: Measured) -> Iterator[Finding]:
    """Nodes without a gain from bf16, and nodes that are slow among their like."""
    for node in nodes:
        speed = measured.nodes[node.name]
        if speed.gain() < BF16_MIN_GAIN:
            cause = (
                f"bf16 products run at {speed.gain():.2f}x the speed of fp32 on it "
                f"({_tflops(speed.bf16_flops_per_s)} and {_tflops(speed.fp32_flops_per_s)} TFLOP/s)"
            )
            fix = "A run with precision.dtype = auto takes fp32 if that holds over all ranks."
            yield _warning(node.name, "speed", cause, fix)
    for like in _alike(nodes):
        speeds = {node.name: measured.nodes[node.name].best_flops_per_s() for node in like}
        median = statistics.median(speeds.values())
        for name, speed_flops in speeds.items():
            if speed_flops < _SLOW_NODE_SHARE * median:
                cause = (
                    f"it is slow among {len(like)} nodes of its kind: {_tflops(speed_flops)} "
                    f"TFLOP/s, their median is {_tflops(median)}"
                )
                fix = "The slowest rank sets the pace. Try again, look for other work on it (top)"
                yield _warning(name, "speed", cause, f"{fix}, or replace it.")


def exchange_findings(
    nodes: Sequence[Node], measured: Measured, prediction: Prediction
) -> Iterator[Finding]:
    """A network on which the ranks would mostly wait; the node whose link it is, if it is one's."""
    if len(nodes) == 1 or prediction.sync_s <= _MOST_SYNC_SHARE * prediction.compute_s:
        return
    names = [node.name for node in nodes]
    slow = slow_links(names, measured)
    link = measured.link_bytes_per_s()
    whose = "its link is slow" if slow else f"the network between {', '.join(names)} is slow"
    for name in slow or names[:1]:
        received = measured.nodes[name].received_bytes_per_s
        speed = received if slow and received is not None else link or 0.0
        cause = (
            f"{whose}, {bits_text(speed)}: predicted {_seconds(prediction.sync_s)} of "
            f"synchronisation a step beside {_seconds(prediction.compute_s)} of computing "
            f"({prediction.what})"
        )
        fix = "Mend it; or raise batch.global_batch_size, or set distributed.grad_dtype = 'bf16'."
        yield _warning(name, "gloo", cause, fix)


def slow_links(names: Sequence[str], measured: Measured) -> list[str]:
    """Nodes that both receive and send slowly, where that is not the case for all.

    Each receives from the one before it: what comes late to a node was sent late, or received late.
    """
    received = [measured.nodes[name].received_bytes_per_s for name in names]
    known = [speed for speed in received if speed is not None]
    if len(known) < len(names) or len(names) < 3:
        return []
    is_slow = [speed < _SLOW_LINK_SHARE * max(known) for speed in known]
    return [name for i, name in enumerate(names) if is_slow[i] and is_slow[(i + 1) % len(is_slow)]]


def _alike(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes of one kind, where there are several."""
    kinds: dict[tuple[str | None, int, int], list[Node]] = {}
    for node in nodes:
        kind = (node.machine_type, node.physical_cores, node.numa_domains)
        kinds.setdefault(kind, []).append(node)
    return [like for like in kinds.values() if len(like) > 1]


def bits_text(bytes_per_s: float) -> str:
    """As networks are sold: `9.8 Gbit/s`, `0.92 Mbit/s`."""
    gbit = bytes_per_s * 8 / 1e9
    return f"{gbit:.3g} Gbit/s" if gbit >= 0.1 else f"{gbit * 1e3:.3g} Mbit/s"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _tflops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.2f}"


def _warning(node: str, check: str, cause: str, fix: str) -> Finding:
    return Finding(node=node, check=check, severity="warning", cause=cause, fix=fix)
