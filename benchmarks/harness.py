"""The parts that all benchmarks share: command line, contenders in turn, tables, JSON and page."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO, TypeVar

from payload.core.files import write_whole
from payload.kernels.cpu_allocator import use_plain_malloc
from payload.launch.environment import malloc_environment
from payload.machines.machine_facts import read_cpu

REPO = Path(__file__).parent.parent
PAGE_HEAD = "| | |\n|---|---|"
"""Head of the table of facts at the top of a page."""
_MIN_WIDTH = 11
"""Minimum width of a column: a number of seven digits with its commas, and the gap."""
_GAP = 2

Result = TypeVar("Result")


class Benchmark:
    """One benchmark's command line and report: tables on stderr, JSON to a pipe, and a page."""

    def __init__(self, name: str, doc: str | None) -> None:
        """`name` is the module below `benchmarks`, `doc` its docstring."""
        self._name, self._doc = name, doc or ""
        self._blocks: list[Table | str] = []
        self._began_s = time.perf_counter()
        self.parser = argument_parser(name, doc)
        self.parser.add_argument(
            "--page", type=Path, metavar="FILE", help="also write the result as Markdown"
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed command line."""
        self._argv, self._arguments = argv, self.parser.parse_args(argv)
        return self._arguments

    def table(self, *heads: str, title: str = "", labels: Iterable[str] = ()) -> Table:
        """Begin a table on stderr that is also part of the page."""
        table = Table(*heads, title=title, labels=labels)
        self._blocks.append(table)
        return table

    def note(self, text: str) -> None:
        """Print a sentence below the tables and add it to the page."""
        print(text, file=sys.stderr, flush=True)
        self._blocks.append(text)

    def finish(self, result: Mapping[str, Any], *, packages: Sequence[str] = ("torch",)) -> None:
        """Report options and `result` as one JSON object, and write the page if requested."""
        versions = package_versions(packages)
        options = {key: each for key, each in self._options() if key != "page"}
        facts = {"wall_s": round(time.perf_counter() - self._began_s, 1), "versions": versions}
        facts |= {"commit": commit_of_checkout(), "date": today()}
        facts |= {"machine": describe_machine(), "machine_class": machine_class()}
        found = {"benchmark": self._name, **options, **facts, **result}
        print_json(found)
        if self._arguments.page:
            write_whole(self._arguments.page, self._page(versions))

    def _options(self) -> Iterator[tuple[str, Any]]:
        for action in self.parser._actions:
            if action.help != argparse.SUPPRESS and hasattr(self._arguments, action.dest):
                yield action.dest, getattr(self._arguments, action.dest)

    def _page(self, versions: Mapping[str, str]) -> str:
        command = shlex.join(["python", "-m", f"benchmarks.{self._name}", *self._argv])
        named = ", ".join(f"{name} {number}" for name, number in versions.items())
        facts = {
            "Date": today(),
            "Commit": commit_of_checkout(),
            "Machine": f"{describe_machine()}; class {machine_class()}",
            "Versions": f"Python {platform.python_version()}, {named}",
        }
        blocks = [each if isinstance(each, str) else each.markdown() for each in self._blocks]
        title = self._doc.partition("\n")[0].rstrip(".")
        head = [f"# {title}", f"    {command}", markdown_table(PAGE_HEAD, list(facts.items()))]
        return "\n\n".join([*head, *blocks]) + "\n"


class Table:
    """A table with a label at the left of each row and right-aligned cells."""

    def __init__(
        self,
        *heads: str,
        title: str = "",
        labels: Iterable[str] = (),
        file: TextIO | None = None,
    ) -> None:
        """Print the heads, with `title` above the labels, in columns that fit `labels`."""
        self._file = file or sys.stderr
        self._label_width = max(map(len, (title, *labels))) + _GAP
        self._widths = [max(_MIN_WIDTH, len(head) + _GAP) for head in heads]
        self._head = (title, *heads)
        self._rows: list[Sequence[str]] = []
        self._print(title, heads)

    def row(self, label: str, *cells: str) -> None:
        """Print one row; missing last cells stay empty."""
        self._rows.append((label, *cells, *[""] * (len(self._widths) - len(cells))))
        self._print(label, cells)

    def note(self, text: str) -> None:
        """Print a sentence below the rows."""
        print(text, file=self._file, flush=True)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        head = f"| {' | '.join(self._head)} |\n|---|{'--:|' * len(self._widths)}"
        return markdown_table(head, self._rows)

    def _print(self, label: str, cells: Sequence[str]) -> None:
        # A cell wider than its column shifts the others, but never touches its neighbour.
        padded = [
            " " * _GAP + f"{cell:>{width - _GAP}}"
            for cell, width in zip(cells, self._widths, strict=False)
        ]
        line = f"{label:<{self._label_width}}" + "".join(padded)
        print(line.rstrip(), file=self._file, flush=True)


def argument_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the module's docstring as its help."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_json(found: Mapping[str, Any]) -> None:
    """Print one line of JSON if stdout is a pipe or a file; a person reads the tables."""
    if not sys.stdout.isatty():
        print(json.dumps(found, default=str), flush=True)


def in_turn(
    contenders: Mapping[str, Callable[[], Result]], *, rounds: int, warm_up: int = 0
) -> dict[str, list[Result]]:
    """Call each contender once a round; return their results without the warm-up rounds."""
    found: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name, call in contenders.items():
            result = call()
            if number >= warm_up:
                found[name].append(result)
    return found


def seconds_of(call: Callable[[], object]) -> float:
    """Return the wall time of a call in seconds."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def peak_of_run(command: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Train a run with its output on stderr; return its largest process's peak memory in bytes."""
    process = subprocess.Popen(command, cwd=REPO, env=env, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: the run ended with status {process.returncode}.")
    return usage.ru_maxrss * 1024


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contender's results."""
    return {name: statistics.median(values) for name, values in found.items()}


def use_run_allocator() -> None:
    """Restart this program with a run's allocator settings, and allocate tensors as a run does.

    glibc reads the settings at process start.
    """
    tuned = malloc_environment("tuned")
    if not tuned.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | tuned)
    use_plain_malloc()


def markdown_table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; `head` has the heads and the line below them."""
    return "\n".join([head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def one_line(text: str) -> str:
    """Return the text with each run of white space replaced by a space."""
    return " ".join(text.split())


def _cell(text: str) -> str:
    return one_line(text).replace("|", r"\|")


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, or `not installed`."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def today() -> str:
    """Return the date in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def commit_of_checkout() -> str:
    """Return the checkout's commit, and whether its files differ from it."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", *words], cwd=REPO, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown: not a git checkout"
    return f"{commit} with local changes" if changed else commit


def describe_machine() -> str:
    """Return the architecture, the number of cores, and the processor's name if it is known."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {_cpu_name()}"


def machine_class() -> str:
    """Return the class of CPU; only results of one class are comparable."""
    flags = _cpu_field("flags").split()
    if "amx_tile" in flags:
        return "amx"
    if "avx512_bf16" in flags:
        # Intel's CPUs without AMX multiply bf16 more slowly than fp32.
        return "avx512_bf16" if "AMD" in _cpu_field("vendor_id") else "avx512_bf16_slow"
    widest = next((flag for flag in ("avx512f", "avx2") if flag in flags), platform.machine())
    return widest.removesuffix("f")


def _cpu_name() -> str:
    """Return the processor's name, or an empty text."""
    return read_cpu(Path("/proc/cpuinfo"))[0] or platform.processor()


def _cpu_field(name: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, or an empty string."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(": ")[2] for line in lines if line.startswith(name)), "")
