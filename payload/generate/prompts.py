"""The prompts of a command: read, turned to tokens, and gathered into batches."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.validation.json_text import parse_json
from payload.generate.arguments import DEFAULT_PROMPT
from payload.generate.codec import Codec
from payload.train.models.base import CausalLM

_ROWS = 16
_SPREAD_TOKENS = 64


def read_prompts(arguments: Namespace) -> list[str]:
    """Return the prompts that the command line names. Raises ConfigError."""
    if arguments.prompts_file is not None:
        return _prompts_of(arguments.prompts_file)
    if arguments.prompt_file is not None:
        return [_read(arguments.prompt_file, option="--prompt-file")]
    return [DEFAULT_PROMPT if arguments.prompt is None else str(arguments.prompt)]


def encode(prompt: str, *, codec: Codec, model: CausalLM, note: Callable[[str], None]) -> list[int]:
    """Return the prompt's tokens; an empty prompt is the end of a text before.

    `note` is told of a prompt that is longer than the model's context. Raises ConfigError for a
    token that the model does not have.
    """
    tokens = codec.encode(prompt) or [codec.begin_of_text]
    largest, size = max(tokens), model.spec.vocab_size
    if largest >= size:
        raise ConfigError(
            f"the prompt has token {largest}, the model's vocabulary ends at {size - 1}: it was "
            f"trained with another tokenizer than {codec.name}."
        )
    context = model.spec.context()
    if len(tokens) > context:
        note(f"note: the prompt has {len(tokens)} tokens, the model reads the last {context}")
    return tokens


def batches(
    prompts: Sequence[Sequence[int]], *, samples: int, model: CausalLM
) -> Iterator[list[int]]:
    """Yield the places of prompts to continue together: some rows, of about the same length.

    A prompt that the context does not hold is alone with its like: it is read from another place.
    """
    context = model.spec.context()
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    batch: list[int] = []
    for place in order:
        length = len(prompts[place])
        if batch:
            shortest = len(prompts[batch[0]])
            is_long = length > context and length != shortest
            is_full = (len(batch) + 1) * samples > _ROWS
            if is_full or is_long or length - shortest > _SPREAD_TOKENS:
                yield batch
                batch = []
        batch.append(place)
    if batch:
        yield batch


def _prompts_of(name: str) -> list[str]:
    """Return a file's prompts: one a line, or in a .jsonl file one JSON object or string a line."""
    text = _read(name, option="--prompts-file")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts-file {name}: has no prompt. Write one on each line.")
    if not name.endswith(".jsonl"):
        return [line.removesuffix("\r") for _, line in lines]
    fix = 'Each line is a string, or an object as in {"prompt": "Once"}.'
    prompts = []
    for number, line in lines:
        where = f"--prompts-file {name}: line {number}"
        raw = parse_json(line, where=where, fix=fix)
        prompt = raw.get("prompt") if isinstance(raw, dict) else raw
        if not isinstance(prompt, str):
            raise ConfigError(f"{where}: {shown(raw)} has no prompt. {fix}")
        prompts.append(prompt)
    return prompts


def _read(name: str, *, option: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {name}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {name}: byte {error.start} is not UTF-8. Convert the file to UTF-8."
        ) from None
