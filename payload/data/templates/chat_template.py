"""A model's chat template: messages in, the text that the model was trained on out.

A template is a Jinja program that came with somebody's model. It runs in Jinja's sandbox, with the
functions that transformers gives it, in a process that has little memory and time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import ConfigError, DataError
from payload.core.links import inside_folder
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.data.templates.template_process import (
    TemplateFailedError,
    TemplateHopelessError,
    TemplateProcess,
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
    "Use a model that was trained for chats, name a template with --chat-template (prepare), or "
    "leave --chat out (generate)."
)

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""

Span = tuple[int, int]
"""Characters of a text: the first one, and the one behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A template that was read and compiled."""

    where: str
    source: str
    """The Jinja program."""
    process: TemplateProcess

    def sha256(self) -> str:
        """Return the program's hash."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def how_trained(self) -> str:
        """Say how the assistant's part of a text is found."""
        if self.process.is_marked:
            return "which marks the assistant's part with {% generation %}"
        return "whose text grows with every message: what an answer adds is trained"

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the conversation as text, which ends where the assistant's answer begins.

        Raises DataError with the template's own words when it refuses these messages.
        """
        text: str = self._ask(
            "render", messages=_plain(messages), add_generation_prompt=add_generation_prompt
        )
        return text

    def render_for_training(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the conversation as text, and the parts of it that the assistant wrote.

        They are those in the template's `{% generation %}` blocks. A template without such blocks
        is rendered up to and including each answer: what the answer adds is its part. Raises
        DataError also where that rewrites what came before.
        """
        text, spans = self._ask("render_for_training", messages=_plain(messages))
        return text, [(start, end) for start, end in spans]

    def _ask(self, what: str, **request: object) -> Any:
        try:
            return self.process.ask(what, **request)
        except TemplateHopelessError as error:
            # No DataError: the rows that follow would cost as much, so none of them is left out.
            raise ConfigError(f"{self.where}: {one_line(error)} {_FIX}") from None
        except TemplateFailedError as error:
            raise DataError(f"{self.where}: {one_line(error)} {_FIX}") from None


def templates_of(files: Mapping[str, bytes]) -> list[str]:
    """Return the chat templates in a tokenizer's files, the one that counts first."""
    config = json.loads(files.get(CONFIG_FILE, b"{}"))
    found = [files[TEMPLATE_FILE].decode("utf-8")] if TEMPLATE_FILE in files else []
    other = _default(config.get("chat_template")) if isinstance(config, dict) else None
    return [*found, other] if isinstance(other, str) else found


def _default(given: object) -> object:
    """Return the template that transformers takes where a model has several by name."""
    if not isinstance(given, list):
        return given
    named = [each for each in given if isinstance(each, dict) and each.get("name") == "default"]
    return named[-1].get("template") if named else None


def read_chat_template(folder: Path) -> ChatTemplate:
    """Return the template of the tokenizer in `folder`.

    Raises DataError when there is none, or when it is damaged.
    """
    config = read_tokenizer_config(folder)
    path = folder / TEMPLATE_FILE
    try:
        text: object = read_bytes(inside_folder(path)).decode("utf-8")
    except FileNotFoundError:
        text = _default(config.get("chat_template"))
        path = folder / CONFIG_FILE
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)}) {_FIX}") from None
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
        raise DataError(f"{path}: cannot be read ({one_line(error)}) Name a Jinja file.") from None
    return _chat_template(text, path, read_tokenizer_config(tokenizer), tokenizer=tokenizer)


def _chat_template(
    text: str, path: Path, config: Mapping[str, Any], *, tokenizer: Path
) -> ChatTemplate:
    known = named_tokens(config)
    try:
        process = TemplateProcess(text, special_tokens(config))
    except TemplateFailedError as error:
        raise DataError(f"{path}: is no template: {one_line(error)} {_FIX}") from None
    unknown = sorted(set(process.named_tokens) - set(known))
    if unknown:
        # transformers may have one of its own for this kind of tokenizer; here it would be empty.
        raise DataError(
            f"{path}: it writes {unknown[0]}, which neither {CONFIG_FILE} nor {MAP_FILE} in "
            f"{tokenizer} names. Add it to {CONFIG_FILE}, as null where the model has none."
        )
    return ChatTemplate(where=str(path), source=text, process=process)


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [dict(message) for message in messages]
