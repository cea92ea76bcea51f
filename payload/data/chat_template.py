"""A model's chat template: messages in, the text that the model was trained on out.

A template is a Jinja program that came with somebody's model, so it runs in Jinja's sandbox, with
the functions that transformers gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from payload.errors import DataError
from payload.untrusted import one_line, parse_json, read_bytes

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_FIX = "Use a model that was trained for chats, or generate without --chat."
# transformers writes 1e30 as an integer where a tokenizer has no limit: more than 64 bits.
_NO_LIMIT = re.compile(rb'("model_max_length"\s*:\s*)[0-9]{20,40}(?![0-9])')
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A template that was read, with the special tokens that it may name."""

    where: str
    template: Template
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the conversation as text, which ends where the assistant's answer begins.

        Raises DataError with the template's own words when it refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            return self.template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
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
    return ChatTemplate(where=str(path), template=_compiled(text, path), tokens=_tokens(config))


def _compiled(text: str, path: Path) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(text)
    except (TemplateError, RecursionError) as error:
        raise DataError(f"{path}: is no template: {one_line(error)} {_FIX}") from None


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


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """Return JSON as transformers' filter does: without HTML's escapes, which Jinja's own has."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)
