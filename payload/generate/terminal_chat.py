"""Prints the answers of a chat as text for a terminal or a pipe, or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from payload.core.printable_text import printable
from payload.generate.answers import Answer
from payload.generate.call_formats import ToolCall
from payload.generate.chat import HELP_COMMAND, Conversation, run_chat, shown_call

_KEYS = "Ctrl-C ends an answer, Ctrl-D the conversation."
_HELP = (
    f"Type a message and press Enter. {_KEYS} {HELP_COMMAND} or an empty line shows this help. "
    "There are no other commands."
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def chat(
    conversation: Conversation,
    *,
    as_json: bool,
    write: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Chat in the terminal, or answer each line of stdin.

    `write` prints to stdout, and `note` prints a line to stderr.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        note(f"{_KEYS} {HELP_COMMAND} shows this help.")
        # Line editing and history.
        import readline  # noqa: F401
    printer = _AnswerPrinter(write=write, has_colour=_has_colour())

    def end(question: str) -> None:
        if not as_json:
            printer.end(conversation.last)
            return
        answer = conversation.last.as_row()
        row = {"prompt": question, **answer, "num_tokens": conversation.num_tokens}
        write(json.dumps(row) + "\n")

    def result_of(call: ToolCall) -> str:
        return input(printable(f"result of {call.name}> "))

    run_chat(
        conversation,
        read=(lambda: input("> ")) if is_terminal else (lambda: input()),
        read_result=result_of if is_terminal and conversation.format.tools else None,
        show=(lambda answer: None) if as_json else printer.update,
        end=end,
        note=note,
        show_help=(lambda: note(_HELP)) if is_terminal else None,
    )


class _AnswerPrinter:
    """Prints a growing answer: first thoughts (dimmed, and only on a terminal), then text, then
    calls."""

    def __init__(self, *, write: Callable[[str], None], has_colour: bool) -> None:
        self._write = write
        self._has_colour = has_colour
        self._printed = Answer()

    def update(self, answer: Answer) -> None:
        """Print the text that was added since the last call."""
        thoughts = answer.thoughts[len(self._printed.thoughts) :]
        if thoughts and self._has_colour:
            self._write(f"{_DIM}{printable(thoughts)}{_PLAIN}")
        if answer.text and not self._printed.text and answer.thoughts and self._has_colour:
            self._write("\n\n")
        self._write(_safe(answer.text[len(self._printed.text) :]))
        self._printed = answer

    def end(self, answer: Answer) -> None:
        """Print the rest of a complete answer."""
        self.update(answer)
        has_text = bool(answer.text or (answer.thoughts and self._has_colour))
        for call in answer.calls:
            self._write(("\n" if has_text else "") + _safe(f"call: {shown_call(call)}"))
            has_text = True
        self._write("\n")
        self._printed = Answer()


def _has_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _safe(text: str) -> str:
    """Return text without escape sequences if stdout is a terminal."""
    return printable(text) if sys.stdout.isatty() else text
