"""The command line of `python -m payload.export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from payload.core.command_line import CommandParser
from payload.core.suggested_commands import command
from payload.weights.model_option import add_model_option

Dtype = Literal["bf16", "f16", "q8_0", "fp32"]
DTYPES: tuple[Dtype, ...] = ("bf16", "f16", "q8_0", "fp32")


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("export"),
        description="Write a model's weights, tokenizer and chat template for other programs. "
        "`gguf`: one file for llama.cpp and programs based on it (GPT-2 and the Llama family). "
        "`hf`: a folder for transformers. --merge merges an adapter into its base. Prints the "
        "path; a failed export leaves nothing behind.",
        example=command("export", "--model", "latest", "--format", "gguf"),
    )
    add_model_option(made)
    made.add_argument(
        "--format",
        default="hf",
        choices=("gguf", "hf"),
        help="file format (default: %(default)s)",
    )
    made.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapter into the weights of its base model",
    )
    made.add_argument(
        "--dtype",
        default="bf16",
        choices=DTYPES,
        help="dtype of the matrices. `q8_0` stores 8 bits per value and a scale for each 32 "
        "values; only GGUF has this dtype (default: %(default)s)",
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="output file or folder. If PATH is an existing folder, the output is written into "
        "it and named after the checkpoint (default: the current folder)",
    )
    return made
