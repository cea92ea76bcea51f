"""List the benchmarks, or run the short set.

    python -m benchmarks
    python -m benchmarks --short [--data data/stdlib]

The short set runs the benchmarks that need no other project's checkout, with small sizes and few
repetitions, in about two minutes. It shows whether everything works on this machine; result pages
come from the benchmarks themselves, with their own sizes. Tables go to stderr, and one JSON object
with all results to stdout. Missed bounds are listed. The exit status is 1 when a benchmark failed.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_MISSED = 1
"""Exit status of a benchmark whose measurement misses its bound."""


def main(argv: Sequence[str]) -> int:
    """List the benchmarks or run the short set; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="run the short set")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.short:
        return _run(short_set(arguments.data))
    names = benchmarks()
    width = max(map(len, names)) + 2
    for name, line in names.items():
        print(name.ljust(width) + line)
    return 0


def benchmarks() -> dict[str, str]:
    """Return the first docstring line of each benchmark by its name."""
    folder = Path(__file__).parent
    found = {}
    for path in [*folder.glob("*.py"), *folder.glob("*/__main__.py")]:
        name = path.parent.name if path.stem == "__main__" else path.stem
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"python -m benchmarks.{name} " in f"{doc} ".replace("\n", " "):
            found[name] = doc.partition("\n")[0]
    return dict(sorted(found.items()))


def short_set(data: Path) -> Mapping[str, list[str]]:
    """Return the arguments of each benchmark in the set."""
    return {
        "step": ["--model", "tiny", "--steps", "4", "--eager"],
        "kernels": ["--model", "tiny", "--rounds", "5"],
        "memory": ["--cases", "tiny:8", "gpt2:1"],
        "startup": ["--models", "tiny", "--data", str(data), "--rounds", "1"],
        "checkpoint": ["--preset", "tiny", "--rounds", "1"],
    }


def _run(commands: Mapping[str, Sequence[str]]) -> int:
    results: dict[str, object] = {}
    missed, started_s = [], time.perf_counter()
    for name, options in commands.items():
        print(f"== python -m benchmarks.{name} {' '.join(options)}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *options],
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
    print(f"== the short set took {time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    if missed:
        print(f"bounds missed: {', '.join(missed)}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    print(json.dumps({"benchmark": "short", "results": results, "missed": missed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
