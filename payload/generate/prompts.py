"""Reads the prompts of a command, encodes them, and groups them into batches."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.core.errors import ConfigError
from payload.core.printable_text import shown
from payload.core.validation.json_text import parse_json
from payload.data.rows.conversation import Message
from payload.generate.arguments import DEFAULT_PROMPT
from payload.generate.codec import Codec
from payload.train.models.base import CausalLM

Prompt = str | list[Message]
"""A text, or the messages of a conversation, for --chat."""
_ROWS = 16
_SPREAD_TOKENS = 64


def has_prompts(arguments: Namespace) -> bool:
    """Return True if the command line has prompts."""
    given = (arguments.prompt, arguments.prompt_file, arguments.prompts_file)
    return any(each is not None for each in given)


def read_prompts(arguments: Namespace) -> list[Prompt]:
    """Return the prompts of the command line. Raises ConfigError."""
    if arguments.prompts_file is not None:
        return _read_prompts_file(arguments.prompts_file, is_chat=arguments.chat)
    if arguments.prompt_file is not None:
        return [_read(arguments.prompt_file, option="--prompt-file")]
    return [DEFAULT_PROMPT if arguments.prompt is None else str(arguments.prompt)]


def read_tools(name: str | None) -> list[Mapping[str, Any]]:
    """Return the tools in a JSON file: a list of functions, each with or without OpenAI's wrapper
    object.

    Raises ConfigError.
    """
    if name is None:
        return []
    fix = (
        'Write a list such as [{"type": "function", "function": {"name": "add", "parameters": '
        '{"type": "object", "properties": {"a": {"type": "number"}}}}}].'
    )
    where = f"--tools {name}"
    given = parse_json(_read(name, option="--tools"), where=where, fix=fix)
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{where}: {shown(given)} is not a list of one or more tools. {fix}")
    found: list[Mapping[str, Any]] = []
    for number, each in enumerate(given):
        tool = {"type": "function", "function": each} if _is_function(each) else each
        if not isinstance(tool, dict) or not _is_function(tool.get("function")):
            raise ConfigError(f"{where}: tool {number + 1}, {shown(each)}, has no name. {fix}")
        found.append(tool)
    return found


def _is_function(given: object) -> bool:
    return isinstance(given, dict) and isinstance(given.get("name"), str)


def encode(
    prompt: str,
    *,
    codec: Codec,
    model: CausalLM,
    is_marked: bool,
    note: Callable[[str], None],
) -> list[int]:
    """Return the prompt's tokens. An empty prompt becomes a begin-of-text token.

    `is_marked` is True for a rendered chat template, which contains its special tokens. Calls
    `note` if the prompt is longer than the model's context. Raises ConfigError for a token outside
    of the model's vocabulary.
    """
    encode_text = codec.encode_marked if is_marked else codec.encode
    tokens = encode_text(prompt) or [codec.begin_of_text]
    largest, size = max(tokens), model.spec.vocab_size
    if largest >= size:
        raise ConfigError(
            f"the prompt has token {largest}, but the model's vocabulary ends at {size - 1}: "
            f"the model was trained with another tokenizer than {codec.name}. Copy the model's "
            "tokenizer next to its weights."
        )
    context = model.spec.context()
    if len(tokens) > context:
        note(f"note: the prompt has {len(tokens)} tokens; the model reads the last {context}")
    return tokens


def batches(
    prompts: Sequence[Sequence[int]], *, samples: int, model: CausalLM
) -> Iterator[list[int]]:
    """Yield the indices of prompts that are continued together. Such prompts have similar lengths.

    The length of a prompt that is longer than the context determines which part of the prompt is
    read. So such a prompt is batched only with prompts of equal length.
    """
    context = model.spec.context()
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batch: list[int] = []
    for index in order:
        length = len(prompts[index])
        if batch:
            shortest = len(prompts[batch[0]])
            is_long = length > context and length != shortest
            is_full = (len(batch) + 1) * samples > _ROWS
            if is_full or is_long or length - shortest > _SPREAD_TOKENS:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def _read_prompts_file(name: str, *, is_chat: bool) -> list[Prompt]:
    """Return the prompts of a file, one per line: text, or JSON in a .jsonl file."""
    text = _read(name, option="--prompts-file")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts-file {name}: no prompts. Write one prompt per line.")
    if not name.endswith(".jsonl"):
        return [line.removesuffix("\r") for _, line in lines]
    fix = 'Each line must be a string or an object such as {"prompt": "Once"}.'
    if is_chat:
        fix = (
            'Each line must be a string, or an object with "prompt" or with "messages", such as '
            '{"messages": [{"role": "user", "content": "Hello"}]}.'
        )
    prompts: list[Prompt] = []
    for number, line in lines:
        where = f"--prompts-file {name}: line {number}"
        raw = parse_json(line, where=where, fix=fix)
        prompt = raw.get("prompt") if isinstance(raw, dict) else raw
        if is_chat and isinstance(raw, dict) and _are_messages(raw.get("messages")):
            prompts.append(raw["messages"])
            continue
        if not isinstance(prompt, str):
            raise ConfigError(f"{where}: {shown(raw)} has no prompt. {fix}")
        prompts.append(prompt)
    return prompts


def _are_messages(given: object) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in given)
    )


def _read(name: str, *, option: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {name}: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {name}: byte {error.start} is not UTF-8. Convert the file to UTF-8."
        ) from None
