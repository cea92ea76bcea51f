"""`python -m payload.export`: a checkpoint's weights for other programs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.adapter_files import base_quantization, has_adapter, read_adapter_config
from payload.errors import CheckpointError, ExitCode, TileforgeError, UsageError
from payload.export.architectures import plan_gguf
from payload.export.arguments import parser
from payload.export.gguf_file import write_gguf
from payload.export.hf_folder import write_hf
from payload.export.merged import DequantizedWeights, MergedWeights, require_base
from payload.export.tensors import WeightFiles
from payload.export.vocabulary import read_vocabulary
from payload.hf_folder import CONFIG_FILE
from payload.hints import command
from payload.tokenizer_identity import TOKENIZER_FILE
from payload.train.weights import model_folder
from payload.untrusted import parse_json, printable, read_bytes

_FIX = "Use another checkpoint."
_GGUF_SUFFIX = ".gguf"


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
    weights_at = _weights_folder(folder, merges=arguments.merge)
    config = _config_of(folder, weights_at)
    tokenizer = folder if (folder / TOKENIZER_FILE).is_file() else weights_at
    name = _name_of(folder)
    out = _out_path(arguments.out, name=name, format_=arguments.format, dtype=arguments.dtype)
    if arguments.format == "gguf":
        plan = plan_gguf(config, folder=weights_at)
        eos = config.get("eos_token_id")
        vocabulary = read_vocabulary(
            tokenizer, rows=plan.vocab_size, eos=eos if isinstance(eos, int) else None
        )
        with _weights(folder, weights_at) as weights:
            write_gguf(
                out, weights, plan=plan, vocabulary=vocabulary, name=name, dtype=arguments.dtype
            )
        for note in plan.notes:
            print(f"note: {note}", file=sys.stderr)
    else:
        with _weights(folder, weights_at) as weights:
            write_hf(out, weights, config=config, source=tokenizer, dtype=arguments.dtype)
    return out


def _weights_folder(folder: Path, *, merges: bool) -> Path:
    """Return the folder with the whole weights: an adapter's base, else `folder` itself.

    Raises CheckpointError for an adapter without --merge, and for --merge without one.
    """
    if not has_adapter(folder):
        if merges:
            raise CheckpointError(
                f"{folder}: it is no adapter, there is nothing to merge. Leave --merge out."
            )
        return folder
    if not merges:
        raise CheckpointError(
            f"{folder}: it is an adapter without its base's weights. Add --merge to write both as "
            "one model; PEFT and vLLM load the folder as it is."
        )
    base = model_folder(read_adapter_config(folder).source(), setting=f"{folder}: base")
    if has_adapter(base):
        raise CheckpointError(
            f"{folder}: its base {base} is an adapter itself. Merge that one first with "
            f"{command('export', '--checkpoint', str(base), '--merge')}."
        )
    require_base(base, folder)
    return base


def _weights(folder: Path, weights_at: Path) -> WeightFiles:
    if folder == weights_at:
        return WeightFiles(folder)
    if base_quantization(folder) == "none":
        return MergedWeights(weights_at, folder)
    print("note: the base was quantised; the merged weights are dequantised", file=sys.stderr)
    return DequantizedWeights(folder)


def _config_of(folder: Path, weights_at: Path) -> Mapping[str, Any]:
    """Return the config of what is written; a classifier's adapter has its own, with labels."""
    return _read_config(folder if (folder / CONFIG_FILE).is_file() else weights_at)


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
