"""Every architecture against transformers: logits, gradients, cache, parameters, FLOPs.

    python -m benchmarks.architectures [NAME ...] [--json]

Each row is a small model with random weights, which transformers builds, saves and computes in
fp32, and which we load. `path` is what runs it: our own layers or transformers'. Differences are
from transformers; those of a gradient are over its norm. `cache` compares our logits with the
key-value cache and without. Parameters and FLOPs are what payload.models counts from config.json
(and from the weights' headers, for a family that is not ours) beside torch's own count with plain
attention. The exit status is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.architecture_cases import CASES, Comparison, compare
from benchmarks.machine import describe_machine
from benchmarks.tables import Table

DIFFERENCE_BOUND = 1e-4
"""Bound of the differences of logits, of gradients over their norm, and with the cache."""
FLOPS_BOUND = 1e-3
"""Bound of the difference of FLOPs from torch's count; parameters are exact."""


def main(argv: Sequence[str]) -> int:
    """Compare, print; 1 when a bound is missed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in CASES]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(map(repr, CASES))}")
    _quiet_transformers()
    file = sys.stderr if arguments.json else sys.stdout
    table = Table(*_HEADS, title="architecture", labels=CASES, file=file)
    rows = []
    for name in arguments.names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, Path(folder))
        rows.append(row)
        table.row(row.name, *_cells(row))
    missed = {row.name: problems(row) for row in rows if problems(row)}
    if arguments.json:
        result = {
            "benchmark": "architectures",
            "machine": describe_machine(),
            "rows": [asdict(row) for row in rows],
            "missed": missed,
        }
        print(json.dumps(result))
    for name, found in missed.items():
        print(f"missed: {name}: {'; '.join(found)}", file=sys.stderr)
    return 1 if missed else 0


def problems(row: Comparison) -> list[str]:
    """Return the bounds that a row misses, in words; NaN misses them too."""
    found = [
        f"{what} differ by {value:.1e}, bound {DIFFERENCE_BOUND:.0e}"
        for what, value in (
            ("logits", row.logits),
            ("gradients", row.gradients),
            ("logits with the cache", row.cache),
        )
        if not value < DIFFERENCE_BOUND
    ]
    if row.params != row.torch_params:
        found.append(f"{row.params:,} parameters, torch has {row.torch_params:,}")
    if not abs(row.flops / row.torch_flops - 1) < FLOPS_BOUND:
        found.append(f"{row.flops:,} FLOPs a token, torch counts {row.torch_flops:,.0f}")
    return found


_HEADS = (
    *("path", "logits", "gradients", "cache", "parameters", "torch", "FLOPs", "torch's", "off"),
)


def _cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.path,
        *(f"{each:.1e}" for each in (row.logits, row.gradients, row.cache)),
        *(f"{each:,}" for each in (row.params, row.torch_params, row.flops)),
        f"{row.torch_flops:,.0f}",
        f"{row.flops / row.torch_flops - 1:.3%}",
    )


def _quiet_transformers() -> None:
    """Keep transformers' progress bars and advice out of the table."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a row of the table; all by default"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout; the table goes to stderr"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
