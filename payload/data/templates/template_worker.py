"""Worker process that renders one chat template for its parent.

A template is a program from the model's author. Jinja's sandbox blocks access to files and to
Python's internals, but not an endless loop or a text that fills the memory. So it runs in a
separate process with limits. This file is run as a script and has no imports from the project.

Requests and responses are JSON lines on stdin and stdout. The first request has the template, and
every later request has a conversation. A response has `error` if the template failed.
"""

from __future__ import annotations

import datetime
import json
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension

_MAX_CHARS = 64 * 2**20
# Allowance for the template's system prompt and for delimiters around every message.
_TEMPLATE_CHARS = 2**20
_CHARS_PER_CHAR = 32

Messages = Sequence[Mapping[str, Any]]


class TemplateFailureError(Exception):
    """The template cannot be used for this conversation; the text gives the reason."""


def main() -> None:
    """Compile the template of the first request, then serve requests until stdin is closed.

    Arguments: processor time limit of a request in seconds, memory limit in bytes.
    """
    cpu_seconds, memory_bytes = map(int, sys.argv[1:])
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, most))
    # Ctrl-C is handled by the parent; stdin is closed when the parent ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = Program()
    methods: dict[str, Callable[..., Any]] = {
        "compile": program.compile,
        "render": program.render,
        "render_for_training": program.render_for_training,
    }
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            # SIGPROF has no handler, so it ends this process even in the middle of one operation.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = {"answer": methods[request.pop("do")](**request)}
            content = json.dumps(answer)
        except MemoryError:
            content = json.dumps({"error": f"it needs over {memory_bytes >> 20} MiB of memory."})
        except Exception as error:
            reason = str(error) or type(error).__name__
            content = json.dumps({"error": reason[:2000]})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(content + "\n")
        sys.stdout.flush()


class Program:
    """A compiled template, with the special tokens that it can use."""

    def __init__(self) -> None:
        self._marks = ("", "")
        self._is_marked = False
        self._now = datetime.datetime.now()

    def compile(self, source: str, tokens: Mapping[str, str]) -> dict[str, Any]:
        """Compile the Jinja program `source`; `tokens` holds `bos_token` and other special tokens.

        Returns whether the template has `{% generation %}` blocks, and the token names that it
        uses.
        """
        from jinja2.ext import loopcontrols
        from jinja2.meta import find_undeclared_variables
        from jinja2.nodes import CallBlock, ExtensionAttribute
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _generation_extension(lambda: self._marks)],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: self._now.strftime(form)
        self._template: Template = environment.from_string(source)
        self._tokens = tokens
        parsed = environment.parse(source)
        # Only transformers' extension creates such blocks.
        self._is_marked = any(
            block.find(ExtensionAttribute) for block in parsed.find_all(CallBlock)
        )
        names = find_undeclared_variables(parsed)
        named = sorted(name for name in names if name.endswith("_token"))
        return {"is_marked": self._is_marked, "named_tokens": named}

    def render(
        self, messages: Messages, add_generation_prompt: bool, tools: Any, variables: Any
    ) -> str:
        """Return the conversation as text."""
        self._now = datetime.datetime.now()
        return self._text(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    def render_for_training(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans that the assistant wrote.

        The spans are the `{% generation %}` blocks, or without these the text that each answer
        adds.
        """
        self._now = datetime.datetime.now()
        whole = self._text(messages, add_generation_prompt=False)
        return whole, (self._marked if self._is_marked else self._added)(messages, whole)

    def _marked(self, messages: Messages, whole: str) -> list[tuple[int, int]]:
        # The delimiters are random, so that no message can contain them.
        name = secrets.token_hex(8)
        begin, end = self._marks = (f"\x02{name}\x02", f"\x03{name}\x03")
        try:
            text = self._text(messages, add_generation_prompt=False)
        finally:
            self._marks = ("", "")
        spans, length = [], 0
        first, *parts = text.split(begin)
        kept = [first]
        for part in parts:
            length += len(kept[-1])
            inner, *after = part.split(end)
            spans.append((length, length + len(inner)))
            kept.append("".join((inner, *after)))
        if "".join(kept) != whole or any(part.count(end) != 1 for part in parts):
            raise TemplateFailureError(
                "it changes the text of its {% generation %} blocks, or nests them, so the "
                "assistant's text cannot be located. Output the blocks unchanged."
            )
        return spans

    def _added(self, messages: Messages, whole: str) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], add_generation_prompt=True)
            after = self._text(messages[: number + 1], add_generation_prompt=False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise TemplateFailureError(
                    f"it renders message {number + 1} of {len(messages)} differently when more "
                    "messages follow, so the assistant's text cannot be located. Put {% generation "
                    "%} and {% endgeneration %} around that text in the template, and pass the "
                    "file with --chat-template."
                )
            spans.append((len(before), len(after)))
        return spans

    def _text(self, messages: Messages, *, add_generation_prompt: bool, **more: Any) -> str:
        text = self._template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **{**self._tokens, **more},
        )
        given = sum(len(str(value)) for message in messages for value in message.values())
        if len(text) > min(_MAX_CHARS, _TEMPLATE_CHARS + _CHARS_PER_CHAR * given):
            raise TemplateFailureError(
                f"it renders {given:,} characters of messages to {len(text):,} characters."
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateFailureError("its text has a lone surrogate.") from None
        return text


def _generation_extension(marks: Callable[[], tuple[str, str]]) -> type[Extension]:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The `{% generation %}` block of transformers, around the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            begin, end = marks()
            return begin + caller() + end

    return Generation


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """Return JSON like transformers' filter: Jinja's filter would escape HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


if __name__ == "__main__":
    main()
