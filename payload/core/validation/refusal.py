"""CONTRACT: the error for a value outside its declared limits, and its message."""

from __future__ import annotations

from typing import Any, Literal

from payload.core.printable_text import shown

Reason = Literal["type", "choices", "low", "above", "high", "pattern", "size", "record"]
_TYPES: dict[type, str] = {
    **{str: "a string", int: "an integer", float: "a finite number", bool: "a boolean"},
    **{list: "a list", dict: "an object"},
}
_LIMITS = {"low": "at least", "above": "above", "high": "at most"}


class RefusedError(Exception):
    """A value outside its declared type or limits."""

    def __init__(self, reason: Reason, wanted: Any, *, value: object = None) -> None:
        """Set the reason, and what is required (`wanted`): a type, limit, choices or text."""
        super().__init__(reason, wanted)
        self.reason, self.wanted, self.value = reason, wanted, value
        self.path = ""
        """Path from the record to the refused value, such as `: nodes[0]: name`."""
        self.refusal = self.fix = ""
        """The text of the problem, and the text of the fix, from the declaration of the innermost
        field."""

    def within(self, part: str, *, refusal: str = "", fix: str = "") -> RefusedError:
        """Return this error with `part` in front of the path."""
        self.path = part + self.path
        self.refusal, self.fix = self.refusal or refusal, self.fix or fix
        return self

    def sentence(self, where: str, *, fix: str = "") -> str:
        """Return the message: path, value, problem and fix."""
        place, fix = f"{where}{self.path}".removeprefix(": "), self.fix or fix
        if self.reason != "record":
            place = f"{place} = {shown(self.value)}"
        problem = self.refusal or f": {self.problem()}."
        return f"{place}{problem}{' ' if fix else ''}{fix}"

    def problem(self) -> str:
        """Return the requirement that the value violates, or the problem of a record."""
        if self.reason == "type":
            return f"must be {_TYPES[self.wanted]}"
        if self.reason == "choices":
            return f"must be one of {', '.join(map(str, self.wanted))}"
        if self.reason in _LIMITS:
            return f"must be {_LIMITS[self.reason]} {self.wanted}"
        return str(self.wanted)
