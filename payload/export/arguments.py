"""The command line of `python -m payload.export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from payload.core.suggested_commands import command

Dtype = Literal["bf16", "f16", "q8_0", "fp32"]
DTYPES: tuple[Dtype, ...] = ("bf16", "f16", "q8_0", "fp32")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog=command("export"),
        description="Write a model's weights, tokenizer and chat template for other programs: "
        "`gguf`, one file for llama.cpp and what is built on it, for GPT-2 and the Llama family; "
        "`hf`, a folder for transformers. An adapter is merged into its base with --merge. What is "
        "written is whole or absent; its path is printed.",
        epilog="Example: " + command("export", "--checkpoint", "runs/latest", "--format", "gguf"),
    )
    made.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint), a checkpoint such as RUN/checkpoints/best, or a "
        "Hugging Face folder or name",
    )
    made.add_argument(
        "--format", default="hf", choices=("gguf", "hf"), help="(default: %(default)s)"
    )
    made.add_argument(
        "--merge",
        action="store_true",
        help="add an adapter to its base's weights: one model without an adapter",
    )
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
