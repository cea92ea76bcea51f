"""A model's chat template, which renders messages to the text format that the model knows.

A template is a Jinja program from the model's author, and is not trusted. It runs in Jinja's
sandbox, in a process with limited memory and time. It has the functions that transformers provides
to templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from payload.core.errors import ConfigError, DataError
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.data.rows.conversation import Message
from payload.data.templates.control_tokens import ControlTokens
from payload.data.templates.stop_tokens import KnownTokens, known_tokens
from payload.data.templates.template_files import (
    NO_TEMPLATE_FIX,
    TEMPLATE_FILE,
    chosen_template,
    find_template,
    named_templates,
    template_path,
)
from payload.data.templates.template_process import (
    TemplateFailedError,
    TemplateProcess,
    TemplateUnusableError,
    encode,
)
from payload.data.templates.turn_end import Part, TurnEnd, turn_ends
from payload.data.tokenizers.special_tokens import (
    CONFIG_FILE,
    MAP_FILE,
    class_tokens,
    has_known_class,
    named_tokens,
    read_tokenizer_config,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A template that was read and compiled."""

    where: str
    source: str
    """Text of the Jinja program."""
    process: TemplateProcess
    tokenizer: Path
    """Folder of the tokenizer. The files in the folder define the stop tokens and special
    tokens."""
    _found: dict[str, Any] = field(default_factory=dict)
    """Cached results of `known_tokens`, `control_tokens` and `turn_ends`."""

    def sha256(self) -> str:
        """Return the hash of the program."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def tokens_sha256(self) -> str:
        """Return a hash of the tokens that affect the rendered text and the trained spans."""
        config = read_tokenizer_config(self.tokenizer)
        named = {**class_tokens(config), **named_tokens(config)}
        found = [asdict(self.known_tokens()), named]
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    def how_trained(self) -> str:
        """Return a line about the text that the model is trained on."""
        if self.process.is_marked:
            return "trained on: the template's {% generation %} blocks"
        return "trained on: the text that each answer adds to its prompt"

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the same text as `apply_chat_template` of transformers.

        If the template rejects the conversation, raises DataError with the template's message.
        """
        (found,) = self.parts(
            messages,
            [(len(messages), add_generation_prompt)],
            tools=tools,
            documents=documents,
            variables=variables or {},
        )
        if "error" in found:
            raise self.error(found["error"])
        return str(found["text"])

    def parts(
        self,
        messages: Sequence[Message],
        parts: Sequence[Part],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
        with_blocks: bool = False,
    ) -> list[dict[str, Any]]:
        """Render parts of a conversation. Return a `text` or an `error` for each part.

        Raises DataError if the process fails.
        """
        found: list[dict[str, Any]] = self._call(
            "render",
            messages=[dict(message) for message in messages],
            tools=tools,
            documents=documents,
            variables=variables,
            parts=parts,
            with_blocks=with_blocks,
        )
        return found

    def request(
        self,
        messages: Sequence[Message],
        parts: Sequence[Part],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        with_blocks: bool,
    ) -> str:
        """Return the request that `parts` sends to the template process for these arguments."""
        return encode(
            "render",
            messages=messages,
            tools=tools,
            documents=documents,
            variables=variables,
            parts=parts,
            with_blocks=with_blocks,
        )

    def error(self, reason: str) -> DataError:
        """Return the error for a conversation that the template rejects."""
        return DataError(f"{self.where}: {one_line(reason)} {NO_TEMPLATE_FIX}")

    def known_tokens(self) -> KnownTokens:
        """Return the stop tokens and special tokens of the tokenizer. Raises DataError."""
        if "tokens" not in self._found:
            self._found["tokens"] = known_tokens(self.tokenizer)
        tokens: KnownTokens = self._found["tokens"]
        return tokens

    def control_tokens(self) -> ControlTokens:
        """Return an object that finds special tokens in the values of rows. Raises DataError."""
        if "control" not in self._found:
            self._found["control"] = ControlTokens(self.known_tokens().special)
        control: ControlTokens = self._found["control"]
        return control

    def turn_ends(self, variables: Mapping[str, Any]) -> Mapping[str, TurnEnd]:
        """Return how the assistant's turns end, for each role that can follow. Raises DataError."""
        key = json.dumps(variables, sort_keys=True, default=str) if variables else ""
        if key not in self._found:

            def render(parts: Sequence[Part], **given: Any) -> Sequence[str | None]:
                try:
                    found = self.parts(**given, parts=parts, variables=variables)
                except DataError:
                    return [None] * len(parts)
                return [each.get("text") for each in found]

            self._found[key] = turn_ends(render, self.known_tokens())
        ends: Mapping[str, TurnEnd] = self._found[key]
        return ends

    def require_stop(self, variables: Mapping[str, Any]) -> None:
        """Raise ConfigError if the template writes no stop token after the assistant's turns."""
        ends = self.turn_ends(variables).values()
        if not any(end.stops for end in ends) and self._is_rendered(variables):
            raise ConfigError(
                f"{self.where}: no stop token follows the assistant's turns, so the model would "
                "not learn to stop. Add {{ eos_token }} after the assistant's text in the "
                "template, and pass the file with --chat-template."
            )

    def leaves_out_calls(self) -> bool:
        """Return True if the template renders messages with tool calls, but without the calls."""
        if "calls" not in self._found:
            call = {"name": "qux5call", "arguments": {}}
            answer: dict[str, Any] = {"role": "assistant", "content": "qux"}
            answer["tool_calls"] = [{"id": "qux5id789", "type": "function", "function": call}]
            messages = [{"role": "user", "content": "qux"}, answer]
            try:
                (found,) = self.parts(messages, [(2, False)], variables={})
            except DataError:
                found = {}
            self._found["calls"] = "qux5call" not in found.get("text", "qux5call")
        return bool(self._found["calls"])

    def _is_rendered(self, variables: Mapping[str, Any]) -> bool:
        """Return True if the rendered text of a plain conversation contains the answer."""
        messages = [{"role": role, "content": f"qux {role}"} for role in ("user", "assistant")]
        try:
            (found,) = self.parts(messages, [(2, False)], variables=variables)
        except DataError:
            return False
        return "qux assistant" in found.get("text", "")

    def _call(self, method: str, **request: object) -> Any:
        try:
            return self.process.call(method, **request)
        except TemplateUnusableError as error:
            # A DataError would skip only this row, and the next rows would fail at the same cost.
            raise ConfigError(f"{self.where}: {one_line(error)} {NO_TEMPLATE_FIX}") from None
        except TemplateFailedError as error:
            raise DataError(f"{self.where}: {one_line(error)} {NO_TEMPLATE_FIX}") from None


def templates_of(files: Mapping[str, bytes]) -> list[str]:
    """Return the chat templates in a tokenizer's files; the first template takes precedence."""
    config = json.loads(files.get(CONFIG_FILE, b"{}"))
    found = [files[TEMPLATE_FILE].decode("utf-8")] if TEMPLATE_FILE in files else []
    given = config.get("chat_template") if isinstance(config, dict) else None
    other = chosen_template(named_templates(given))
    return found if other is None else [*found, other]


def read_chat_template(folder: Path) -> ChatTemplate:
    """Return the template of the tokenizer in `folder`.

    Raises DataError if the template is missing or damaged.
    """
    config = read_tokenizer_config(folder)
    found = find_template(folder, config)
    if found is None:
        raise DataError(
            f"{folder}: the model has no chat template ({TEMPLATE_FILE}). {NO_TEMPLATE_FIX}"
        )
    path, text = found
    return _chat_template(text, path, config, tokenizer=folder)


def load_chat_template(path: Path, *, tokenizer: Path) -> ChatTemplate:
    """Return the template in the file `path`. It can use the special tokens of `tokenizer`.

    `path` can be `trl:NAME`. Raises DataError.
    """
    path = template_path(path)
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
    known = {**class_tokens(config), **named_tokens(config)}
    tokens = {name: each for name, each in known.items() if each is not None}
    try:
        process = TemplateProcess(text, tokens)
    except TemplateFailedError as error:
        raise DataError(
            f"{path}: is not a valid template: {one_line(error)} {NO_TEMPLATE_FIX}"
        ) from None
    unknown = sorted(set(process.named_tokens) - set(known))
    if unknown and not has_known_class(config):
        # transformers may have a default for this class of tokenizer; in our rendering the token
        # would be empty.
        raise DataError(
            f"{path}: the template uses {unknown[0]}, which is missing in {CONFIG_FILE} and "
            f"{MAP_FILE} of {tokenizer}. Add this token to {CONFIG_FILE}, or set it to null for a "
            "model without this token."
        )
    return ChatTemplate(where=str(path), source=text, process=process, tokenizer=tokenizer)
