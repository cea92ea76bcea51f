"""The option `--model` of the programs that read a trained model."""

from __future__ import annotations

from payload.core.command_line import CommandParser

MODEL_HELP = (
    "a run (id, folder or `latest`), RUN/checkpoints/best, a Hugging Face folder or name, or a "
    "GGUF file"
)
OLDER_SPELLING = "--checkpoint"


def add_model_option(parser: CommandParser) -> None:
    """Add the required option `--model`, stored as `checkpoint`."""
    action = parser.add_argument(
        "--model", dest="checkpoint", required=True, metavar="MODEL", help=MODEL_HELP
    )
    parser.add_older_spelling(OLDER_SPELLING, action)
