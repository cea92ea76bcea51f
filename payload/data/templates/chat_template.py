"""A model's chat template: renders messages to the text format that the model was trained on.

A template is a Jinja program from the model's author, and is not trusted. It runs in Jinja's
sandbox, with the functions that transformers provides, in a process with limited memory and time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import ConfigError, DataError
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.data.rows.conversation import Message
from payload.data.templates.template_process import (
    TemplateFailedError,
    TemplateProcess,
    TemplateUnusableError,
)
from payload.data.tokenizers.special_tokens import (
    CONFIG_FILE,
    MAP_FILE,
    named_tokens,
    read_tokenizer_config,
    special_tokens,
)

TEMPLATE_FILE = "chat_template.jinja"
_FIX = (
    "Use a model that was trained for chat, set a template with --chat-template (prepare), or "
    "leave --chat out (generate)."
)

Span = tuple[int, int]
"""Range of characters of a text: the first one, and the end (exclusive)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A template that was read and compiled."""

    where: str
    source: str
    """Text of the Jinja program."""
    process: TemplateProcess

    def sha256(self) -> str:
        """Return the hash of the program."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def how_trained(self) -> str:
        """Describe how the trained text is determined."""
        if self.process.is_marked:
            return "trained text: its {% generation %} blocks"
        return "trained text: the text that each answer adds"

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text, up to where the assistant's answer begins.

        Raises DataError with the template's message if it rejects the conversation.
        """
        text: str = self._call(
            "render",
            messages=_as_dicts(messages),
            add_generation_prompt=add_generation_prompt,
            tools=[dict(tool) for tool in tools] or None,
            variables=dict(variables or {}),
        )
        return text

    def render_for_training(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the conversation as text, and the spans that the assistant wrote.

        The spans are the template's `{% generation %}` blocks. A template without such blocks is
        rendered up to and including each answer; the text that an answer adds is its span. Raises
        DataError if an answer changes the text before it.
        """
        text, spans = self._call("render_for_training", messages=_as_dicts(messages))
        return text, [(start, end) for start, end in spans]

    def _call(self, method: str, **request: object) -> Any:
        try:
            return self.process.call(method, **request)
        except TemplateUnusableError as error:
            # Not a DataError, for which the row would be skipped: the next rows would fail at the
            # same cost.
            raise ConfigError(f"{self.where}: {one_line(error)} {_FIX}") from None
        except TemplateFailedError as error:
            raise DataError(f"{self.where}: {one_line(error)} {_FIX}") from None


def templates_of(files: Mapping[str, bytes]) -> list[str]:
    """Return the chat templates in a tokenizer's files; the first one takes precedence."""
    config = json.loads(files.get(CONFIG_FILE, b"{}"))
    found = [files[TEMPLATE_FILE].decode("utf-8")] if TEMPLATE_FILE in files else []
    other = _default(config.get("chat_template")) if isinstance(config, dict) else None
    return [*found, other] if isinstance(other, str) else found


def _default(given: object) -> object:
    """If a model has several named templates, return the one that transformers uses by default."""
    if not isinstance(given, list):
        return given
    named = [each for each in given if isinstance(each, dict) and each.get("name") == "default"]
    return named[-1].get("template") if named else None


def read_chat_template(folder: Path) -> ChatTemplate:
    """Return the template of the tokenizer in `folder`.

    Raises DataError if the template is missing or damaged.
    """
    config = read_tokenizer_config(folder)
    path = folder / TEMPLATE_FILE
    try:
        text: object = read_bytes(inside_folder(path)).decode("utf-8")
    except FileNotFoundError:
        text = _default(config.get("chat_template"))
        path = folder / CONFIG_FILE
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error).rstrip('.')}). {_FIX}") from None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{folder}: the model has no chat template ({TEMPLATE_FILE}). {_FIX}")
    return _chat_template(text, path, config, tokenizer=folder)


def load_chat_template(path: Path, *, tokenizer: Path) -> ChatTemplate:
    """Return the template in the file at `path`, with the special tokens of another folder.

    Raises DataError.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({one_line(error).rstrip('.')}). Use a Jinja file."
        ) from None
    return _chat_template(text, path, read_tokenizer_config(tokenizer), tokenizer=tokenizer)


def _chat_template(
    text: str, path: Path, config: Mapping[str, Any], *, tokenizer: Path
) -> ChatTemplate:
    known = named_tokens(config)
    try:
        process = TemplateProcess(text, special_tokens(config))
    except TemplateFailedError as error:
        raise DataError(f"{path}: is not a valid template: {one_line(error)} {_FIX}") from None
    unknown = sorted(set(process.named_tokens) - set(known))
    if unknown:
        # transformers may have a default for this kind of tokenizer; in our rendering the token
        # would be empty.
        raise DataError(
            f"{path}: it uses {unknown[0]}, which is missing in {CONFIG_FILE} and {MAP_FILE} of "
            f"{tokenizer}. Add it to {CONFIG_FILE}, or null for a model without this token."
        )
    return ChatTemplate(where=str(path), source=text, process=process)


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]
