"""The short set: every claim that needs no peer's checkout and is measured in seconds.

    python -m benchmarks [--data data/stdlib]

Small sizes, few repetitions: whether all is well on this machine, in about two minutes. What a
claim rests on are the commands by themselves, with the sizes of their result pages. A table of
each goes to stderr, one JSON object with all of theirs to stdout; the exit status is 1 when one of
them could not be measured. A bound that was missed is said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_MISSED = 1
"""Exit status of a benchmark whose measurement misses its bound."""


def main(argv: Sequence[str]) -> int:
    """Run all in turn."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    arguments = parser.parse_args(argv)
    commands = short_set(arguments.data)
    results: dict[str, object] = {}
    missed, started_s = [], time.perf_counter()
    for name, words in commands.items():
        print(f"== python -m benchmarks.{name} {' '.join(words)}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *words],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        if done.returncode not in (0, _MISSED) or not lines:
            continue
        results[name] = json.loads(lines[-1])
        if done.returncode:
            missed.append(name)
    failed = [name for name in commands if name not in results]
    _say(failed, missed, wall_s=time.perf_counter() - started_s)
    print(json.dumps({"benchmark": "short", "results": results, "missed": missed}))
    return 1 if failed else 0


def short_set(data: Path) -> Mapping[str, list[str]]:
    """Arguments of each benchmark in the set."""
    return {
        "prepare": ["--rounds", "5"],
        "step": ["--model", "tiny", "--steps", "4", "--eager"],
        "kernels": ["--model", "tiny", "--rounds", "5"],
        "memory": ["--cases", "tiny:8", "gpt2:1"],
        "evaluate": ["--model", "tiny", "--data", str(data), "--rounds", "3"],
        "startup": ["--models", "tiny", "--data", str(data), "--rounds", "1"],
        "checkpoint": ["--preset", "tiny", "--rounds", "1"],
    }


def _say(failed: Sequence[str], missed: Sequence[str], *, wall_s: float) -> None:
    print(f"== the short set took {wall_s:.0f} s", file=sys.stderr)
    if missed:
        print(f"bounds missed: {', '.join(missed)}", file=sys.stderr)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
