"""`schema`: the JSON Schema of run.toml or of an inventory file, for editors and other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from payload.config.json_schema import SCHEMAS, schema_text
from payload.core.command_line import CommandParser
from payload.core.errors import UsageError
from payload.core.files import write_whole


def parser(*, prog: str) -> CommandParser:
    """Return the parser of `schema`."""
    made = CommandParser(
        prog=prog,
        description="Print the JSON Schema of run.toml: every setting with its meaning, unit, "
        "default and values. If the first line of a run.toml is `#:schema ./run.schema.json`, "
        "editors with support for TOML schemas check the file and suggest settings.",
        example="tileforge schema --out run.schema.json",
    )
    made.add_argument(
        "file",
        nargs="?",
        choices=SCHEMAS,
        default=SCHEMAS[0],
        help="kind of file that the schema describes (default: run)",
    )
    made.add_argument("--out", type=Path, metavar="FILE", help="write to FILE instead of stdout")
    return made


def output(arguments: argparse.Namespace, *, is_styled: bool) -> str:
    """Return the schema, or write it to a file and return nothing. Raises UsageError."""
    del is_styled
    text, out = schema_text(arguments.file), arguments.out
    if out is None:
        return text
    try:
        write_whole(out, text)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}. Choose another file.") from None
    return ""
