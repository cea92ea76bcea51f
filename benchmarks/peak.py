"""The highest rates of this CPU's multiply-add instructions and memory, beside torch's GEMM.

    python -m benchmarks.peak
    python -m benchmarks.peak --json --seconds 0.1 --rounds 3

Measures each kind of multiply-add instruction that this CPU supports. Operands are in registers, or
come from the L1 cache, the L2 cache or memory: both operands of an AMX tile product, one operand of
a vector instruction. The data are random, since a CPU's clock can depend on them. Memory is read,
written and copied, sequentially. The GEMM is the fastest of several sizes through torch. A rate is
the highest of `--rounds` measurements of `--seconds` each: other programs disturbed that one least.
Rates are for one thread, and for all threads at the same time. If two CPUs share a physical core,
both together are no faster than one.

Tables go to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Benchmark, Table, machine_class, seconds_of
from payload.kernels.build import built_library

KINDS = ("AMX bf16", "AVX-512 bf16", "AVX-512 fp32", "AVX2 fp32")
"""The kinds of instructions, in the order of the numbers that peak.cpp gives them."""
BANDWIDTHS = ("read", "write", "write past caches", "copy")
"""The kinds of memory operations, in the order of the numbers that peak.cpp gives them."""
_L1_BYTES, _L2_BYTES, _MEMORY_BYTES = 24 << 10, 512 << 10, 256 << 20
_PLACES = {"registers": 0, "L1": _L1_BYTES, "L2": _L2_BYTES, "memory": _MEMORY_BYTES}
_GEMM_SIZES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (4096, 768, 2304))
"""Rows, inner dimension and columns of each matmul."""

Rates = dict[int, float]
"""The rate for each number of threads."""


class Peak:
    """The measurements of `peak.cpp`."""

    def __init__(self, *, budget_s: float, rounds: int) -> None:
        """Build the library if missing. Raises KernelsUnavailableError."""
        cache = Path.home() / ".cache" / "tileforge" / "kernels"
        source = Path(__file__).with_name("peak.cpp")
        functions = ctypes.CDLL(str(built_library(cache, name="peak", sources=[source])))
        self._flops = functions.tileforge_peak_flops
        size, count, real = ctypes.c_int64, ctypes.c_int, ctypes.c_double
        self._flops.argtypes = [count, size, count, real, count]
        self._bandwidth = functions.tileforge_peak_bandwidth
        self._bandwidth.argtypes = [count, size, real, count]
        for each in (self._flops, self._bandwidth):
            each.restype = ctypes.c_double
        self._budget_s, self._rounds = budget_s, rounds

    def flops_per_s(self, kind: str, place: str, *, threads: int) -> float | None:
        """Return FLOP/s of all threads with operands from `place`; None if the CPU lacks `kind`."""
        size = _PLACES[place]
        arguments = (KINDS.index(kind), size or _L1_BYTES, int(size > 0))
        return self._highest(lambda: self._flops(*arguments, self._budget_s, threads))

    def bytes_per_s(self, operation: str, place: str, *, threads: int) -> float | None:
        """Return the bandwidth of all threads; None if the CPU lacks the operation."""
        arguments = (BANDWIDTHS.index(operation), _PLACES[place])
        return self._highest(lambda: self._bandwidth(*arguments, self._budget_s, threads))

    def _highest(self, measure: Callable[[], float]) -> float | None:
        first = measure()
        if first < 0:
            raise MemoryError(f"no memory for {_MEMORY_BYTES >> 20} MB a thread")
        if not first:
            return None
        return max(first, *(measure() for _ in range(self._rounds - 1)), 0.0)


def gemm_flops_per_s(dtype: torch.dtype, *, threads: int, rounds: int) -> float:
    """Return the highest rate of torch's matmul over several sizes and `rounds` of each."""
    before, best = torch.get_num_threads(), 0.0
    torch.set_num_threads(threads)
    for rows, depth, columns in _GEMM_SIZES:
        left = torch.randn(rows, depth).to(dtype)
        right = torch.randn(columns, depth).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        multiply = partial(torch.mm, left, right.t(), out=out)
        multiply()
        best_s = min(seconds_of(multiply) for _ in range(rounds))
        best = max(best, 2 * rows * depth * columns / best_s)
    torch.set_num_threads(before)
    return best


def main(argv: Sequence[str]) -> int:
    """Measure everything; return the exit status."""
    benchmark = Benchmark("peak", __doc__)
    add = benchmark.parser.add_argument
    add("--seconds", type=float, default=0.3, help="of each measurement (default: 0.3)")
    add("--rounds", type=int, default=5, help="measurements of each rate (default: 5)")
    add("--threads", type=int, metavar="COUNT", help="default: torch's own choice")
    add("--json", action="store_true", help="no effect: JSON is always printed")
    arguments = benchmark.parse(argv)
    peak = Peak(budget_s=arguments.seconds, rounds=arguments.rounds)
    counts = sorted({1, arguments.threads or torch.get_num_threads()})
    heads = [f"{each} thread{'s' if each > 1 else ''}" for each in counts]
    torch.manual_seed(1)
    labels = [f"{kind}, {place}" for kind in KINDS for place in _PLACES]
    result: dict[str, dict[str, Rates]] = {"flops_per_s": {}, "bytes_per_s": {}}

    table = benchmark.table(*heads, title="TFLOP/s", labels=labels)
    for kind in KINDS:
        for place in _PLACES:
            rates = {each: peak.flops_per_s(kind, place, threads=each) for each in counts}
            _add(result["flops_per_s"], table, f"{kind}, {place}", rates, 1e12)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        measured = {
            each: gemm_flops_per_s(dtype, threads=each, rounds=arguments.rounds) for each in counts
        }
        _add(result["flops_per_s"], table, f"torch's GEMM, {name}", dict(measured), 1e12)

    table = benchmark.table(*heads, title="GB/s", labels=labels)
    for operation in BANDWIDTHS:
        for place in ("L2", "memory"):
            rates = {each: peak.bytes_per_s(operation, place, threads=each) for each in counts}
            _add(result["bytes_per_s"], table, f"{operation}, {place}", rates, 1e9)
    benchmark.note(f"class {machine_class()}; {scaling(result['flops_per_s'])}")
    benchmark.finish({"threads_measured": counts, **result})
    return 0


def scaling(flops_per_s: dict[str, Rates]) -> str:
    """Return a sentence on how all threads' rate in registers compares with one thread's."""
    rates = next(each for label, each in flops_per_s.items() if not label.startswith("torch"))
    one, every = rates[1], rates[max(rates)]
    ratio = every / one
    cores = "a physical core each" if ratio > 0.75 * max(rates) else "physical cores shared"
    return f"{max(rates)} threads are {ratio:.2f} times as fast as one in registers: {cores}"


def _add(
    found: dict[str, Rates],
    table: Table,
    label: str,
    rates: dict[int, float | None],
    unit: float,
) -> None:
    """Add a row, unless this CPU lacks the instructions."""
    known = {threads: each for threads, each in rates.items() if each is not None}
    if len(known) == len(rates):
        digits = 2 if unit == 1e12 else 1
        table.row(label, *(f"{each / unit:.{digits}f}" for each in known.values()))
        found[label] = {threads: float(math.floor(each)) for threads, each in known.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
