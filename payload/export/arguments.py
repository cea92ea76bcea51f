"""The command line of `python -m payload.export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from payload.core.suggested_commands import command

Dtype = Literal["bf16", "f16", "q8_0", "fp32"]
DTYPES: tuple[Dtype, ...] = ("bf16", "f16", "q8_0", "fp32")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=command("export"),
        description="Write a model's weights, tokenizer and chat template for other programs: "
        "`gguf`, one file for llama.cpp and programs based on it, for GPT-2 and the Llama "
        "family; `hf`, a folder for transformers. --merge merges an adapter into its base. The "
        "output is complete or absent; its path is printed.",
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
        "--format",
        default="hf",
        choices=("gguf", "hf"),
        help="output format (default: %(default)s)",
    )
    made.add_argument(
        "--merge",
        action="store_true",
        help="merge an adapter into the weights of its base",
    )
    made.add_argument(
        "--dtype",
        default="bf16",
        choices=DTYPES,
        help="dtype of the matrices; q8_0, in GGUF only: 8 bits with a scale for each 32 "
        "elements (default: %(default)s)",
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file or folder to write, or an existing folder to write into (default: named "
        "after the checkpoint, in the current folder)",
    )
    return made
