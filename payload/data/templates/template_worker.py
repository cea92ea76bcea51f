"""Renders one chat template, for the process that started it.

A template is a program that came with somebody's model. Jinja's sandbox keeps it from files and
from Python's insides, and not from a sum that never ends or a text that fills the memory. So it
runs in a process of its own, with limits. That process stands alone: it is started as a file, and
imports nothing of ours. Requests and answers are JSON lines on stdin and stdout: the first request
has the template, each other one a conversation. An answer has `error` where the template failed.
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
# A system prompt of the template's own, and marks around every message.
_OWN_CHARS = 2**20
_CHARS_PER_CHAR = 32

Messages = Sequence[Mapping[str, Any]]


class TemplateFailureError(Exception):
    """The template cannot be used for this conversation; says why."""


def main() -> None:
    """Compile the template of the first request, then render until there are no more.

    Arguments: the processor time for a request in seconds, and the memory in bytes.
    """
    cpu_seconds, memory_bytes = map(int, sys.argv[1:])
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, most))
    # Ctrl-C is for the parent, whose end closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = Program()
    answers: dict[str, Callable[..., Any]] = {
        "compile": program.compile,
        "render": program.render,
        "render_for_training": program.render_for_training,
    }
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            # Without a handler the signal ends this process, also in the middle of one operation.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            answer = {"answer": answers[request.pop("do")](**request)}
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
    """A compiled template, with the special tokens that it may name."""

    def __init__(self) -> None:
        self._marks = ("", "")
        self._is_marked = False
        self._now = datetime.datetime.now()

    def compile(self, source: str, tokens: Mapping[str, str]) -> dict[str, Any]:
        """Take the Jinja program, and what `bos_token` and others are.

        Returns whether it has `{% generation %}` blocks, and the names like `bos_token` in it.
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
        # No other extension here makes such blocks.
        self._is_marked = any(
            block.find(ExtensionAttribute) for block in parsed.find_all(CallBlock)
        )
        names = find_undeclared_variables(parsed)
        named = sorted(name for name in names if name.endswith("_token"))
        return {"is_marked": self._is_marked, "named_tokens": named}

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the conversation as text."""
        self._now = datetime.datetime.now()
        return self._text(messages, add_generation_prompt=add_generation_prompt)

    def render_for_training(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the parts of it that the assistant wrote.

        They are what is in `{% generation %}`; without such blocks, what each answer adds.
        """
        self._now = datetime.datetime.now()
        whole = self._text(messages, add_generation_prompt=False)
        return whole, (self._marked if self._is_marked else self._added)(messages, whole)

    def _marked(self, messages: Messages, whole: str) -> list[tuple[int, int]]:
        # Nobody's message can have the marks: they are others every time.
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
                "it changes what its {% generation %} blocks made, or has one in another, so the "
                "assistant's part cannot be told from the text. Write them out as they are."
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
                    f"it renders message {number + 1} of {len(messages)} otherwise "
                    "when others follow, so the assistant's part cannot be told from the text. "
                    "Put {% generation %} and {% endgeneration %} around that part in the "
                    "template, and name the file with --chat-template."
                )
            spans.append((len(before), len(after)))
        return spans

    def _text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        text = self._template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
        )
        given = sum(len(str(value)) for message in messages for value in message.values())
        if len(text) > min(_MAX_CHARS, _OWN_CHARS + _CHARS_PER_CHAR * given):
            raise TemplateFailureError(
                f"it makes {len(text):,} characters of a conversation of {given:,}."
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateFailureError("its text has half of a surrogate pair.") from None
        return text


def _generation_extension(marks: Callable[[], tuple[str, str]]) -> type[Extension]:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """transformers' `{% generation %}` block, around what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - Jinja wants it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            begin, end = marks()
            return begin + caller() + end

    return Generation


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """Return JSON as transformers' filter does: without HTML's escapes, which Jinja's own has."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


if __name__ == "__main__":
    main()
