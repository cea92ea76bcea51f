"""An instruction set from the running Python's own library: functions and their docstrings.

    python -m benchmarks.docstrings FILE
    python -m benchmarks.docstrings --preference --every 6 FILE

The prompt of each row is a function, the completion its docstring. `module` names the function's
module, so that `--group-column module` holds out whole modules. In a preference set, the rejected
answer is the docstring of another function of the same module.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.harness import argument_parser

_LEAVE_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_LONGEST_CODE = 300
_SHORTEST_ANSWER, _LONGEST_ANSWER = 20, 400
_QUESTION = "Write the docstring of this Python function.\n\n"


def pairs(root: Path) -> Iterator[dict[str, str]]:
    """Yield prompt, completion and module of every short function, without duplicates."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _LEAVE_OUT & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            pair = _pair(node)
            if pair is not None and pair[0] not in seen:
                seen.add(pair[0])
                yield {"prompt": _QUESTION + pair[0], "completion": pair[1], "module": module}


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str] | None:
    """Return a function's code and docstring; None if one is missing, too short or too long."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None or len(node.body) < 2:
        return None
    answer = inspect.cleandoc(docstring).strip()
    node.body = node.body[1:]
    code = ast.unparse(node)
    if not _SHORTEST_ANSWER <= len(answer) <= _LONGEST_ANSWER or len(code) > _LONGEST_CODE:
        return None
    return code, answer


def preferences(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield prompt, chosen, rejected (the next function's docstring) and module."""
    for module, some in groupby(rows, key=lambda row: row["module"]):
        own = list(some)
        for number, row in enumerate(own):
            other = own[(number + 1) % len(own)]["completion"]
            if other != row["completion"]:
                chosen = {"chosen": row["completion"], "rejected": other}
                yield {"prompt": row["prompt"], **chosen, "module": module}


def write(path: Path, *, preference: bool = False, every: int = 1) -> int:
    """Write each `every`th row of the set as JSON lines; return the number of rows."""
    rows = list(pairs(Path(sysconfig.get_path("stdlib"))))
    rows = (list(preferences(rows)) if preference else rows)[every - 1 :: every]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def main(argv: list[str]) -> None:
    """Write the file of the command line."""
    parser = argument_parser("docstrings", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines to write")
    parser.add_argument(
        "--preference",
        action="store_true",
        help="write a chosen and a rejected docstring for each function",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="keep each Nth row (default: all)"
    )
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every {args.every}: must be 1 or more")
    count = write(args.file, preference=args.preference, every=args.every)
    kind = "chosen and rejected docstring" if args.preference else "function and docstring"
    print(f"{args.file}: {count:,} pairs of {kind}")


if __name__ == "__main__":
    main(sys.argv[1:])
