"""`python -m payload.train.measure_machine`: measures this machine's cores for `plan`.

One process per NUMA domain measures with a thread on each core, all at the same time, like the
ranks of a run. On up to eight cores, one process per core then measures the layers again. The
measurements take a few seconds. The result is one JSON object on stdout, and a file in the user's
cache.
"""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import torch

from payload.core.command_line import CommandParser
from payload.core.dtype import Dtype
from payload.core.errors import BootstrapError, ExitCode, TileforgeError, TrainingError
from payload.estimates.compute_time import layer_speed
from payload.kernels.cpu_allocator import use_plain_malloc
from payload.kernels.kernels import Kernels
from payload.kernels.library import load_library
from payload.kernels.unavailable import KernelsUnavailableError
from payload.machines.core_use import CoreUse
from payload.machines.machine import Domain, discover
from payload.machines.speed_cache import MachineSpeed, SpeedKey, speed_folder, write_speed
from payload.train.gemm_and_network_benchmark import gemm_peak
from payload.train.layer_benchmark import MEASURED_SPEC, LayerBenchmark
from payload.train.ranks.world import World

_PRODUCT_S = 0.08
"""Time for each size of matmul: up to two sizes in each of two dtypes."""
_UPDATE_S = 0.15
_FEWEST_UPDATES = 3
"""Number of updates whose median one disturbed update does not decide."""
_UPDATED_WEIGHTS = 2**24
"""Number of weights in the measured update. The update reads and writes 28 bytes per weight, more
in total than most caches hold."""
_FEW_CORES = 8
"""Up to this number of cores, runs with one rank per core are common enough to be measured."""
_DEADLINE_S = 90

Measurement = Callable[[], Mapping[str, Any]]
"""Measures in a child process, and returns keys and values for JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainSpeed:
    """The measurements of one NUMA domain."""

    bf16: float
    fp32: float
    updates_per_s: float
    """Weights that AdamW updates per second."""
    others_share: float
    """Share of the domain's cores that other programs used during the measurement."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Measure, write the cache, print the result, and return the exit code."""
    CommandParser(prog="payload.train.measure_machine", description=__doc__).parse_args(argv)
    try:
        domains = discover().domains
        key = SpeedKey.of_this_machine(env, cores=sum(len(each.cores) for each in domains))
        if key is None:
            raise BootstrapError("the package torch has no metadata", fix="Install torch again.")
        use_plain_malloc()
        speeds = measure(domains)
        speed = machine_speed(key, speeds, now_unix=time.time())
        if speed.is_usable():
            speed = with_layers(speed, domains)
    except TileforgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        write_speed(speed_folder(env), key, speed)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"note: the measurement is not cached: {error}\n")
    sys.stdout.write(json.dumps(asdict(speed)) + "\n")
    return ExitCode.OK


def machine_speed(
    key: SpeedKey, measured: Sequence[DomainSpeed], *, now_unix: float
) -> MachineSpeed:
    """Return the speed of all domains together, without measurements of layers."""
    return MachineSpeed(
        key_sha256=key.sha256(),
        cpu=key.cpu,
        cores=key.cores,
        bf16_flops_per_s=sum(each.bf16 for each in measured),
        fp32_flops_per_s=sum(each.fp32 for each in measured),
        update_core_s=key.cores / sum(each.updates_per_s for each in measured),
        layers=(),
        others_share=max(each.others_share for each in measured),
        measured_unix=now_unix,
    )


def measure(domains: Sequence[Domain]) -> list[DomainSpeed]:
    """Return the measurements of all domains, taken at the same time.

    Raises TrainingError if a domain's process fails.
    """

    def prepare(domain: Domain) -> Measurement:
        update = _Update()
        return lambda: asdict(_measure_domain(domain, update))

    return [DomainSpeed(**each) for each in _in_children(domains, prepare)]


def with_layers(speed: MachineSpeed, domains: Sequence[Domain]) -> MachineSpeed:
    """Return `speed` with the speed of layers added.

    Layers are measured on ranks that have a whole domain and, on up to eight cores, on ranks with
    one core.

    Raises TrainingError if a process fails.
    """
    ways = [list(domains)]
    if len(domains) < speed.cores <= _FEW_CORES:
        ways.append([Domain(id=each.id, cores=(core,)) for each in domains for core in each.cores])
    dtype, layers, others = speed.dtype(), [], [speed.others_share]
    for ranks in ways:
        measured = _in_children(ranks, lambda rank: _prepare_layers(rank, dtype))
        others += [each["others_share"] for each in measured]
        threads = max(len(rank.cores) for rank in ranks)
        found = layer_speed(
            MEASURED_SPEC,
            # Ranks wait for the slowest one.
            {
                int(tokens): max(each["times_s"][tokens] for each in measured)
                for tokens in measured[0]["times_s"]
            },
            layer_s=max(each["layer_s"] for each in measured),
            threads=threads,
            flops_per_s=speed.flops_per_s(dtype) * threads / speed.cores,
        )
        layers.append(found)
    return replace(speed, layers=tuple(layers), others_share=max(others))


def _prepare_layers(rank: Domain, dtype: Dtype) -> Measurement:
    benchmark = LayerBenchmark()

    def run() -> Mapping[str, Any]:
        use = CoreUse(rank.cores)
        times_s, layer_s = benchmark.times_s(dtype), benchmark.layer_s(dtype)
        return {"times_s": times_s, "layer_s": layer_s, "others_share": use.others()}

    return run


def _in_children(
    domains: Sequence[Domain], prepare: Callable[[Domain], Measurement]
) -> list[dict[str, Any]]:
    """Measure all domains at the same time, and return one result for each domain.

    A child process runs the measurement that `prepare` returns for a domain.

    Raises TrainingError if a process fails.
    """
    # A fork needs no second import of torch, and torch has not started threads yet.
    go_reader, go_writer = os.pipe()
    children = [_start(domain, prepare, go=go_reader, never=go_writer) for domain in domains]
    try:
        # Each child sends a line when it is ready, and a line with its result.
        ready = [child.output.readline() for child in children]
        os.close(go_writer)
        lines = [child.output.readline() for child in children]
    finally:
        for child in children:
            child.output.close()
            os.waitpid(child.pid, 0)
        os.close(go_reader)
    if not all(ready) or not all(lines):
        raise TrainingError("a process of the measurement failed. Run it again.")
    return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    pid: int
    output: TextIO


def _start(
    domain: Domain, prepare: Callable[[Domain], Measurement], *, go: int, never: int
) -> _Child:
    """Start a process that measures once the write end of the pipe `go` is closed.

    `never` is the write end of the pipe. The process closes its own copy of `never`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(pid=pid, output=os.fdopen(reader, encoding="utf-8"))
    status = 1
    try:
        os.close(never)
        signal.alarm(_DEADLINE_S)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, domain.cores)
        torch.set_num_threads(len(domain.cores))
        measurement = prepare(domain)
        os.write(writer, b"ready\n")
        os.read(go, 1)
        os.write(writer, f"{json.dumps(measurement())}\n".encode())
        status = ExitCode.OK
    finally:
        os._exit(status)


def _measure_domain(domain: Domain, update: _Update) -> DomainSpeed:
    world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="")
    use = CoreUse(domain.cores)
    # Each part takes a fixed time, so the domains' parts take place at the same time.
    bf16 = gemm_peak(world, "bf16", budget_s=_PRODUCT_S)
    fp32 = gemm_peak(world, "fp32", budget_s=_PRODUCT_S)
    updates_per_s = update.weights_per_s()
    return DomainSpeed(bf16=bf16, fp32=fp32, updates_per_s=updates_per_s, others_share=use.others())


class _Update:
    """AdamW's update as in a run: with the kernels if they can be built, otherwise with torch."""

    def __init__(self) -> None:
        self._weights = torch.nn.Parameter(torch.zeros(_UPDATED_WEIGHTS))
        self._weights.grad = torch.full_like(self._weights, 1e-3)
        self._optimizer = torch.optim.AdamW([self._weights], lr=1e-3, fused=True)
        self._kernels: Kernels | None = None
        with suppress(KernelsUnavailableError):
            self._kernels = Kernels(load_library())
        self._step()  # maps the state's pages

    def weights_per_s(self) -> float:
        """Return the weights per second of the median update."""
        took_s: list[float] = []
        ends_s = time.perf_counter() + _UPDATE_S
        while len(took_s) < _FEWEST_UPDATES or time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            self._step()
            took_s.append(time.perf_counter() - began_s)
        return _UPDATED_WEIGHTS / statistics.median(took_s)

    def _step(self) -> None:
        gradient = self._weights.grad
        assert gradient is not None
        if self._kernels is None:
            torch.nn.utils.clip_grad_norm_([self._weights], 1.0)
            self._optimizer.step()
        else:
            self._kernels.norm([gradient])
            self._kernels.adamw(self._optimizer, grad_scale=1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
