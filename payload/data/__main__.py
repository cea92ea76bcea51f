"""Command line of `python -m payload.data`: prepares, verifies or shows a data folder."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.core.command_line import CommandParser
from payload.core.elapsed_line import elapsed_line
from payload.core.error_line import print_error
from payload.core.errors import ExitCode, TileforgeError, UsageError
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable, shown_name
from payload.core.suggested_commands import command
from payload.core.tasks import TASK_KINDS
from payload.core.wrapped_lines import fitted
from payload.data.shared_flags import (
    add_dedup_flag,
    add_hub_flags,
    add_reading_flags,
    add_rendering_flags,
    add_special_tokens_flag,
    add_tokenizer_check_flag,
    add_val_fraction_flag,
)
from payload.data.sources.documents import MIB
from payload.data.sources.source_flags import DEFAULT_TEXT_COLUMN, SOURCE_KINDS, SourceRequest
from payload.data.tasks import all_tasks, task_of
from payload.data.tasks.arguments import positive_int
from payload.data.tasks.base import Task
from payload.data.training_command import trained_model, training_command
from payload.data.writing.meta import add_range_hashes, verify_files
from payload.formats.data_folder import META_NAME, DataMeta, load_meta
from payload.formats.prepare_hints import no_range_hashes

if TYPE_CHECKING:
    from payload.data.show import Sample

TOKENIZER = "gpt2"

_NOTES = """\
more examples:
  prepare --source openwebtext --out data/openwebtext
  prepare --source jsonl --input corpus/ --text-column body --out data/mine
  prepare --source hf --input roneneldan/TinyStories --out data/stories
  prepare --source stdlib --tokenizer HuggingFaceTB/SmolLM2-135M \\
      --out data/smollm2
  prepare --task chat --source jsonl --input chats.jsonl --tokenizer MODEL \\
      --out data/chats
  prepare --task preference --source jsonl --input pairs.jsonl \\
      --tokenizer MODEL --out data/pairs

sources:
  auto         files or folders; the content of each file decides: JSON Lines,
               JSON, CSV (delimiter and encoding are detected), parquet, Arrow
               or text, also compressed. Files named train, valid (validation,
               val, dev, eval) and test are splits
  stdlib       Python's standard library, 31 MB; needs no network
  openwebtext  Skylion007/openwebtext at a fixed commit, 40 GB of text;
               --input FOLDER: a local copy
  text         files or folders, one document a file; a single file is split
               at form feeds; without any, at blank lines; if these are rare,
               at line ends or spaces
  jsonl        files or folders, one JSON object a line (also compressed)
  parquet      files or folders, one document a row
  hf           a dataset of the Hugging Face hub, or a folder in its formats

Documents keep the order of the source. If they can be counted in advance,
train_test_split of the library datasets selects the validation documents, as
in nanoGPT; otherwise a hash of each document's number selects them. To resume
an interrupted command, repeat it without --force.
"""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its `ExitCode`."""
    args = parser().parse_args(argv)
    # A file name need not be valid UTF-8.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if args.command == "verify":
            return _verify(args)
        if args.command == "show":
            return _show(args)
        return _prepare(args)
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    except OSError as error:
        print_error(f"{error.filename or 'input'}: {error.strerror or error}.")
        return ExitCode.CONFIG
    except KeyboardInterrupt:
        print(
            "stopped; run the same command again, without --force, to resume from the last shard",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT


def parser() -> CommandParser:
    """Return the command line."""
    made = CommandParser(
        prog=command("data"),
        description="Prepare, verify or show the tokens of a data folder.",
        example=command("data", "prepare", "--source", "stdlib", "--out", "data/stdlib"),
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare = commands.add_parser(
        "prepare",
        help="tokenize text into train.bin, val.bin and meta.json",
        description="Tokenize text into train.bin, val.bin and meta.json.",
        example=command("data", "prepare", "--source", "stdlib", "--out", "data/stdlib"),
        notes=_NOTES,
    )
    prepare.add_argument(
        "--task",
        choices=TASK_KINDS,
        default="text",
        metavar="KIND",
        help="what the model learns. "
        + "; ".join(f"{task.kind}: {task.summary}" for task in all_tasks())
        + " (default: %(default)s)",
    )
    _add_source_flags(prepare)
    _add_output_flags(prepare)
    for task in all_tasks():
        if task.flags:
            task.add_flags(prepare.add_advanced_group(f"--task {task.kind}").add_argument)
    verify = commands.add_parser(
        "verify",
        help="check a data folder's files against their hashes",
        description="Compare a data folder's files with the hashes in its meta.json.",
        example=command("data", "verify", "data/mine"),
    )
    verify.add_argument("folder", type=Path, metavar="DIR", help="data folder")
    verify.add_argument(
        "--add-hashes",
        action="store_true",
        help="add hashes of file ranges to the meta.json of a folder from an older release. "
        "Training then verifies each range when it reads the range",
    )
    _add_show_flags(
        commands.add_parser(
            "show",
            help="print a conversation or pair with the trained tokens in colour",
            description="Print a conversation of a folder that was prepared with --task chat, or "
            "a pair of --task preference. For a file that is not prepared yet, print the detected "
            "format, task and columns, and with --tokenizer one row as it will be trained. Tokens "
            "in the loss are green; without colours they are in \u27e6 \u27e7.",
            example=command("data", "show", "data/chats"),
        )
    )
    return made


def _add_show_flags(parser: CommandParser) -> None:
    add = parser.add_argument
    raw = parser.add_advanced_group("raw data").add_argument
    raw(
        "--model",
        "--tokenizer",
        metavar="NAME",
        dest="tokenizer",
        help="model whose tokenizer and chat template render the row",
    )
    raw(
        "--task",
        choices=TASK_KINDS,
        metavar="KIND",
        help="task of the data (default: detected from the data)",
    )
    raw("--text-column", metavar="NAME", help="column with the text (default: detected by name)")
    raw("--label-column", metavar="NAME", help="column with the label (default: detected by name)")
    add_reading_flags(raw)
    add_rendering_flags(raw)
    add("folder", type=Path, metavar="PATH", help="data folder, or a file or folder of raw data")
    add(
        "--sample",
        type=_count,
        default=0,
        metavar="N",
        help="index of the sample; the first sample is 0 (default: 0)",
    )
    add(
        "--split",
        choices=("train", "val"),
        default="train",
        help="split of the sample (default: %(default)s)",
    )
    add(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to use colours. `auto` uses colours on a terminal, unless NO_COLOR is set "
        "(default: %(default)s)",
    )


def _add_source_flags(parser: CommandParser) -> None:
    add = parser.add_argument_group("source").add_argument
    more = parser.add_advanced_group("advanced source options").add_argument
    add(
        "--source",
        choices=SOURCE_KINDS,
        default="auto",
        metavar="KIND",
        help=f"{', '.join(SOURCE_KINDS)} (default: auto, which detects the kind)",
    )
    add(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH[:WEIGHT]",
        help="files or folders. With --source hf, a folder or the name of a dataset. With "
        "a.jsonl:3, an epoch has each row of a.jsonl three times",
    )
    add_reading_flags(more)
    add(
        "--text-column",
        metavar="NAME",
        help=f"key or column with the text (default: {DEFAULT_TEXT_COLUMN}, or another known "
        "name in upper or lower case)",
    )
    add_dedup_flag(more)
    add_hub_flags(more)
    more("--max-documents", type=positive_int, metavar="COUNT", help="stop after COUNT documents")


def _add_output_flags(parser: CommandParser) -> None:
    add = parser.add_argument_group("output").add_argument
    more = parser.add_advanced_group("advanced output options").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="output folder")
    add(
        "--tokenizer",
        "--model",
        default=TOKENIZER,
        metavar="NAME",
        help="tokenizer of the model to train: gpt2, a run (id, folder or `latest`), a folder "
        "with tokenizer.json, a GGUF file, or a name on the hub such as "
        "HuggingFaceTB/SmolLM2-135M@main (default: %(default)s)",
    )
    add_tokenizer_check_flag(more)
    add_special_tokens_flag(more)
    add_val_fraction_flag(add)
    more(
        "--seed",
        type=_count,
        default=2357,
        metavar="INT",
        help="random seed of the validation split (default: %(default)s, as in nanoGPT)",
    )
    add(
        "--force",
        "--restart",
        action="store_true",
        help="start from scratch and replace earlier output in DIR",
    )
    more(
        "--wait",
        action="store_true",
        help="if another prepare command writes to DIR, wait until that command ends",
    )
    more(
        "--shard-mib",
        type=positive_int,
        default=64,
        metavar="MIB",
        help="save the progress each time this much output is written (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="print the estimated output, but write nothing")
    # `finetune` passes both: the first if the run has task.class_weights.
    more("--has-class-weights", action="store_true", help=argparse.SUPPRESS)
    more("--no-next", action="store_true", help=argparse.SUPPRESS)
    more("--quiet", action="store_true", help="print only errors on stderr")
    more("--json", action="store_true", help="print the result as JSON on stdout")


def _prepare(args: argparse.Namespace) -> int:
    task = task_of(args.task)
    _require_own_flags(task, args)
    if args.dry_run:
        label, found = task.estimate(args)
        _show_estimate(label, asdict(found), as_json=args.json)
        return ExitCode.OK
    started_s = time.monotonic()
    outcome = task.prepare(args)
    if args.json:
        result: dict[str, object] = {
            "dir": str(args.out),
            "was_ready": outcome.was_ready,
            "wall_s": round(time.monotonic() - started_s, 3),
            "worked_s": round(outcome.worked_s, 3),
        }
        described = asdict(outcome.meta)
        for file in described["files"].values():
            del file["range_sha256"]
        print(json.dumps(result | described))
    else:
        _show_meta(args.out, outcome.meta)
        if not args.quiet and not args.no_next:
            train = training_command(args.out, outcome.meta, model=trained_model(args.tokenizer))
            print(f"next:\n  {train}", file=sys.stderr)
    return ExitCode.OK


def _require_own_flags(task: Task, args: argparse.Namespace) -> None:
    """Raise UsageError for a flag that belongs to another task."""
    for other in all_tasks():
        for flag in set(other.flags) - set(task.flags):
            if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None:
                raise UsageError(
                    f"{flag} is only for --task {other.kind}, not {task.kind}. Leave out {flag}."
                )


def _verify(args: argparse.Namespace) -> int:
    if args.add_hashes:
        with elapsed_line(f"verifying {shown_name(str(args.folder))}"):
            meta = add_range_hashes(args.folder)
    else:
        meta = load_meta(args.folder)
        with elapsed_line(f"verifying {shown_name(str(args.folder))}"):
            verify_files(args.folder, meta)
    _show_meta(args.folder, meta)
    if not all(file.range_sha256 for file in meta.files.values()):
        print(no_range_hashes(args.folder), file=sys.stderr)
    return ExitCode.OK


def _show(args: argparse.Namespace) -> int:
    from payload.data.show import read_samples

    if not (args.folder / META_NAME).exists() and args.folder.exists():
        return _show_rows(args)
    meta = load_meta(args.folder)
    samples = read_samples(args.folder, meta, split=args.split, number=args.sample)
    _print_samples(samples, color=args.color)
    return ExitCode.OK


def _show_rows(args: argparse.Namespace) -> int:
    """Print the detected format of raw data, and one row as training will read it."""
    from payload.data.detect import DataOptions, detect_data
    from payload.data.rendered_rows import RenderedRows

    source = SourceRequest(
        kind="auto",
        glob=args.glob,
        columns=args.columns or (),
        ignored_keys=tuple(args.ignore_key or ()),
    )
    options = DataOptions(
        task=args.task,
        text_column=args.text_column,
        label_column=args.label_column,
        source=source,
    )
    found = detect_data([str(args.folder)], options, setting="show")
    _print(f"{args.folder}: task {found.task}, because {found.reason}")
    for line in found.recognised:
        _print(line)
    if args.tokenizer is None:
        if found.task in ("chat", "preference"):
            print("add --tokenizer MODEL to print a row as it will be trained", file=sys.stderr)
        return ExitCode.OK
    if found.task not in ("chat", "preference"):
        return ExitCode.OK
    rendered = RenderedRows(found, args)
    for line in rendered.fault_lines():
        print(f"note: {printable(line)}", file=sys.stderr)
    _print_samples(rendered.example(args.sample), color=args.color)
    return ExitCode.OK


def _print_samples(samples: Sequence[Sample], *, color: str) -> None:
    from payload.data.show import has_colours

    colour = color == "always" or (color == "auto" and has_colours(os.environ))
    for sample in samples:
        print(
            f"{sample.name}: {sample.num_tokens:,} tokens, {sample.num_trained:,} of them trained",
            file=sys.stderr,
            flush=True,
        )
        print(sample.render(colour=colour), flush=True)


def _show_meta(folder: Path, meta: DataMeta) -> None:
    size_mib = sum(file.bytes for file in meta.files.values()) / MIB
    _print(
        f"{shown_name(str(folder))}: {meta.train_tokens:,} training tokens in "
        f"{meta.train_documents:,} documents, "
        f"{meta.val_tokens:,} validation tokens in {meta.val_documents:,}, "
        f"{size_mib:,.1f} MiB of {meta.dtype}"
    )
    for line in task_of(meta.task).describe(meta):
        _print(line)
    if meta.selection is not None:
        from payload.data.selection.select_rows import describe_selection

        for line in describe_selection(meta.selection):
            _print(line)
    if meta.skipped_documents:
        print(f"skipped as bad: {meta.skipped_documents:,}, for example")
        for example in meta.skipped_examples:
            _print(f"  {example}", indent=4)


def _print(line: str, *, indent: int = 2) -> None:
    """Print a line, wrapped on a terminal."""
    print(fitted(printable(line), sys.stdout, indent=indent))


def _show_estimate(label: str, values: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"source": label, **values}))
        return

    def known(key: str) -> str:
        value = values[key]
        return "unknown" if value is None else f"{value:,}"

    print(f"source      {shown_name(label)}")
    print(f"documents   {known('documents')}")
    print(f"text        {known('text_bytes')} bytes")
    if values["note"] is not None:
        _print(f"note        {values['note']}", indent=12)
    print(f"tokens      {known('tokens')} (estimate)")
    print(f"output      {known('need_bytes')} bytes (estimate), {known('free_bytes')} free")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main(sys.argv[1:]))
