"""The formats in which chat templates write a tool call, and how the format is detected.

A template renders sample calls with known names and values. The positions of these names and values
in the rendered text show the format.

Four kinds cover the templates in use: a JSON object with name and arguments; a name followed by the
arguments as a JSON object; a name followed by keys and values between delimiters, as in XML; and a
call in Python's syntax.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from payload.generate.shared_text import common_end

NAMES = "probe_first", "probe_second"
"""Function names in the test calls that `call_format_of` lets a template render."""
KEYS = "probe_key", "probe_number"
VALUES = ("probe_value", 1717), ("probe_other", 1818)
"""Names and values of the arguments in both test calls. One value is a text, and the other value is
a number."""
_JSON_KEYS = ("name", "arguments"), ("name", "parameters"), ("tool_name", "parameters")
_NAME = r"([^\s\"'<>|{}()\[\]=:,]+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that a model wrote."""

    name: str
    arguments: Mapping[str, Any]

    def as_row(self) -> dict[str, Any]:
        """Return the call for JSON."""
        return {"name": self.name, "arguments": dict(self.arguments)}

    def as_entry(self, number: int, *, as_text: bool) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`, with the index `number`.

        `as_text` writes the arguments as JSON text, as in OpenAI's format.
        """
        arguments: Any = dict(self.arguments)
        if as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        # Nine letters and digits, because some templates accept no other identifier.
        return {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCall:
    """A call, and the call's range of characters in a text."""

    start: int
    end: int
    call: ToolCall


class CallFormat(Protocol):
    """One way to write a call."""

    @property
    def before(self) -> str:
        """Text that begins every call, without white space; empty if calls begin without text."""

    def find(self, text: str, start: int) -> FoundCall | None:
        """Return the first call in `text` that begins at `start` or after it."""


def call_format_of(
    answer: str, *, before: str, tools: Sequence[Mapping[str, Any]]
) -> CallFormat | None:
    """Return the format of the call in `answer`, which calls the first function of `NAMES`.

    `before` is the text that precedes the name in every call. Returns None for an unknown format.
    """
    place = answer.rindex(NAMES[0])
    rest = answer[place + len(NAMES[0]) :]
    schemas = {_name_of(tool): _function(tool).get("parameters") or {} for tool in tools}
    candidates = (
        *_json_objects(before, names=frozenset(schemas)),
        _NameThenJson(before=before.strip(), between=rest.partition("{")[0]),
        _PythonCall(before=before.strip(), names=frozenset(schemas)),
        _pairs(before, rest, schemas),
    )
    wanted = ToolCall(name=NAMES[0], arguments=dict(zip(KEYS, VALUES[0], strict=True)))
    for candidate in candidates:
        if candidate is not None:
            found = candidate.knowing(NAMES).find(answer, 0)
            if found is not None and found.call == wanted:
                return candidate
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonObject:
    """A JSON object that holds the name and the arguments."""

    before: str
    keys: tuple[str, str]
    names: frozenset[str]
    """Names of the tools. If `before` is empty, only an object with one of these names is a
    call."""

    def knowing(self, names: Sequence[str]) -> _JsonObject:
        return _JsonObject(before=self.before, keys=self.keys, names=frozenset(names))

    def find(self, text: str, start: int) -> FoundCall | None:
        decoder = json.JSONDecoder()
        for place in _places("{", text, start):
            head = text[start:place].rstrip()
            if not head.endswith(self.before):
                continue
            try:
                given, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue
            call = self._call(given)
            if call is not None and (self.before or call.name in self.names):
                begin = start + len(head) - len(self.before) if self.before else place
                return FoundCall(start=begin, end=end, call=call)
        return None

    def _call(self, given: Any) -> ToolCall | None:
        if isinstance(given, dict) and isinstance(given.get("function"), dict):
            given = given["function"]
        if not isinstance(given, dict):
            return None
        name, arguments = given.get(self.keys[0]), given.get(self.keys[1])
        if isinstance(arguments, str):
            arguments = _value_of(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall(name=name, arguments=arguments)


def _json_objects(before: str, *, names: frozenset[str]) -> Iterator[_JsonObject]:
    # The object can also begin before its arguments, which then precede the name.
    head = before[: before.rfind("{")].strip() if "{" in before else ""
    for keys in _JSON_KEYS:
        yield _JsonObject(before=head, keys=keys, names=names)
        if head:
            yield _JsonObject(before="", keys=keys, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NameThenJson:
    """The name, some text, then the arguments as a JSON object."""

    before: str
    between: str

    def knowing(self, names: Sequence[str]) -> _NameThenJson:
        del names
        return self

    def find(self, text: str, start: int) -> FoundCall | None:
        if not self.before:
            return None
        pattern = re.compile(_flexible(self.before) + r"\s*" + _NAME + _flexible(self.between))
        decoder = json.JSONDecoder()
        for match in pattern.finditer(text, start):
            try:
                given, end = decoder.raw_decode(text, match.end())
            except (ValueError, RecursionError):
                continue
            if isinstance(given, dict):
                call = ToolCall(name=match[1], arguments=given)
                return FoundCall(start=match.start(), end=end, call=call)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PythonCall:
    """A call in Python's syntax: NAME(KEY=VALUE, ...)."""

    before: str
    names: frozenset[str]

    def knowing(self, names: Sequence[str]) -> _PythonCall:
        return _PythonCall(before=self.before, names=frozenset(names))

    def find(self, text: str, start: int) -> FoundCall | None:
        if not self.names:
            return None
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, self.names))})\(")
        for match in pattern.finditer(text, start):
            for end in _places(")", text, match.end()):
                arguments = _keyword_arguments(text[match.start() : end + 1])
                if arguments is None:
                    continue
                head = text[start : match.start()].rstrip()
                own = len(self.before) if self.before and head.endswith(self.before) else 0
                begin = start + len(head) - own if own else match.start()
                call = ToolCall(name=match[1], arguments=arguments)
                return FoundCall(start=begin, end=end + 1, call=call)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _NameThenPairs:
    """The name, then every argument as a key and a value between delimiters."""

    before: str
    opening: str
    """Text before every key; it can be empty."""
    between: str
    """Text between a key and its value, if the value is not a string."""
    quote: str
    """Text on both sides of a string value; it can be empty."""
    ends: tuple[str, str]
    """The text between a value and the next key, and the text after the last value."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each tool, the JSON schema of its parameters, by the tool's name."""

    def knowing(self, names: Sequence[str]) -> _NameThenPairs:
        del names
        return self

    def find(self, text: str, start: int) -> FoundCall | None:
        if not self.before or not self.between.strip():
            return None
        name = re.compile(_flexible(self.before) + r"\s*" + _NAME)
        found = name.search(text, start)
        if found is None:
            return None
        following = name.search(text, found.end())
        limit = len(text) if following is None else following.start()
        properties = self.schemas.get(found[1], {}).get("properties")
        types = properties if isinstance(properties, Mapping) else {}
        arguments, end = {}, found.end()
        for match in self._pair().finditer(text, found.end(), limit):
            key, quoted, plain = match.groups()
            arguments[key] = _typed(plain, types.get(key)) if quoted is None else quoted
            end = match.end()
        call = ToolCall(name=found[1], arguments=arguments)
        return FoundCall(start=found.start(), end=end, call=call)

    def _pair(self) -> re.Pattern[str]:
        quote = re.escape(self.quote)
        quoted = f"{quote}(.*?){quote}" if quote else "(?!)()"
        end = "|".join(_flexible(each) for each in self.ends if each)
        return re.compile(
            f"{_flexible(self.opening)}\\s*{_NAME}{_flexible(self.between)}"
            f"(?:{quoted}|(.*?))(?={end})",
            re.DOTALL,
        )


def _pairs(
    before: str, rest: str, schemas: Mapping[str, Mapping[str, Any]]
) -> _NameThenPairs | None:
    """Return the format of a call. `rest` is the text after the call's name."""
    places = []
    position = 0
    for word in (KEYS[0], str(VALUES[0][0]), KEYS[1], str(VALUES[0][1])):
        place = rest.find(word, position)
        if place < 0:
            return None
        places.append((place, position := place + len(word)))
    (key, key_end), (value, value_end), (next_key, next_key_end), (number, number_end) = places
    between_text, between_number = rest[key_end:value], rest[next_key_end:number]
    has_quote = between_text != between_number and between_text.startswith(between_number)
    quote = between_text.removeprefix(between_number) if has_quote else ""
    separator = rest[value_end:next_key].removeprefix(quote)
    opening = common_end([rest[:key], separator])
    end = separator.removesuffix(opening)
    after = rest[number_end:]
    return _NameThenPairs(
        before=before.strip(),
        opening=opening.strip(),
        between=between_number,
        quote=quote,
        ends=(end, end if end.strip() and after.startswith(end) else after.strip()[:1]),
        schemas=schemas,
    )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tool.get("function", tool)
    return found if isinstance(found, Mapping) else {}


def _name_of(tool: Mapping[str, Any]) -> str:
    return str(_function(tool).get("name", ""))


def _places(wanted: str, text: str, start: int) -> Iterator[int]:
    """Yield each index from `start` on at which `text` contains `wanted`."""
    place = text.find(wanted, start)
    while place >= 0:
        yield place
        place = text.find(wanted, place + 1)


def _flexible(text: str) -> str:
    """Return a pattern for `text` that accepts any white space where `text` has white space."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


def _value_of(text: str) -> Any:
    """Return the JSON value of a text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _keyword_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call in Python's syntax; None if they are not literal values."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _typed(text: str, schema: Any) -> Any:
    """Return a value, given as text, in the type that its JSON schema declares."""
    value = text.strip()
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return value
    found = _value_of(value)
    return value if found is None else found
