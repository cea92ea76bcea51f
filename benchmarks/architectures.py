"""Compares logits, gradients, cache, parameters and FLOPs of every architecture with transformers.

    python -m benchmarks.architectures [NAME ...] [--json]

Each row is a small model with random weights, which transformers builds, saves and computes in
fp32, and which this project loads. `path` names the layers that compute the model: native, or the
layers of transformers. Differences are from the values of transformers; the difference of a
gradient is relative to its norm. `cache` compares this project's logits with and without the
key-value cache. Parameters and FLOPs are the numbers that payload.models computes from config.json
(and from the weights' headers, for a family that is not native) beside torch's own count with plain
attention. The table goes to stderr, one JSON object to stdout. The exit status is 1 if a bound is
missed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.architecture_cases import CASES, Comparison, compare
from benchmarks.harness import Benchmark

DIFFERENCE_BOUND = 1e-4
"""Limit on the differences of logits, gradients and cached logits."""
FLOPS_BOUND = 1e-3
"""Limit on the relative difference from the FLOPs that torch counts."""


def main(argv: Sequence[str]) -> int:
    """Compare; return 1 if a bound is missed."""
    benchmark = Benchmark("architectures", __doc__)
    add = benchmark.parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a row of the table (default: all)")
    add("--json", action="store_true", help="no effect: JSON is always printed")
    arguments = benchmark.parse(argv)
    if unknown := [name for name in arguments.names if name not in CASES]:
        known = ", ".join(map(repr, CASES))
        benchmark.parser.error(f"no architecture {unknown[0]!r}. Choose from {known}")
    _quiet_transformers()
    table = benchmark.table(*_HEADS, title="architecture", labels=CASES)
    rows = []
    for name in arguments.names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, Path(folder))
        rows.append(row)
        table.row(row.name, *_cells(row))
    missed = {row.name: problems(row) for row in rows if problems(row)}
    for name, found in missed.items():
        benchmark.note(f"missed: {name}: {'; '.join(found)}")
    result = {"rows": [asdict(row) for row in rows], "missed": missed}
    benchmark.finish(result, packages=("torch", "transformers"))
    return 1 if missed else 0


def problems(row: Comparison) -> list[str]:
    """Return a description of each bound that a row misses; NaN misses every bound."""
    found = [
        f"{quantity} differ by {value:.1e}, bound {DIFFERENCE_BOUND:.0e}"
        for quantity, value in (
            ("logits", row.logits),
            ("gradients", row.gradients),
            ("logits with the cache", row.cache),
        )
        if not value < DIFFERENCE_BOUND
    ]
    if row.params != row.torch_params:
        found.append(f"{row.params:,} parameters, torch has {row.torch_params:,}")
    off = _flops_off(row)
    if off is not None and not abs(off) < FLOPS_BOUND:
        found.append(f"{row.flops:,} FLOPs a token, torch counts {row.torch_flops:,.0f}")
    return found


_HEADS = (
    *("path", "logits", "gradients", "cache", "parameters", "torch", "FLOPs", "torch's", "off"),
)


def _cells(row: Comparison) -> tuple[str, ...]:
    off = _flops_off(row)
    return (
        row.path,
        *(f"{each:.1e}" for each in (row.logits, row.gradients, row.cache)),
        *(f"{each:,}" for each in (row.params, row.torch_params, row.flops)),
        "" if row.torch_flops is None else f"{row.torch_flops:,.0f}",
        "" if off is None else f"{off:.3%}",
    )


def _flops_off(row: Comparison) -> float | None:
    """Return the relative difference from torch's FLOPs, or None without them."""
    return None if row.torch_flops is None else row.flops / row.torch_flops - 1


def _quiet_transformers() -> None:
    """Turn off transformers' progress bars and warnings."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
