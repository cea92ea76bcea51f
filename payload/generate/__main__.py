"""`python -m payload.generate`: continue a prompt with a trained model."""

from __future__ import annotations

import argparse
import codecs
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from payload.data.tokenizer import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding
from payload.errors import ConfigError, ExitCode, TileforgeError
from payload.generate.sampling import SamplingOptions, add_tokens, stream
from payload.generate.source import find_weights
from payload.hints import command
from payload.train.models.base import CausalLM
from payload.train.models.registry import load
from payload.train.weights import model_folder
from payload.untrusted import printable

_DEFAULTS = SamplingOptions()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=command("generate"),
        description="Continue a prompt. Text goes to stdout as it is made, everything else to "
        "stderr. Several samples are made together: the first is shown meanwhile, the others after "
        "it. Ctrl-C ends the command and keeps what was made until then.",
    )
    made.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint), a checkpoint such as RUN/checkpoints/best, or a "
        "Hugging Face GPT-2 folder or name",
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
    for output in (sys.stdout, sys.stderr):
        # The text can hold any character, whatever the terminal's locale.
        output.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        _generate(arguments)
    except TileforgeError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
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
    model = load(model_folder(weights))
    tokens = _encode(prompt, model=model)
    began = time.perf_counter()
    samples: list[list[int]] = [[] for _ in range(options.num_samples)]
    output = (
        _JsonOutput(prompt, weights=weights, options=options)
        if arguments.json
        else _TextOutput(prompt)
    )
    try:
        size = model.spec.num_params() / 1e6
        print(f"model: {weights} ({size:.1f}M parameters)", file=sys.stderr)
        for made in stream(
            model, tokens, options=options, end_token=END_OF_TEXT, num_tokens=VOCAB_SIZE
        ):
            add_tokens(samples, made)
            output.go_on(made[0])
    except KeyboardInterrupt:
        # What was made until then is not lost.
        output.end(samples)
        raise
    took_s = time.perf_counter() - began
    output.end(samples)
    count = sum(map(len, samples))
    print(f"{count} tokens in {took_s:.1f} s ({count / took_s:.0f} tokens/s)", file=sys.stderr)


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


def _encode(prompt: str, *, model: CausalLM) -> list[int]:
    """The prompt's tokens; an empty prompt is the end of a text before."""
    tokens = gpt2_encoding().encode_ordinary(prompt) or [END_OF_TEXT]
    largest, size = max(tokens), model.spec.vocab_size
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
    context = model.spec.context()
    if len(tokens) > context:
        print(
            f"note: the prompt has {len(tokens)} tokens, the model reads the last {context}",
            file=sys.stderr,
        )
    return tokens


class _TextOutput:
    """Prints the first sample as it is made and, when it is done, the others that were made beside.

    A token may end within a character: its bytes wait for the rest. Where there is none, they
    become the replacement character.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_begun = False

    def go_on(self, token: int | None) -> None:
        """Print the first sample's next token."""
        if token is not None:
            content = gpt2_encoding().decode_single_token_bytes(token)
            print(self._begin() + self._decoder.decode(content), end="", flush=True)

    def end(self, samples: Sequence[list[int]]) -> None:
        """Print what is left of the first sample, and the other samples."""
        texts = [gpt2_encoding().decode(tokens, errors="replace") for tokens in samples[1:]]
        rest = self._begin() + self._decoder.decode(b"", final=True)
        print("\n---\n".join([rest, *(self._prompt + text for text in texts)]), flush=True)

    def _begin(self) -> str:
        """Return the prompt once: no text begins before the model gives a token."""
        is_begun, self._is_begun = self._is_begun, True
        return "" if is_begun else self._prompt


class _JsonOutput:
    """Prints one object at the end."""

    def __init__(self, prompt: str, *, weights: str, options: SamplingOptions) -> None:
        self._prompt = prompt
        self._weights = weights
        self._first_seed = options.seed

    def go_on(self, token: int | None) -> None:
        """Print nothing yet."""

    def end(self, samples: Sequence[list[int]]) -> None:
        """Print all samples."""
        rows = [
            {
                "text": gpt2_encoding().decode(tokens, errors="replace"),
                "num_tokens": len(tokens),
                "seed": self._first_seed + i,
            }
            for i, tokens in enumerate(samples)
        ]
        result = {"checkpoint": self._weights, "prompt": self._prompt, "samples": rows}
        print(json.dumps(result), flush=True)


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
