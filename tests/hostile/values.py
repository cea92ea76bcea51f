"""Hostile values for a field, and damaged bytes of a file, to test readers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

# json.dumps writes NaN and Infinity as Python reads them; the readers must not.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "/etc/cron.d/hostile",
    "~/.ssh",
    "-oProxyCommand=touch /tmp/hostile",
    "$(touch /tmp/hostile)",
    "`id`",
    "; id #",
    "a b/c",
    "a\nProxyCommand touch /tmp/hostile",
    "a\r\nb",
    "a\x00b",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b[2J\x9b31m",
    "\u202eexe.txt",
    "\ud800",
    "[bold red]x[/]",
    "x" * 4096,
    "x" * 100_000,
    "1" * 4300,
    "nan",
    "%s%n{0}{x!r}",
    [],
    [None],
    [[]],
    ["x"] * 1000,
    {},
    {"": None},
    {"__class__": "x"},
)


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a JSON document, including the document itself."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths_of(value[key], (*path, key))
    elif isinstance(value, list):
        # One entry represents the others.
        for i, item in enumerate(value[:1]):
            yield from paths_of(item, (*path, i))


def replaced(value: Any, path: tuple[str | int, ...], by: Any) -> Any:
    """Return the document with a new value at `path`."""
    if not path:
        return by
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], by)
    return copy


def without(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return the document without the value at `path`."""
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


_TOKENS = (b"[" * 20_000, b'{"a":' * 5_000, b"1" * 4_300, b"1e999", b"NaN", b"Infinity", b"-")


def mutated(sample: bytes, rng: random.Random) -> bytes:
    """Return `sample` damaged at one to three positions, as by disks, networks and attackers."""
    content = bytearray(sample)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(content))
        size = rng.choice((1, 2, 8, 64))
        match rng.randrange(9):
            case 0 if content:
                content[at % len(content)] ^= 1 << rng.randrange(8)
            case 1:
                del content[at:]
            case 2:
                del content[at : at + size]
            case 3:
                content[at:at] = rng.randbytes(size)
            case 4:
                content[at:at] = content[at : at + 8 * size]
            case 5:
                content[at : at + size] = bytes(len(content[at : at + size]))
            case 6:
                content[at:at] = rng.choice(_TOKENS)
            case 7:
                content[at:at] = rng.choice((b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n"))
            case _:
                _swap_digits(content, rng)
    return bytes(content)


def _swap_digits(content: bytearray, rng: random.Random) -> None:
    """Replace one number by another."""
    places = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if places:
        content[rng.choice(places)] = ord(rng.choice("0123456789-.e"))
