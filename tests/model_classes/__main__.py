"""Prints a table of classes of models, each compared with transformers and PEFT in fp32.

    python -m tests.model_classes [NAME ...]

Each row is a small model with random weights, which transformers builds and saves, and which this
project loads. Differences are the largest ones of a logit, of a gradient's element, and of the
losses of three LoRA steps (relative). The exit status is 1 if a row misses a bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.model_classes.cases import CASES
from tests.model_classes.comparison import Comparison, compare, why_missing
from tests.model_classes.multimodal import WHOLE_CASES
from tests.model_classes.plans import plan_codes

_ROW = "{:<24} {:<13} {:>8} {:>9} {:>10} {:>10} {:>8} {:>5}"


def main(argv: Sequence[str]) -> int:
    """Compare; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.model_classes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row (default: all)")
    known = [*CASES, *WHOLE_CASES]
    names = parser.parse_args(argv).names or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no class {unknown[0]!r}. Choose from {', '.join(map(repr, known))}")
    _quiet_transformers()
    missed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        rows = {}
        for number, name in enumerate(names):
            if why_missing(name):
                continue
            try:
                rows[name] = compare(name, root / str(number))
            except Exception as error:
                missed[name] = [f"{type(error).__name__}: {error}"]
        folders = {name: root / str(names.index(name)) / "model" for name in rows}
        plans = plan_codes(folders, root / "runs")
    print(_ROW.format("class", "path", "logits", "gradients", "round trip", *_MORE))
    for name in names:
        if reason := why_missing(name):
            print(f"{name:<24} {reason}")
        elif name in rows:
            print(_ROW.format(name, *_cells(rows[name]), "yes" if plans[name] == 0 else "NO"))
            found = [*rows[name].problems(), *(["plan"] if plans[name] else [])]
            missed |= {name: found} if found else {}
    for name, found in missed.items():
        print(f"missed: {name}: {'; '.join(found)}")
    return 1 if missed else 0


_MORE = ("generation", "LoRA", "plan")


def _cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.path,
        f"{row.logits:.1e}",
        f"{row.gradients:.1e}",
        "bitwise" if row.round_trip else "DIFFERS",
        "equal" if row.generates else "DIFFERS",
        f"{row.lora:.1e}",
    )


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
