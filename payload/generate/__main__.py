"""`python -m payload.generate`: continue a prompt with a trained model."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from payload.data.tokenizer import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding
from payload.errors import ConfigError, ExitCode, TileforgeError
from payload.generate.sampling import SamplingOptions, sample
from payload.generate.source import find_weights
from payload.hints import command
from payload.train.model import GPT
from payload.train.weights import load_hf
from payload.untrusted import printable

_DEFAULTS = SamplingOptions()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=command("generate"),
        description="Continue a prompt. Text goes to stdout, everything else to stderr.",
    )
    made.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint), a checkpoint, or a Hugging Face GPT-2 folder or name",
    )
    prompt = made.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        default="It is interesting",
        metavar="TEXT",
        help="text to continue (default: %(default)s)",
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from this file, as it is; - = stdin"
    )
    made.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=_DEFAULTS.max_new_tokens,
        metavar="TOKENS",
        help="longest continuation (default: %(default)s)",
    )
    made.add_argument(
        "--temperature",
        type=_temperature,
        default=_DEFAULTS.temperature,
        metavar="T",
        help="0 = always the likeliest token (default: %(default)s)",
    )
    made.add_argument(
        "--top-k",
        type=_count,
        default=_DEFAULTS.top_k,
        metavar="K",
        help="choose among the K likeliest tokens; 0 = among all (default: %(default)s)",
    )
    made.add_argument(
        "--num-samples",
        type=_positive,
        default=_DEFAULTS.num_samples,
        metavar="COUNT",
        help="continuations to write (default: %(default)s)",
    )
    made.add_argument(
        "--seed",
        type=_seed,
        default=_DEFAULTS.seed,
        metavar="INT",
        help="sample i, from 0, is drawn with SEED + i (default: %(default)s)",
    )
    made.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # The text can hold any character, whatever the terminal's locale.
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        _generate(arguments)
    except TileforgeError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return ExitCode.OK


def _generate(arguments: argparse.Namespace) -> None:
    prompt = _read_prompt(arguments)
    options = SamplingOptions(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k or None,
        num_samples=arguments.num_samples,
        seed=arguments.seed,
    )
    weights = find_weights(arguments.checkpoint)
    model = load_hf(weights)
    print(f"model: {weights} ({model.shape.num_params() / 1e6:.1f}M parameters)", file=sys.stderr)
    tokens = _encode(prompt, model=model)
    began = time.perf_counter()
    samples = sample(model, tokens, options=options, end_token=END_OF_TEXT, num_tokens=VOCAB_SIZE)
    took_s = time.perf_counter() - began
    _show(prompt, samples, weights=weights, options=options, as_json=arguments.json)
    made = sum(len(new) for new in samples)
    print(f"{made} tokens in {took_s:.1f} s ({made / took_s:.0f} tokens/s)", file=sys.stderr)


def _read_prompt(arguments: argparse.Namespace) -> str:
    name = arguments.prompt_file
    if name is None:
        return str(arguments.prompt)
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"--prompt-file {name}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompt-file {name}: byte {error.start} is not UTF-8. Convert the file to UTF-8."
        ) from None


def _encode(prompt: str, *, model: GPT) -> list[int]:
    """The prompt's tokens; an empty prompt is the end of a text before."""
    tokens = gpt2_encoding().encode_ordinary(prompt) or [END_OF_TEXT]
    largest, size = max(tokens), model.shape.vocab_size
    if largest >= size:
        raise ConfigError(
            f"the prompt has token {largest}, the model's vocabulary ends at {size - 1}: it was "
            "trained with another tokenizer than GPT-2's."
        )
    if size != VOCAB_SIZE:
        print(
            f"note: the model's vocabulary has {size} tokens, GPT-2's has {VOCAB_SIZE}: unless "
            "only its embedding was made larger or smaller, the text will make no sense",
            file=sys.stderr,
        )
    context = model.shape.positions()
    if len(tokens) > context:
        print(
            f"note: the prompt has {len(tokens)} tokens, the model reads the last {context}",
            file=sys.stderr,
        )
    return tokens


def _show(
    prompt: str,
    samples: list[list[int]],
    *,
    weights: str,
    options: SamplingOptions,
    as_json: bool,
) -> None:
    # A sample may stop within a character: its bytes so far become the replacement character.
    texts = [gpt2_encoding().decode(new, errors="replace") for new in samples]
    if not as_json:
        print("\n---\n".join(prompt + text for text in texts), flush=True)
        return
    rows = [
        {"text": text, "num_tokens": len(new), "seed": options.seed + i}
        for i, (text, new) in enumerate(zip(texts, samples, strict=True))
    ]
    print(json.dumps({"checkpoint": weights, "prompt": prompt, "samples": rows}), flush=True)


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 64 bits")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value


if __name__ == "__main__":
    sys.exit(main())
