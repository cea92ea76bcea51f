"""A model's chat template: messages in, the text that the model was trained on out.

A template is a Jinja program that came with somebody's model, so it runs in Jinja's sandbox, with
the functions that transformers gives it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from payload.errors import DataError
from payload.untrusted import one_line, parse_json, read_bytes

if TYPE_CHECKING:
    from jinja2 import Template

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
    """A template that was read, with the special tokens that it may name."""

    where: str
    source: str
    """The Jinja program."""
    template: Template
    tokens: Mapping[str, str]
    marks: tuple[str, str]
    """Marks that rendering puts around a `{% generation %}` block."""

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
        marked = self._marked(messages, add_generation_prompt=add_generation_prompt)
        return marked.replace(self.marks[0], "").replace(self.marks[1], "")

    def render_for_training(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the conversation as text, and the parts of it that the assistant wrote.

        They are those in the template's `{% generation %}` blocks. A template without such blocks
        is rendered up to and including each answer: what the answer adds is its part. Raises
        DataError also where that rewrites what came before.
        """
        if _GENERATION.search(self.source):
            return self._marked_spans(messages)
        return self._added_spans(messages)

    def _marked_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        marked = self._marked(messages, add_generation_prompt=False)
        pieces: list[str] = []
        spans: list[Span] = []
        length = 0
        for part in re.split(f"({self.marks[0]}|{self.marks[1]})", marked):
            if part == self.marks[0]:
                spans.append((length, length))
            elif part == self.marks[1]:
                spans[-1] = (spans[-1][0], length)
            else:
                pieces.append(part)
                length += len(part)
        return "".join(pieces), spans

    def _added_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        whole = self.render(messages, add_generation_prompt=False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], add_generation_prompt=True)
            after = self.render(messages[: number + 1], add_generation_prompt=False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    f"{self.where}: it renders message {number + 1} of {len(messages)} otherwise "
                    "when others follow, so the assistant's part cannot be told from the text. "
                    "Put {% generation %} and {% endgeneration %} around that part in the "
                    "template, and name the file with --chat-template."
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _marked(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
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
    # Nobody's message can have them: they are another pair in every process.
    name = secrets.token_hex(8)
    marks = (f"\x02{name}\x02", f"\x03{name}\x03")
    compiled = _compiled(text, path, marks)
    return ChatTemplate(
        where=str(path), source=text, template=compiled, tokens=_tokens(config), marks=marks
    )


def _compiled(text: str, path: Path, marks: tuple[str, str]) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """transformers' `{% generation %}` block, around what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - Jinja wants it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            return marks[0] + caller() + marks[1]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
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
