"""A model's chat template: messages in, the text that the model was trained on out.

A template is a Jinja program that came with somebody's model. It runs in Jinja's sandbox, with the
functions that transformers gives it, in a process that has little memory and time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.data.template_process import TemplateFailedError, TemplateProcess
from payload.errors import DataError
from payload.untrusted import one_line, parse_json, read_bytes

TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_FIX = (
    "Use a model that was trained for chats, name a template with --chat-template (prepare), or "
    "leave --chat out (generate)."
)
# transformers writes 1e30 as an integer where a tokenizer has no limit: more than 64 bits.
_NO_LIMIT = re.compile(rb'("model_max_length"\s*:\s*)[0-9]{20,40}(?![0-9])')
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

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
        if _GENERATION.search(self.source):
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
        marked = _GENERATION.search(self.source) is not None
        text, spans = self._ask("render_for_training", messages=_plain(messages), marked=marked)
        return text, [(start, end) for start, end in spans]

    def _ask(self, what: str, **request: object) -> Any:
        try:
            return self.process.ask(what, **request)
        except TemplateFailedError as error:
            raise DataError(f"{self.where}: {one_line(error)} {_FIX}") from None


def read_chat_template(folder: Path) -> ChatTemplate:
    """Return the template of the tokenizer in `folder`.

    Raises DataError when there is none, or when it is damaged.
    """
    config = _read_config(folder / _CONFIG_FILE)
    path = folder / TEMPLATE_FILE
    try:
        text: object = read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        text = config.get("chat_template")
        path = folder / _CONFIG_FILE
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)}) {_FIX}") from None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{folder}: the model has no chat template ({TEMPLATE_FILE}). {_FIX}")
    return _chat_template(text, path, config)


def load_chat_template(path: Path, *, tokenizer: Path) -> ChatTemplate:
    """Return the template in the file at `path`, with the special tokens of another folder.

    Raises DataError.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)}) Name a Jinja file.") from None
    return _chat_template(text, path, _read_config(tokenizer / _CONFIG_FILE))


def _chat_template(text: str, path: Path, config: Mapping[str, Any]) -> ChatTemplate:
    try:
        process = TemplateProcess(text, _tokens(config))
    except TemplateFailedError as error:
        raise DataError(f"{path}: is no template: {one_line(error)} {_FIX}") from None
    return ChatTemplate(where=str(path), source=text, process=process)


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [dict(message) for message in messages]


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. {_FIX}") from None
    content = _NO_LIMIT.sub(rb"\1null", content)
    raw = parse_json(content, where=str(path), fix=_FIX, error=DataError)
    return raw if isinstance(raw, Mapping) else {}
