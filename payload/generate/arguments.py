"""The command line of `python -m payload.generate`."""

from __future__ import annotations

import argparse
import math

from payload.core.suggested_commands import command

DEFAULT_PROMPT = "It is interesting"
_MAX_NEW_TOKENS, _ANSWER_TOKENS = 100, 1024
_TEMPERATURE, _TOP_K, _NUM_SAMPLES, _SEED, _PENALTY = 0.8, 200, 3, 1337, 1.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=command("generate"),
        description="Continue prompts, hold a conversation, or classify texts. Text goes to stdout "
        "as it is generated, other output to stderr. Several samples are generated at the same "
        "time: the first one is streamed, the others follow. Ctrl-C ends the command and prints "
        "the text so far.",
        epilog="Example: "
        + command("generate", "--checkpoint", "runs/latest", "--prompt", "It is interesting"),
    )
    made.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint), a checkpoint such as RUN/checkpoints/best, or a "
        "Hugging Face folder or name",
    )
    _add_prompts(made)
    _add_sampling(made)
    made.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before TEXT; can be repeated. A text also ends at the tokens in the "
        "model's generation_config.json",
    )
    made.add_argument(
        "--json",
        action="store_true",
        help="one JSON object for each prompt, or for each answer of a chat, instead of text",
    )
    return made


def _add_prompts(made: argparse.ArgumentParser) -> None:
    prompt = made.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help=f"text to continue (default: {DEFAULT_PROMPT})",
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from this file, unchanged; - = stdin"
    )
    prompt.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="continue every line of this file, in batches; in a .jsonl file a line is a string or "
        "an object with `prompt`; - = stdin",
    )
    prompt.add_argument(
        "--chat",
        action="store_true",
        help="chat in the terminal, with the model's chat template, or with the lines of stdin. "
        "Ctrl-C ends an answer, Ctrl-D the chat",
    )
    prompt.add_argument(
        "--input",
        metavar="FILE",
        help="with --classify: classify every line of this file; - = stdin",
    )
    made.add_argument(
        "--classify",
        action="store_true",
        help="classify texts with a classifier; --prompt is one text. --json prints `label` and "
        "the probabilities in `scores`, a line for each text",
    )
    made.add_argument("--system", metavar="TEXT", help="system message of a chat")


def _add_sampling(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--max-new-tokens",
        type=_positive,
        metavar="TOKENS",
        help=f"maximum tokens of a continuation (default: {_MAX_NEW_TOKENS}) or answer (default: "
        f"{_ANSWER_TOKENS})",
    )
    made.add_argument(
        "--temperature",
        type=_temperature,
        default=_TEMPERATURE,
        metavar="T",
        help="sampling temperature; 0 = greedy decoding (default: %(default)s)",
    )
    made.add_argument(
        "--top-k",
        type=_count,
        default=_TOP_K,
        metavar="K",
        help="sample among the K likeliest tokens; 0 = among all (default: %(default)s)",
    )
    made.add_argument(
        "--repetition-penalty",
        type=_penalty,
        default=_PENALTY,
        metavar="P",
        help="above 1, tokens already in the text become less likely (default: %(default)s)",
    )
    made.add_argument(
        "--num-samples",
        type=_positive,
        metavar="COUNT",
        help=f"continuations of each prompt (default: {_NUM_SAMPLES})",
    )
    made.add_argument(
        "--seed",
        type=_seed,
        default=_SEED,
        metavar="INT",
        help="sample i, from 0, uses seed SEED + i (default: %(default)s)",
    )


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 0 or more")
    return int(text)


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a 64-bit whole number")
    return value


def _temperature(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, 0 or more")
    return value


def _penalty(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
