"""Worker process that renders one chat template for its parent.

A template is a program from the model's author. Jinja's sandbox blocks access to files and to
Python's internals, but not an endless loop or a text that fills the memory. So the template runs in
a separate process with limits. This file is run as a script and has no imports from the project.

Requests and responses are JSON lines on stdin and stdout. The first request has the template, and
every later request has a conversation. A response has `error` if the template failed. A line with
`batch` has several requests. Each has its own response line and its own limit of processor time.

A template has the same environment as in transformers' `apply_chat_template`. Source: transformers
5.23, `utils/chat_template_utils.py` and `tokenization_utils_base.py`.
"""

from __future__ import annotations

import datetime
import io
import json
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.nodes import Template as Ast

    _Generator = TypeVar("_Generator", bound=CodeGenerator)

_MAX_CHARS = 64 * 2**20
# Allowance for the template's system prompt and for delimiters around every message.
_TEMPLATE_CHARS = 2**20
_CHARS_PER_CHAR = 32
_PIECES = 64
"""The number of pieces of a text after which its length is checked."""
_BUFFER_BYTES = 2**18
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_LOOP_ATTRIBUTES = {"index", "index0", "first", "previtem", "depth", "depth0", "changed", "cycle"}
"""Attributes of Jinja's variable `loop` that do not depend on later items."""

Messages = Sequence[Mapping[str, Any]]


class TemplateFailureError(Exception):
    """The template cannot be used for this conversation; the text gives the reason."""


def main() -> None:
    """Compile the template of the first request, then serve requests until stdin is closed.

    The command line has two arguments: the processor time limit of a request in seconds, and the
    memory limit in bytes.
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
    }

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": methods[request.pop("do")](**request)}
        except MemoryError:
            return {"error": f"it needs over {memory_bytes >> 20} MiB of memory."}
        except Exception as error:
            return {"error": _reason(error)}

    # A large buffer, so that the parent seldom wakes up for a part of a batch.
    output = io.BufferedWriter(io.FileIO(sys.stdout.fileno(), "w", closefd=False), _BUFFER_BYTES)
    for line in sys.stdin.buffer:
        given = json.loads(line)
        for request in given.get("batch", (given,)):
            try:
                # SIGPROF has no handler, so it ends this process even in the middle of one
                # operation.
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
                content = json.dumps(answer(request))
            except MemoryError:
                content = json.dumps(
                    {"error": f"it needs over {memory_bytes >> 20} MiB of memory."}
                )
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            output.write(content.encode() + b"\n")
        output.flush()


class Program:
    """A compiled template, with the special tokens that it can use."""

    def __init__(self) -> None:
        self._marks = ("", "")
        self._is_marked = False
        self._now = datetime.datetime.now()

    def compile(self, source: str, tokens: Mapping[str, str]) -> dict[str, Any]:
        """Compile the Jinja program `source`; `tokens` holds `bos_token` and other special tokens.

        Returns three facts: whether the template has `{% generation %}` blocks, which token names
        it uses, and whether the text of a message never depends on later messages.
        """
        from jinja2.nodes import CallBlock, ExtensionAttribute

        environment = _environment(lambda: self._marks, lambda form: self._now.strftime(form))
        self._template: Template = environment.from_string(source)
        self._tokens = tokens
        parsed = environment.parse(source)
        # Only transformers' extension creates such blocks.
        self._is_marked = any(
            block.find(ExtensionAttribute) for block in parsed.find_all(CallBlock)
        )
        named = sorted(name for name in _undeclared(environment, parsed) if name.endswith("_token"))
        return {
            "is_marked": self._is_marked,
            "named_tokens": named,
            "is_sequential": _is_sequential(parsed),
        }

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        parts: Sequence[tuple[int, bool]],
        with_blocks: bool,
    ) -> list[dict[str, Any]]:
        """Return the text of each part of a conversation.

        A part consists of leading messages, with or without the generation prompt. Each result has
        `text`, or `error` if the template rejects the messages. `with_blocks` adds `blocks`, the
        ranges of characters of the `{% generation %}` blocks.
        """
        self._now = datetime.datetime.now()
        values = {
            **self._tokens,
            **variables,
            "messages": [_as_transformers_passes(message) for message in messages],
            "tools": tools,
            "documents": documents,
        }
        given = sum(map(_num_chars, (messages, tools, documents, variables)))
        return [self._part(values, given, *part, with_blocks=with_blocks) for part in parts]

    def _part(
        self, values: Mapping[str, Any], given: int, count: int, prompt: bool, *, with_blocks: bool
    ) -> dict[str, Any]:
        chosen = {**values, "messages": values["messages"][:count]}
        chosen["add_generation_prompt"] = prompt
        try:
            text = self._text(chosen, given)
            if not with_blocks:
                return {"text": text}
            return {"text": text, "blocks": self._blocks(chosen, given, text)}
        except MemoryError:
            raise
        except Exception as error:
            return {"error": _reason(error)}

    def _blocks(self, values: Mapping[str, Any], given: int, whole: str) -> list[tuple[int, int]]:
        # The delimiters are random, so that no message can contain them.
        name = secrets.token_hex(8)
        begin, end = self._marks = (f"\x02{name}\x02", f"\x03{name}\x03")
        try:
            text = self._text(values, given)
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

    def _text(self, values: Mapping[str, Any], given: int) -> str:
        most, size = min(_MAX_CHARS, _TEMPLATE_CHARS + _CHARS_PER_CHAR * given), 0
        pieces = list[str]()
        output = self._template.root_render_func(self._template.new_context(dict(values)))
        # Counted in the loop, so that an endless output ends at the limit.
        while some := list(islice(output, _PIECES)):
            pieces += some
            size += sum(map(len, some))
            if size > most:
                raise TemplateFailureError(
                    f"its output is too long: over {most:,} characters from {given:,} characters "
                    "of messages."
                )
        text = "".join(pieces)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateFailureError("its text has a lone surrogate.") from None
        return text


def _environment(
    marks: Callable[[], tuple[str, str]], strftime: Callable[[str], str]
) -> Environment:
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import SecurityError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class PlainNamespace(Namespace):
        """Jinja's `namespace` without names that begin with an underscore."""

        def __init__(*given: Any, **named: Any) -> None:
            self, *values = given
            found = dict(*values, **named)
            for name in found:
                PlainNamespace.check_name(name)
            Namespace.__init__(self, found)

        def __setitem__(self, name: str, value: Any) -> None:
            PlainNamespace.check_name(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def check_name(name: object) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace cannot have the attribute {name!r}.")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _generation_extension(marks)],
        optimized=False,
    )
    environment.code_generator_class = _late(CodeGenerator)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": strftime,
        "dict": _Dict(),
        "namespace": PlainNamespace,
    }
    return environment


def _undeclared(environment: Environment, parsed: Ast) -> set[str]:
    """Return the variables that the template reads from outside."""
    from jinja2.meta import TrackingCodeGenerator

    # As jinja2.meta.find_undeclared_variables, but without values at compile time.
    generator = _late(TrackingCodeGenerator)(environment)
    generator.visit(parsed)
    return generator.undeclared_identifiers


def _late(generator: type[_Generator]) -> type[_Generator]:
    """Return a code generator that computes no value at compile time.

    Otherwise, the text of 'x' * 200000000 would be written into the program.
    """
    from jinja2 import nodes
    from jinja2.compiler import Frame

    def to_const(self: CodeGenerator, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return generator._output_child_to_const(self, node, frame, finalize)

    return type("LateCodeGenerator", (generator,), {"_output_child_to_const": to_const})


class _Dict:
    """Jinja's `dict` without access to the Python type."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


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


def _to_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as the filter of transformers does. Jinja's own filter would escape HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:2000]


def _as_transformers_passes(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null values.

    The message's thoughts are copied to each usual key.
    """
    found = {key: value for key, value in message.items() if value is not None}
    thought = next((found[key] for key in _THOUGHT_KEYS if key in found), None)
    if thought is not None:
        found = {"thinking": thought, **found, "reasoning_content": thought}
    return found


def _num_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return 0 if value is None else len(str(value))


def _is_sequential(program: Node) -> bool:
    """Return True if later messages never change the text of a message.

    The result is True only for a program with one loop over the messages. Outside of the loop, the
    program may read only the first message. Inside the loop, it must not read an attribute of
    `loop` that depends on later messages. For other programs the result is False, even if no text
    would change.
    """
    from jinja2 import nodes

    lists = {"messages"}
    num_loops = 0

    def is_list(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            part = node.arg
            start = part.start
            is_rest = part.stop is None and part.step is None
            is_rest &= start is None or (isinstance(start, nodes.Const) and start.value in (0, 1))
            return is_rest and is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in lists

    def is_prompt_only(node: nodes.Node) -> bool:
        return isinstance(node, nodes.And) and any(
            isinstance(each, nodes.Name) and each.name == "add_generation_prompt"
            for each in (node.left, node.right)
        )

    def is_independent(node: nodes.Node, *, loop: bool, nested: bool) -> bool:
        """Return False if `node` can make the text of a message depend on later messages.

        `loop` is True directly inside the loop over the messages, `nested` inside any loop.
        """
        nonlocal num_loops
        if isinstance(node, nodes.Assign) and is_list(node.node):
            if not isinstance(node.target, nodes.Name):
                return False
            lists.add(node.target.name)
            return True
        if isinstance(node, nodes.For):
            is_messages = is_list(node.iter)
            num_loops += is_messages
            if is_messages and (nested or num_loops > 1 or node.recursive):
                return False
            head = is_messages or is_independent(node.iter, loop=loop, nested=nested)
            body = [*node.body, *node.else_, *([node.test] if node.test else [])]
            return head and all(
                is_independent(each, loop=is_messages, nested=True) for each in body
            )
        if isinstance(node, nodes.Getitem) and is_list(node.node):
            return isinstance(node.arg, nodes.Const) and node.arg.value == 0
        if loop and isinstance(node, nodes.Getattr) and _is_named(node.node, "loop"):
            return node.attr in _LOOP_ATTRIBUTES
        if is_prompt_only(node):
            return True
        if isinstance(node, nodes.Name) and node.ctx == "load":
            return node.name not in lists and not (loop and node.name == "loop")
        return all(
            is_independent(each, loop=loop, nested=nested) for each in node.iter_child_nodes()
        )

    return is_independent(program, loop=False, nested=False)


def _is_named(node: Node, name: str) -> bool:
    return getattr(node, "name", None) == name


if __name__ == "__main__":
    main()
