"""CONTRACT: check what a node, a file, an inventory or the cloud says before anyone uses it.

Anything that another process wrote can be damaged or hostile: truncated, nested 20,000 deep, full
of escape sequences, or a path where a name belongs. The readers here refuse it in one line.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import math
import os
import re
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from payload.core.errors import ConfigError, TileforgeError

MAX_FILE_BYTES = 64 * 2**20
"""Larger than any JSON file that Tileforge writes, but for metrics.jsonl."""
MAX_SECONDS = 1e11
"""Over three thousand years: no time that a record has is longer, nor so long after 1970."""
MAX_TEXT_CHARS = 2**16
"""Longest string in a record: an error message or a path is far shorter."""

RUN_ID = re.compile(r"(?!latest\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A run id names a folder here and on every node, so it can never lead out of `runs`."""
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
"""A node's name becomes a word of command lines and ssh_config; it never starts like an option."""

# C0 without tab and newline, DEL, C1, lone surrogates, and the marks that turn the direction of
# text (CVE-2021-42574): a terminal obeys them, so a log could retitle or rewrite the screen.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# CSI, OSC and the other string sequences, with their parameters: without these, the text between
# an escape character and its end would stay on the screen.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
PLAIN_TEXT = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f-\x9f]*")
"""One line without control characters: what a path or a description in a command line may be."""
_MAX_INTEGER_DIGITS = 19  # 64-bit.
_SHOWN_CHARS = 60
_LINE_CHARS = 300
_KINDS = {str: "a string", int: "an integer", float: "a finite number", bool: "a boolean"}

_T = TypeVar("_T")


def printable(text: str) -> str:
    """Return `text` without terminal escape sequences and control characters; newlines stay."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))


def shown(value: object) -> str:
    """Return `value` as an error message quotes it: printable, on one line and short."""
    try:
        text = printable(repr(value)).replace("\n", " ")
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def shown_name(name: str) -> str:
    """Return a file's or an object's name, printable and on one line."""
    return printable(name).replace("\n", " ")


def is_failure(error: BaseException) -> bool:
    """Tell what a library raises for bad input from a request to end, such as Ctrl-C.

    A panic of a library in Rust is no Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(text: object) -> str:
    """Return the first line of another program's message: printable, short, with a full stop."""
    lines = printable(str(text)).strip().splitlines() or [type(text).__name__]
    line = lines[0] if len(lines[0]) <= _LINE_CHARS else f"{lines[0][: _LINE_CHARS - 3]}..."
    return f"{line.rstrip('.')}."


def open_regular(path: Path, *, follows: bool = True) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises OSError also for anything else in its place (a folder, a pipe, a device), so that
    reading cannot block, and unless it `follows` links for a link.
    """
    link = 0 if follows else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def can_see(path: Path) -> bool:
    """Return True if the path exists and this user may look at it."""
    try:
        return path.exists()
    except OSError:
        return False


def read_bytes(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return a regular file's content.

    Raises OSError also for anything else in its place, and for a file over `limit_bytes`, so that
    reading can neither block nor fill the memory.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"Larger than {limit_bytes:,} bytes", str(path))
    return content


def inside_folder(path: Path, *, home: Path | None = None) -> Path:
    """Return the path of a file in the folder `home`, by default its own.

    Raises OSError for a link that leads out of that folder: whoever made the folder could have any
    file read, and copied into what is made of it. The hub's cache keeps its files in `blobs`,
    beside `snapshots`; links to them are followed.
    """
    folder, target = (Path(os.path.realpath(each)) for each in (home or path.parent, path))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.is_relative_to(folder) or target.is_relative_to(blobs):
        return path
    problem = f"a link that leads out of its folder, to {printable(str(target))}"
    raise OSError(errno.ELOOP, f"{problem}. Put the file itself there", str(path))


def links_out(folder: Path, *, home: Path | None = None) -> Iterator[Path]:
    """Yield the links below `folder` that lead out of the folder `home`, by default the same.

    `folder` itself is one of them where it leads out of `home`. A folder that cannot be listed has
    none.
    """
    inside, waiting = os.path.realpath(home or folder), [folder]
    if home is not None and _leads_out(folder, inside):
        yield folder
        return
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for each in entries:
                if each.is_symlink():
                    if _leads_out(each.path, inside):
                        yield Path(each.path)
                elif each.is_dir(follow_symlinks=False):
                    waiting.append(Path(each.path))


def _leads_out(path: Path | str, inside: str) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(inside)


def refuse_links(path: Path, *, below: Path) -> Path:
    """Return `path`. Raises OSError where a part of it below the folder `below` is a link."""
    place = below
    for part in path.relative_to(below).parts:
        place /= part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "A link, which is not followed. Move it away", str(place))
    return path


def is_own_folder(path: Path) -> bool:
    """Return True for a folder that is no link to one."""
    return path.is_dir() and not path.is_symlink()


def home_path(text: str) -> Path:
    """Return the path with `~` replaced; that of an unknown user stays as it is."""
    with suppress(RuntimeError):
        return Path(text).expanduser()
    return Path(text)


def no_follow(path: str, flags: int) -> int:
    """Open a file, but never through a symlink in its place; an `opener` of `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def parse_json(
    text: str | bytes,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
    huge_integers: bool = False,
) -> Any:
    """Return the JSON value in `text`.

    `where` names the origin in messages, `fix` is the sentence that says what to do. With
    `huge_integers`, an integer beyond 64 bits becomes a float (transformers writes 1e30 as one).
    Raises `error` also for what Python's parser lets pass or turns into another exception: NaN and
    infinity, integers beyond 64 bits, numbers that overflow, deep nesting, lone surrogates.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            decoded,
            parse_constant=_refuse_constant,
            parse_int=_any_int if huge_integers else _bounded_int,
            parse_float=_finite_float,
        )
        if "\\u" in decoded:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(_sentence(where, f"byte {problem.start} is not UTF-8", fix)) from None
    except UnicodeEncodeError:
        raise error(_sentence(where, "a string has half a surrogate pair", fix)) from None
    except RecursionError:
        raise error(_sentence(where, "nested too deeply", fix)) from None
    except json.JSONDecodeError as problem:
        what = f"not JSON (line {problem.lineno}: {problem.msg})"
        raise error(_sentence(where, what, fix)) from None
    except ValueError as problem:
        raise error(_sentence(where, f"not JSON ({problem})", fix)) from None
    return value


def check_schema(
    raw: object,
    version: int,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
) -> None:
    """Refuse a record that another release wrote, or that is none."""
    if not isinstance(raw, Mapping):
        raise error(_sentence(where, f"expected an object, got {shown(raw)}", fix))
    found = raw.get("schema_version")
    # True equals 1.
    if type(found) is not int or found != version:
        what = f"schema_version is {shown(found)}, this release reads {version}"
        raise error(_sentence(where, what, fix))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields; evaluating them took half of reading 512 ranks."""
    return typing.get_type_hints(cls)


def build(
    cls: type[_T],
    raw: object,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
    refuse_unknown: bool = False,
) -> _T:
    """Build the dataclass `cls` from a JSON object, each field checked against its type.

    Types may be str, int, float, bool, None, Literal, Any, another dataclass, and tuple (of any
    or of a fixed length), list, dict or Mapping of these; `checked` adds limits. Unknown keys are
    left out, so that an older release reads a newer one's file, unless `refuse_unknown`. Raises
    `error`.
    """
    if not isinstance(raw, Mapping):
        raise error(_sentence(where, f"expected an object, got {shown(raw)}", fix))
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    fields = [each for each in dataclasses.fields(cls) if each.init]  # type: ignore[arg-type]  # a dataclass
    known = {each.metadata.get("key") or each.name: each for each in fields}
    unknown = sorted(shown(key) for key in raw if key not in known)
    if refuse_unknown and unknown:
        what = f"unknown key {unknown[0]}. Known: {', '.join(sorted(known))}"
        raise error(_sentence(where, what, fix))
    values: dict[str, Any] = {}
    missing: list[str] = []
    for name, each in known.items():
        if name in raw:
            value = _Field(f"{where}: {name}", fix, error, refuse_unknown).convert(
                raw[name], hints[each.name], each.metadata
            )
            values[each.name] = value
        elif _is_required(each):
            missing.append(name)
    if missing:
        raise error(_sentence(where, f"missing: {', '.join(missing)}", fix))
    return cls(**values)


def check_type(
    kind: type[_T],
    value: object,
    *,
    where: str,
    fix: str = "",
    error: type[TileforgeError] = ConfigError,
) -> _T:
    """Return `value` when it is a `kind`, which may be any type that `build` has for a field.

    A dataclass is built from an object. Raises `error`.
    """
    converted: _T = _Field(where, fix, error, refuse_unknown=False).convert(value, kind, {})
    return converted


def checked(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    pattern: re.Pattern[str] | None = None,
    wanted: str = "",
    max_items: int | None = None,
    max_chars: int = MAX_TEXT_CHARS,
    default_factory: Callable[[], Any] | None = None,
    key: str | None = None,
) -> Any:
    """Declare a dataclass field that `build` holds to limits.

    `pattern` must match a string whole, and every string in a container; `wanted` says in words
    what matches. `low` and `high` are the smallest and largest number. `key` is the field's name in
    the JSON object, where it is another one.
    """
    metadata = {
        "key": key,
        "low": low,
        "high": high,
        "pattern": pattern,
        "wanted": wanted,
        "max_items": max_items,
        "max_chars": max_chars,
    }
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """One field's place in messages."""

    where: str
    fix: str
    error: type[TileforgeError]
    refuse_unknown: bool

    def convert(self, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
        """Return `value` as `hint` has it."""
        if hint is Any:
            return value
        members = _members(hint)
        if value is None and type(None) in members:
            return None
        kinds = [member for member in members if member is not type(None)]
        for kind in kinds[:-1]:
            if self._fits(value, kind):
                return self._one(value, kind, limits)
        return self._one(value, kinds[-1], limits)

    def _one(self, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
        origin = typing.get_origin(kind) or kind
        if origin is typing.Literal:
            choices = typing.get_args(kind)
            if not any(value is each or (type(value) is str and value == each) for each in choices):
                self.refuse(value, f"must be one of {', '.join(map(str, choices))}")
            return value
        if dataclasses.is_dataclass(kind):
            return build(
                typing.cast("type[Any]", kind),
                value,
                where=self.where,
                fix=self.fix,
                error=self.error,
                refuse_unknown=self.refuse_unknown,
            )
        if origin in (list, tuple, Sequence, typing.get_origin(Sequence[int])):
            return self._items(value, kind, limits)
        if origin in (dict, typing.get_origin(Mapping[str, int])):
            return self._mapping(value, kind, limits)
        return self._scalar(value, kind, limits)

    def _items(self, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
        if not isinstance(value, (list, tuple)):
            self.refuse(value, "must be a list")
        self._check_count(value, limits)
        inner = typing.get_args(kind)
        if typing.get_origin(kind) is tuple and inner[-1] is not Ellipsis:
            if len(value) != len(inner):
                self.refuse(value, f"must have {len(inner)} entries")
        else:
            inner = inner[:1] * len(value)
        items = [
            dataclasses.replace(self, where=f"{self.where}[{i}]").convert(item, hint, limits)
            for i, (item, hint) in enumerate(zip(value, inner, strict=True))
        ]
        return items if typing.get_origin(kind) is list else tuple(items)

    def _mapping(self, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
        if not isinstance(value, Mapping):
            self.refuse(value, "must be an object")
        self._check_count(value, limits)
        inner = typing.get_args(kind)[1]
        return {
            key: dataclasses.replace(self, where=f"{self.where}[{shown(key)}]").convert(
                item, inner, limits
            )
            for key, item in value.items()
        }

    def _scalar(self, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
        if not self._fits(value, kind):
            names = {
                str: "a string",
                int: "an integer",
                float: "a finite number",
                bool: "a boolean",
            }
            self.refuse(value, f"must be {names[kind]}")
        if kind is str:
            self._check_text(value, limits)
        elif kind in (int, float):
            low, high = limits.get("low"), limits.get("high")
            if low is not None and value < low:
                self.refuse(value, f"must be at least {low}")
            if high is not None and value > high:
                self.refuse(value, f"must be at most {high}")
        return float(value) if kind is float else value

    def _fits(self, value: Any, kind: Any) -> bool:
        if kind is bool or isinstance(value, bool):
            return kind is bool and isinstance(value, bool)
        if kind is float:
            return isinstance(value, (int, float)) and _is_finite(value)
        if kind in (str, int):
            return isinstance(value, kind)
        return isinstance(value, (dict, list))

    def _check_text(self, value: str, limits: Mapping[str, Any]) -> None:
        pattern = limits.get("pattern")
        if pattern is not None and not pattern.fullmatch(value):
            self.refuse(value, f"must be {limits.get('wanted') or f'like {pattern.pattern}'}")
        most = limits.get("max_chars", MAX_TEXT_CHARS)
        if len(value) > most:
            self.refuse(value, f"must have at most {most:,} characters")

    def _check_count(self, value: Any, limits: Mapping[str, Any]) -> None:
        most = limits.get("max_items")
        if most is not None and len(value) > most:
            self.refuse(value, f"must have at most {most} entries")

    def refuse(self, value: Any, problem: str) -> typing.NoReturn:
        """Raise the field's error."""
        raise self.error(_sentence(f"{self.where} = {shown(value)}", problem, self.fix))


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def _is_required(each: dataclasses.Field[Any]) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _sentence(where: str, what: str, fix: str) -> str:
    return f"{where}: {what}.{' ' if fix else ''}{fix}"


def _refuse_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _any_int(text: str) -> int | float:
    return int(text) if len(text.lstrip("-")) <= _MAX_INTEGER_DIGITS else _finite_float(text)


def _bounded_int(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(digits)} is too large")
    return value
