"""`python -m payload.evaluate`: the validation loss of a checkpoint, on one rank or several."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from payload.core.command_line import CommandParser
from payload.core.durations import in_words
from payload.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RanksDifferError,
)
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable, shown_name
from payload.core.suggested_commands import command
from payload.weights.model_option import add_model_option

if TYPE_CHECKING:
    from payload.data.reading.blocks import Blocks
    from payload.run_record.metrics_log import EvalMetrics
    from payload.train.models.base import CausalLM
    from payload.train.models.classifier import Classifier
    from payload.train.ranks.world import World

_SEQUENCE_LENGTH = 1024
_MICRO_BATCH_TOKENS = 4096
_COMPARED_ELEMENTS = 64
"""Number of elements of each parameter that the ranks compare."""


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("evaluate"),
        description="Measure a checkpoint on the validation data of a folder. The result is the "
        "mean loss per token of val.bin, in blocks as in the run's own evaluations; for data "
        "of --task chat, over the assistant's tokens only. For data of --task preference, it is "
        "the loss, accuracy and margin of the rewards; for a classifier, the loss, accuracy, F1 "
        "and confusion matrix. Ranks under mpirun or torchrun share the "
        "work; the result is the same as on one rank.",
        example="torchrun --nproc-per-node 2 -m payload.evaluate --model latest --data data/stdlib",
    )
    add_model_option(made)
    made.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="DIR",
        help="data folder that was prepared with the model's tokenizer",
    )
    made.add_argument(
        "--sequence-length",
        type=_positive,
        metavar="TOKENS",
        help="block length; a classifier truncates texts to this length; not for data of --task "
        "preference. Default: for data "
        "of --task chat, their block length; for other data, data.sequence_length of the "
        f"model's run. Without a run: {_SEQUENCE_LENGTH}, or the model's context if that is "
        "shorter; for a classifier, the model's context",
    )
    made.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="TOKENS",
        help="evaluate at most this many tokens, in whole blocks. Of texts with labels and of "
        "pairs: the first ones, until they have at least this many (default: all tokens)",
    )
    made.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the matmuls (default: %(default)s)",
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON, in one line")
    return made


def main(argv: Sequence[str] | None, env: Mapping[str, str]) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    # torch takes seconds to import, which --help does not need.
    from payload.train.ranks.multi_rank_cli import carry_out

    return carry_out(lambda world: _evaluate(arguments, world), env)


def _evaluate(arguments: argparse.Namespace, world: World) -> None:
    from payload.config.launch_sections import DistributedSection
    from payload.data.tokenizer_match import require_same_tokens
    from payload.evaluate.run_settings import trained_length
    from payload.formats.data_folder import load_meta
    from payload.train.models.classifier import Classifier
    from payload.train.models.hf_weights import checkpoint_folder, tokenizer_folder
    from payload.train.models.loading import load_unmerged
    from payload.train.models.lora import cast_base_to_fp32

    meta = load_meta(arguments.data)
    if meta.task == "preference" and arguments.sequence_length is not None:
        raise ConfigError(
            f"--sequence-length {arguments.sequence_length}: pairs have the length for which they "
            f"were prepared ({arguments.data}). Leave the option out."
        )
    folder = checkpoint_folder(arguments.checkpoint)
    require_same_tokens(
        meta,
        data=arguments.data,
        folder=tokenizer_folder(folder),
        init=arguments.checkpoint,
        settings=("--data", "--model"),
    )
    model = load_unmerged(folder)
    if arguments.dtype == "fp32":
        cast_base_to_fp32(model)
    if isinstance(model, Classifier):
        _evaluate_classifier(arguments, world, model, weights=folder)
        return
    if meta.task == "preference":
        _evaluate_pairs(arguments, world, model, weights=folder)
        return
    context = model.spec.context()
    trained = trained_length(folder)
    length = arguments.sequence_length or _default_length(
        arguments.data, trained=trained, context=context
    )
    if length > context:
        raise ConfigError(
            f"--sequence-length {length}: the model's context is {context} tokens. Use at most "
            f"{context}."
        )
    blocks, val_sha256 = _open(arguments.data, model, sequence_length=length)
    tokens = _num_blocks(blocks, max_tokens=arguments.max_tokens) * length
    world.join(DistributedSection())
    try:
        _require_equal_ranks(model, val_sha256, world)
        began = time.perf_counter()
        result = _measure(model, blocks, world, tokens=tokens, dtype=arguments.dtype)
        took_s = time.perf_counter() - began
    finally:
        world.leave()
    if not math.isfinite(result.val_loss):
        raise CheckpointError(
            f"{folder}: the loss is {result.val_loss}. Training diverged before these weights were "
            "saved, or they are damaged. Use another checkpoint."
        )
    if world.is_main:
        _report(
            arguments,
            result,
            weights=folder,
            length=length,
            trained=trained,
            took_s=took_s,
            world=world,
        )


def _default_length(folder: Path, *, trained: int | None, context: int) -> int:
    """Return the default block length.

    The default is the length for which the data was packed, or otherwise data.sequence_length of
    the model's run.

    For a model without a run, the length is a constant, or the model's context if that is shorter.
    """
    from payload.formats.data_folder import load_meta

    chat = load_meta(folder).chat
    if chat is not None:
        return chat.sequence_length
    return trained or min(_SEQUENCE_LENGTH, context)


def _evaluate_classifier(
    arguments: argparse.Namespace, world: World, model: Classifier, *, weights: Path
) -> None:
    from payload.config.launch_sections import DistributedSection
    from payload.evaluate.classify import as_json, as_text, measure, open_texts
    from payload.evaluate.run_settings import different_settings, trained_length
    from payload.formats.data_folder import VAL_NAME, load_meta
    from payload.train.ranks.multi_rank_cli import autocast, progress

    meta = load_meta(arguments.data)
    trained = trained_length(weights)
    length = arguments.sequence_length or trained or model.spec.context()
    texts = open_texts(arguments.data, meta, model, sequence_length=length)
    world.join(DistributedSection())
    try:
        _require_equal_ranks(model, meta.files[VAL_NAME].sha256, world)
        result = measure(
            model,
            texts,
            world,
            max_tokens=arguments.max_tokens,
            autocast=autocast(arguments.dtype),
            progress=progress(world, clock=time.monotonic),
        )
    finally:
        world.leave()
    if not world.is_main:
        return
    if arguments.json:
        names = {"checkpoint": str(weights), "data": str(arguments.data)}
        lengths = {"sequence_length": length, "trained_sequence_length": trained}
        ran = {**lengths, "dtype": arguments.dtype, "world_size": world.world_size}
        print(as_json(result, model.labels, **names, **ran), flush=True)
        return
    print(f"checkpoint  {shown_name(str(weights))}")
    lines = as_text(result, model.labels, sequence_length=length)
    lines += different_settings(weights, dtype=arguments.dtype, length=length)
    print(printable("\n".join(lines)))


def _evaluate_pairs(
    arguments: argparse.Namespace, world: World, model: CausalLM, *, weights: Path
) -> None:
    from payload.config.launch_sections import DistributedSection
    from payload.evaluate.preference import as_json, as_text, beta_of, measure, open_both
    from payload.evaluate.run_settings import different_settings
    from payload.formats.data_folder import VAL_NAME, load_meta
    from payload.train.ranks.multi_rank_cli import autocast, progress

    meta, beta = load_meta(arguments.data), beta_of(weights)
    pairs, values, reference = open_both(arguments.data, meta, model, dtype=arguments.dtype)
    world.join(DistributedSection())
    try:
        _require_equal_ranks(model, meta.files[VAL_NAME].sha256, world)
        result = measure(
            model,
            pairs,
            values,
            world,
            beta=beta,
            max_tokens=arguments.max_tokens,
            autocast=autocast(arguments.dtype),
            progress=progress(world, clock=time.monotonic),
        )
    finally:
        world.leave()
    if not world.is_main:
        return
    if arguments.json:
        names = {"checkpoint": str(weights), "data": str(arguments.data), "reference": reference}
        ran = {"beta": beta, "dtype": arguments.dtype, "world_size": world.world_size}
        print(as_json(result, **names, **ran), flush=True)
        return
    print(f"checkpoint  {shown_name(str(weights))}\nreference   {reference}")
    lines = as_text(result, beta=beta) + different_settings(weights, dtype=arguments.dtype)
    print("\n".join(lines))


def _open(folder: Path, model: CausalLM, *, sequence_length: int) -> tuple[Blocks, str]:
    """Return the validation blocks, and the SHA-256 of val.bin. Raises DataError, ConfigError."""
    from payload.data.reading.blocks import open_tokens
    from payload.data.reading.packed_blocks import open_packed
    from payload.formats.data_folder import VAL_NAME, load_meta

    meta = load_meta(folder)
    if meta.task == "classify":
        raise DataError(
            f"{folder}: the data has labelled texts, but the checkpoint is a language model. Use a "
            "checkpoint of a run with task.kind=classify, or a folder of text."
        )
    if meta.vocab_size > model.spec.vocab_size:
        raise DataError(
            f"{folder}: its tokenizer ({meta.tokenizer}) has {meta.vocab_size:,} tokens, but the "
            f"model's embedding has {model.spec.vocab_size:,} rows. Prepare the text with the "
            "model's tokenizer."
        )
    blocks: Blocks
    if meta.task == "chat":
        blocks = open_packed(folder, split="val", sequence_length=sequence_length)
    else:
        blocks = open_tokens(folder / VAL_NAME, meta=meta, sequence_length=sequence_length)
    return blocks, meta.files[VAL_NAME].sha256


def _num_blocks(blocks: Blocks, *, max_tokens: int | None) -> int:
    """Return how many blocks to evaluate.

    The default is all blocks, including a shorter last block, as in a run. Raises DataError or
    ConfigError if there is no block to evaluate.
    """
    length, count = blocks.sequence_length, blocks.num_blocks()
    if blocks.num_full_blocks() < 1:
        raise DataError(
            f"{blocks.path}: the file has fewer than the {length + 1:,} tokens that a block of "
            f"{length:,} needs. Use a shorter --sequence-length, or prepare more text."
        )
    if max_tokens is None:
        return count
    if max_tokens < length:
        raise ConfigError(
            f"--max-tokens {max_tokens}: less than one block of {length} tokens. Use {length} or "
            "more, or a shorter --sequence-length."
        )
    return min(count, max_tokens // length)


def _require_equal_ranks(model: CausalLM, val_sha256: str, world: World) -> None:
    """Raise RanksDifferError unless all ranks have read the same weights and data.

    Weights and data can differ on nodes without a shared disk.
    """
    digest = hashlib.sha256(val_sha256.encode())
    for name, parameter in model.named_parameters():
        some = (
            parameter.detach().flatten()[:: max(1, parameter.numel() // _COMPARED_ELEMENTS)].float()
        )
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + some.numpy().tobytes())
    found = world.gather(digest.hexdigest(), str)
    different = [rank for rank, each in enumerate(found) if each != found[0]]
    if different:
        raise RanksDifferError(
            f"rank {different[0]} has different weights or a different val.bin than rank 0. Copy "
            "the checkpoint and the data folder to every node."
        )


def _measure(
    model: CausalLM, blocks: Blocks, world: World, *, tokens: int, dtype: str
) -> EvalMetrics:
    from payload.train.losses.next_token import NextToken
    from payload.train.ranks.multi_rank_cli import autocast, progress
    from payload.train.tasks.evaluate import EvalPass, evaluate

    eval_pass = EvalPass(
        world=world,
        step=0,
        micro_batch_size=max(1, _MICRO_BATCH_TOKENS // blocks.sequence_length),
        max_tokens=tokens,
        autocast=autocast(dtype),
        should_stop=progress(world, clock=time.monotonic),
    )
    result = evaluate(model, blocks, eval_pass, NextToken())
    assert result is not None, "should_stop is never True here"
    return result


def _report(
    arguments: argparse.Namespace,
    result: EvalMetrics,
    *,
    weights: Path,
    length: int,
    trained: int | None,
    took_s: float,
    world: World,
) -> None:
    from payload.evaluate.run_settings import different_settings

    try:
        perplexity = math.exp(result.val_loss)
    except OverflowError:
        perplexity = None
    print(f"{result.val_tokens:,} tokens in {in_words(took_s)}", file=sys.stderr)
    if not arguments.json:
        shown = f"{perplexity:.4f}" if perplexity is not None else "too large"
        print(f"checkpoint  {shown_name(str(weights))}")
        data = shown_name(str(arguments.data))
        part = "all" if arguments.max_tokens is None else "the first"
        print(f"data        {data}, {part} {result.val_tokens:,} tokens of the validation set")
        detail = f"{arguments.dtype}, blocks of {length}"
        print(f"loss        {result.val_loss:.6f} nats a token ({detail})")
        print(f"perplexity  {shown}")
        for line in different_settings(weights, dtype=arguments.dtype, length=length):
            print(line)
        return
    row = {
        "checkpoint": str(weights),
        "data": str(arguments.data),
        "val_loss": result.val_loss,
        "val_tokens": result.val_tokens,
        "perplexity": perplexity,
        "sequence_length": length,
        "trained_sequence_length": trained,
        "dtype": arguments.dtype,
        "world_size": world.world_size,
    }
    print(json.dumps(row), flush=True)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main(None, os.environ))
