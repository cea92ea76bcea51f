"""Losses of short runs of every strategy and task, compared with the losses of another commit.

    python -m benchmarks.golden --against COMMIT
    python -m benchmarks.golden --against main --only 2-shard-text-llama-resume
    python -m benchmarks.golden

With `--against`, this working tree and a commit train each case for 30 steps on this machine, with
the same data and initial weights. The commit's files are in a git worktree, which is removed at the
end. Losses, gradient norms, validation losses and the weights of both checkpoints must be equal bit
by bit. For a change that alters arithmetic on purpose, `--tolerance 1e-5` allows that relative
difference of each number, and any difference of weights.

Without `--against`, this tree's numbers are compared with `tests/golden/losses.json`. The tolerance
is 1e-4, which covers the rounding of all CPUs. Cases with CPU-dependent losses (bf16, Muon,
dropout) have no stored values. `--write` stores new values.

Each column is the largest relative difference over all steps. A table goes to stderr, one JSON
object to stdout. The exit status is 1 when a difference is above the tolerance.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.golden.cases import CASES, Case
from benchmarks.golden.compare import Comparison, compare
from benchmarks.golden.inputs import make_inputs
from benchmarks.golden.runs import SERIES, Run, train_cases
from benchmarks.golden.stored import PATH, TOLERANCE, Stored
from benchmarks.golden.worktree import resolve, worktree
from benchmarks.harness import REPO, Benchmark


def main(argv: Sequence[str]) -> int:
    """Train and compare; return 1 if a difference is above the tolerance."""
    benchmark = Benchmark("golden", __doc__)
    _add_options(benchmark.parser)
    arguments = benchmark.parse(argv)
    if arguments.list:
        print("\n".join(CASES))
        return 0
    cases = _chosen(arguments.only, portable=arguments.against is None)
    repo: Path = arguments.repo
    commit = arguments.against and resolve(arguments.against, repo=repo)
    stored = Stored() if commit else Stored.read()
    with tempfile.TemporaryDirectory() as folder:
        root, inputs = Path(folder), Path(folder, "inputs")
        hashes = make_inputs(inputs, (name for case in cases for name in case.inputs()))
        if commit is None and not arguments.write:
            stored.require(cases, inputs=hashes)
        changed = [replace(case, changed=tuple(arguments.set)) for case in cases]
        runs = train_cases(
            changed, code=arguments.repo, inputs=inputs, root=root / "tree", label="this tree"
        )
        if arguments.write:
            stored.replace(runs, inputs=hashes)
            stored.write()
            return 0
        others: Mapping[str, Run] = stored.runs
        if commit is not None:
            with worktree(commit, repo=repo) as code:
                others = train_cases(
                    cases, code=code, inputs=inputs, root=root / "commit", label=commit[:12]
                )
    rows = [compare(case.name, runs[case.name], others[case.name]) for case in cases]
    tolerance = arguments.tolerance
    if tolerance is None:
        tolerance = TOLERANCE if commit is None else 0.0
    _add_table(benchmark, rows, tolerance=tolerance)
    result = {
        "against": commit or str(PATH.relative_to(REPO)),
        "tolerance": tolerance,
        "rows": [asdict(row) | {"holds": row.holds(tolerance)} for row in rows],
    }
    benchmark.finish(result)
    return 0 if all(row.holds(tolerance) for row in rows) else 1


def _chosen(names: Sequence[str] | None, *, portable: bool) -> list[Case]:
    """Return the cases to train; with `portable`, only those with stored values."""
    cases = [Case.parse(name) for name in names or CASES]
    if not portable:
        return cases
    for case in cases:
        if names and not case.is_portable():
            raise SystemExit(
                f"error: --only {case.name}: its losses depend on the CPU. Use --against."
            )
    return [each for each in cases if each.is_portable()]


def _add_table(benchmark: Benchmark, rows: Sequence[Comparison], *, tolerance: float) -> None:
    names = [row.name for row in rows]
    heads = ("steps", "loss", "grad norm", "val loss", "first step", "weights equal", "holds")
    table = benchmark.table(*heads, title="case", labels=names)
    equal = {True: "yes", False: "NO", None: "-"}
    for row in rows:
        differences = [f"{row.largest[key]:.1e}" if row.largest[key] else "0" for key in SERIES]
        first = "-" if row.first_step is None else str(row.first_step)
        cells = (str(row.steps), *differences, first, equal[row.weights_equal])
        table.row(row.name, *cells, equal[row.holds(tolerance)])
    differing = sum(not row.holds(tolerance) for row in rows)
    benchmark.note(f"{differing} of {len(rows)} cases differ by more than {tolerance:g}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--against", metavar="COMMIT", help="compare with a commit's runs")
    mode.add_argument("--write", action="store_true", help="store this tree's values")
    mode.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="train only these")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="RATIO",
        help="largest relative difference (default: 0 with --against, 1e-4 without)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a setting only in the runs of this tree",
    )
    # The working tree to compare; tests name another one.
    parser.add_argument("--repo", type=Path, default=REPO, help=argparse.SUPPRESS)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
