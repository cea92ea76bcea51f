"""The command line of `python -m payload.generate`."""

from __future__ import annotations

import argparse
import math

from payload.core.command_line import CommandParser
from payload.core.suggested_commands import command
from payload.data.tasks.arguments import template_variable
from payload.weights.model_option import MODEL_HELP, OLDER_SPELLING

DEFAULT_PROMPT = "It is interesting"
_MAX_NEW_TOKENS, _ANSWER_TOKENS = 100, 1024
_TEMPERATURE, _TOP_K, _ANSWER_TOP_K, _NUM_SAMPLES, _SEED = 0.8, 200, 50, 3, 1337


def parser() -> CommandParser:
    """Return the parser of the command-line options."""
    made = CommandParser(
        prog=command("generate"),
        description="Continue prompts, chat, or classify texts. Text goes to stdout, messages go "
        "to stderr. Ctrl-C ends the command and keeps the text generated so far.",
        example=command("generate", "latest", "--prompt", "Hello"),
    )
    made.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=MODEL_HELP,
    )
    action = made.add_advanced_group("advanced options").add_argument(
        "--model", dest="checkpoint", metavar="MODEL", help="same as the argument MODEL"
    )
    made.add_older_spelling(OLDER_SPELLING, action)
    _add_prompts(made)
    _add_sampling(made)
    made.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for each prompt or answer",
    )
    return made


def _add_prompts(made: CommandParser) -> None:
    prompt = made.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help=f"text to continue (default: '{DEFAULT_PROMPT}')",
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with one prompt; - means stdin")
    prompt.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="one prompt per line, or .jsonl objects with the key `prompt` (with --chat: or "
        "`messages`); - means stdin",
    )
    prompt.add_argument(
        "--input",
        metavar="FILE",
        help="file of texts to classify, one per line; - means stdin",
    )
    made.add_argument(
        "--classify",
        action="store_true",
        help="classify the text of --prompt, or each line of --input",
    )
    chat = made.add_argument_group("chat").add_argument
    chat(
        "--chat",
        action="store_true",
        help="chat in the terminal, or answer each line of stdin. Each given prompt gets its "
        "own conversation. Ctrl-C ends an answer, Ctrl-D ends the chat",
    )
    chat("--system", metavar="TEXT", help="system message of the chat")
    chat(
        "--tools",
        metavar="FILE",
        help="JSON list of functions that the model can call",
    )
    made.add_advanced_group("advanced chat options").add_argument(
        "--template-var",
        action="append",
        type=template_variable,
        default=[],
        metavar="NAME=VALUE",
        help="set a variable of the chat template, such as enable_thinking=false; can be repeated",
    )


def _add_sampling(made: CommandParser) -> None:
    common = made.add_argument_group("sampling").add_argument
    add = made.add_advanced_group("advanced sampling options").add_argument
    common(
        "--max-new-tokens",
        type=_positive,
        metavar="TOKENS",
        help=f"limit on new tokens (default: {_MAX_NEW_TOKENS}; with --chat: {_ANSWER_TOKENS})",
    )
    common(
        "--temperature",
        type=_temperature,
        metavar="T",
        help=f"0 means greedy decoding (default: {_TEMPERATURE}; with --chat: the value in "
        "generation_config.json, otherwise 0)",
    )
    common(
        "--top-k",
        type=_count,
        metavar="K",
        help=f"sample from the K likeliest tokens; 0 means all (default: {_TOP_K}; with --chat: "
        f"the value in generation_config.json, otherwise {_ANSWER_TOP_K})",
    )
    add(
        "--top-p",
        type=_share,
        metavar="P",
        help="sample from the likeliest tokens whose probabilities sum to P (default: 1; with "
        "--chat: the value in the model's generation_config.json, otherwise 1)",
    )
    add(
        "--repetition-penalty",
        type=_penalty,
        metavar="P",
        help="a value above 1 makes repeated tokens less likely (default: 1; with --chat: the "
        "value in the model's generation_config.json, otherwise 1)",
    )
    common(
        "--num-samples",
        type=_positive,
        metavar="COUNT",
        help=f"outputs for each prompt (default: {_NUM_SAMPLES}; with --chat: 1)",
    )
    add(
        "--seed",
        type=_seed,
        default=_SEED,
        metavar="INT",
        help="seed of a prompt's first sample; each further sample uses the next integer "
        "(default: %(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the text before the first TEXT; can be repeated. The end tokens in the "
        "model's generation_config.json always end the text. With --chat, the template's "
        "end-of-turn token also ends the text",
    )


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from -2^63 to 2^63 - 1")
    return value


def _temperature(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def _penalty(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
