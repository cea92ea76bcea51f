"""Text of several lines becomes one line."""

from __future__ import annotations

from payload.core.one_line import joined_lines, last_line, printable_line, shortened


def test_all_lines_are_joined_without_what_a_terminal_would_obey() -> None:
    text = "\x1b[31m one\n\n  two\tthree \n"
    assert joined_lines(text) == "one two three"
    assert printable_line("a\n  b\x07") == "a   b"


def test_a_long_text_ends_in_three_dots_within_its_limit() -> None:
    assert shortened("x" * 10, 10) == "x" * 10
    assert joined_lines("x " * 10, longest=10) == "x x x x..."
    assert len(joined_lines("x" * 999)) == 300
    assert joined_lines("x" * 999, longest=None) == "x" * 999


def test_a_failed_program_is_quoted_by_its_last_line() -> None:
    assert last_line("starting\nerror: no disk\n\n", otherwise="?") == "no disk."
    assert last_line("\n", otherwise="it ended with 3") == "it ended with 3."
