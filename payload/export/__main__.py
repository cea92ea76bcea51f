"""`python -m payload.export`: writes a checkpoint's weights for other programs."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from payload.core.elapsed_line import elapsed_line
from payload.core.error_line import print_error
from payload.core.errors import CheckpointError, ExitCode, TileforgeError, UsageError
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable, shown_name
from payload.export.arguments import parser
from payload.export.gguf_file import write_gguf
from payload.export.hf_folder import write_hf
from payload.export.hf_weight_reader import WeightFiles, weights_of
from payload.export.merge_rounding import MergeRounding
from payload.export.merged import dequantized_weights, merged_weights
from payload.export.vocabulary import read_vocabulary
from payload.formats.checkpoint_listing import CHECKPOINTS_NAME, checkpoint_dtype
from payload.formats.hf_folder import CONFIG_FILE, read_config, read_generation_file
from payload.formats.hub_names import local_name
from payload.models.adapter import token_ids
from payload.models.gguf import plan_gguf
from payload.models.gguf_header import SUFFIX
from payload.models.registry import read_spec
from payload.train.models.hf_weights import (
    base_folder,
    checkpoint_folder,
    config_folder,
    tokenizer_folder,
)
from payload.weights.adapter_files import base_quantization, has_adapter, read_adapter_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        print(shown_name(local_name(_export(arguments))))
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return ExitCode.OK


def _export(arguments: argparse.Namespace) -> Path:
    if arguments.format == "hf" and arguments.dtype == "q8_0":
        raise UsageError(
            "--format hf --dtype q8_0: the Hugging Face layout does not support q8_0. Use --format "
            "gguf, or --dtype bf16."
        )
    folder = checkpoint_folder(arguments.checkpoint)
    weights_at = _weights_folder(folder, merges=arguments.merge)
    config = read_config(config_folder(folder))
    weights, rounding = None, MergeRounding()
    if weights_at != folder and token_ids(read_adapter_config(folder).settings.train_tokens):
        weights = dequantized_weights(folder, rounding=rounding)
        # The vocabulary can be larger than the base's.
        config = {**config, "vocab_size": weights.labels["vocab_size"]}
    tokenizer = tokenizer_folder(folder)
    name = _name_of(folder)
    out = _out_path(arguments.out, name=name, format_=arguments.format, dtype=arguments.dtype)
    if arguments.format == "gguf":
        plan = plan_gguf(config, folder=weights_at)
        eos = config.get("eos_token_id")
        vocabulary = read_vocabulary(
            tokenizer, rows=plan.vocab_size, eos=eos if isinstance(eos, int) else None
        )
        weights = weights or _weights(folder, weights_at, rounding=rounding)
        with elapsed_line(f"writing {shown_name(str(out))}"):
            write_gguf(
                out, weights, plan=plan, vocabulary=vocabulary, name=name, dtype=arguments.dtype
            )
        for remark in plan.notes:
            print(f"note: {remark}", file=sys.stderr)
    else:
        weights = weights or _weights(folder, weights_at, rounding=rounding)
        config = {**config, **weights.labels}
        whole, copied = read_spec(config_folder(folder)).whole, None
        if whole is not None:
            from payload.train.tensors.copied_parts import CopiedParts

            config, copied = dict(whole.config), CopiedParts.open(config_folder(folder))
        with elapsed_line(f"writing {shown_name(str(out))}"):
            write_hf(
                out,
                weights,
                config=config,
                source=tokenizer,
                generation=_generation_file(folder, weights),
                dtype=arguments.dtype,
                copied=copied,
            )
    if arguments.dtype != "fp32" and checkpoint_dtype(folder) and weights_at == folder:
        print(
            f"note: the fp32 weights of the run were rounded to {arguments.dtype}. If the loss "
            "is now higher, rounding has removed small updates of the weights; --dtype fp32 keeps "
            "them",
            file=sys.stderr,
        )
    if note := rounding.note(arguments.dtype):
        print(f"note: {note}", file=sys.stderr)
    if weights_at != folder:
        print(f"note: the base model is {printable(str(weights_at))}", file=sys.stderr)
    return out


def _generation_file(folder: Path, weights: WeightFiles) -> Mapping[str, bytes]:
    """Return the model's generation_config.json. Return nothing for a classifier.

    For an adapter, the file is in the folder of the base model.
    """
    return {} if "id2label" in weights.labels else read_generation_file(config_folder(folder))


def _weights_folder(folder: Path, *, merges: bool) -> Path:
    """Return the folder with the complete weights. For an adapter, this is the base's folder."""
    if not has_adapter(folder):
        if merges:
            raise CheckpointError(
                f"{folder}: not an adapter, so there is nothing to merge. Leave --merge out."
            )
        return folder
    if not merges:
        raise CheckpointError(
            f"{folder}: an adapter without the weights of its base. Add --merge to write both as "
            "one model. PEFT and vLLM load the folder without export."
        )
    return base_folder(folder)


def _weights(folder: Path, weights_at: Path, *, rounding: MergeRounding) -> WeightFiles:
    if folder == weights_at:
        return weights_of(folder)
    if base_quantization(folder) == "none":
        return merged_weights(weights_at, folder, rounding=rounding)
    print("note: the base was quantised; the merged weights are dequantised", file=sys.stderr)
    return dequantized_weights(folder, rounding=rounding)


def _name_of(folder: Path) -> str:
    """Return the run id and step of a run's checkpoint, otherwise the folder's name."""
    folder = folder.resolve()
    if folder.parent.name == CHECKPOINTS_NAME:
        return f"{folder.parents[1].name}-{folder.name}"
    return folder.name


def _out_path(out: Path | None, *, name: str, format_: str, dtype: str) -> Path:
    default = f"{name}-{dtype}{SUFFIX if format_ == 'gguf' else ''}"
    if out is None:
        return Path(default)
    # An earlier export is no folder of exports: writing refuses it.
    return out / default if out.is_dir() and not (out / CONFIG_FILE).exists() else out


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())
