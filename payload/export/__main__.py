"""`python -m payload.export`: a checkpoint's weights for other programs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.errors import CheckpointError, ExitCode, TileforgeError, UsageError
from payload.export.architectures import plan_gguf
from payload.export.gguf_file import write_gguf
from payload.export.hf_folder import write_hf
from payload.export.tensors import DTYPES, WeightFiles
from payload.export.vocabulary import read_vocabulary
from payload.hf_folder import CONFIG_FILE
from payload.hints import command
from payload.train.weights import model_folder
from payload.untrusted import parse_json, printable, read_bytes

_FIX = "Use another checkpoint."
_GGUF_SUFFIX = ".gguf"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog=command("export"),
        description="Write a model's weights, tokenizer and chat template for other programs: "
        "`gguf`, one file for llama.cpp and what is built on it, for GPT-2 and the Llama family; "
        "`hf`, a folder for transformers with weights of 16 bits. What is written is whole or "
        "absent; its path is printed.",
    )
    made.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint), a checkpoint such as RUN/checkpoints/best, or a "
        "Hugging Face folder or name",
    )
    made.add_argument("--format", required=True, choices=("gguf", "hf"))
    made.add_argument(
        "--dtype",
        default="bf16",
        choices=DTYPES,
        help="of the matrices; q8_0: 8 bits with a scale for 32 of them, in GGUF only (default: "
        "%(default)s)",
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file or folder to write, or a folder that is there to write into (default: named "
        "after the checkpoint, here)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        print(_export(arguments))
    except TileforgeError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return ExitCode.OK


def _export(arguments: argparse.Namespace) -> Path:
    if arguments.format == "hf" and arguments.dtype == "q8_0":
        raise UsageError(
            "--format hf --dtype q8_0: transformers' folders have no such weights. Use --format "
            "gguf, or --dtype bf16."
        )
    folder = model_folder(arguments.checkpoint, setting="--checkpoint")
    config = _read_config(folder)
    name = _name_of(folder)
    out = _out_path(arguments.out, name=name, format_=arguments.format, dtype=arguments.dtype)
    if arguments.format == "gguf":
        plan = plan_gguf(config, folder=folder)
        eos = config.get("eos_token_id")
        vocabulary = read_vocabulary(
            folder, rows=plan.vocab_size, eos=eos if isinstance(eos, int) else None
        )
        with WeightFiles(folder) as weights:
            write_gguf(
                out, weights, plan=plan, vocabulary=vocabulary, name=name, dtype=arguments.dtype
            )
        for note in plan.notes:
            print(f"note: {note}", file=sys.stderr)
    else:
        with WeightFiles(folder) as weights:
            write_hf(out, weights, config=config, source=folder, dtype=arguments.dtype)
    return out


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_FILE
    try:
        raw = parse_json(read_bytes(path), where=str(path), fix=_FIX, error=CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. {_FIX}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected an object. {_FIX}")
    return raw


def _name_of(folder: Path) -> str:
    """Return the run's id and step of a run's checkpoint, else the folder's name."""
    folder = folder.resolve()
    if folder.parent.name == "checkpoints":
        return f"{folder.parents[1].name}-{folder.name}"
    return folder.name


def _out_path(out: Path | None, *, name: str, format_: str, dtype: str) -> Path:
    default = f"{name}-{dtype}{_GGUF_SUFFIX if format_ == 'gguf' else ''}"
    if out is None:
        return Path(default)
    return out / default if out.is_dir() else out


if __name__ == "__main__":
    sys.exit(main())
