"""Compares the keys of each file format with tests/golden/formats.

`assert_format` takes files that the present code wrote. It fails for a key that is missing, new or
of another type. TILEFORGE_WRITE_GOLDEN=1 rewrites the golden file, but rejects a change that breaks
readers of the same version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "golden" / "formats"
VERSION_KEY = "schema_version"

_KINDS = {str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}
_NUMBER = re.compile(r"\d+")
_PAGE = "docs/reference/formats.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The keys of one format."""

    version: int | None
    """None if its files have no version."""
    refuses_unknown_keys: bool
    """True if readers of older releases reject a file with a new key."""
    keys: Mapping[str, str]
    """Type by path, such as `nodes[].name: str` or `cost_usd: float | null`."""

    def to_json(self) -> str:
        """Return the text of the golden file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def assert_format(
    name: str,
    documents: Iterable[Any],
    *,
    maps: Sequence[str] = (),
    also: Mapping[str, str] | None = None,
    refuses_unknown_keys: bool = False,
) -> None:
    """Fail unless all documents together have the keys of the golden file `name`.

    `maps` are the paths of objects whose keys are data, such as file names. `also` has types by
    path that no document in this test has: those of other machines, or after a failure.
    """
    every = list(documents)
    versions = {_version_of(each) for each in every}
    assert len(versions) == 1, f"{name}: documents of versions {versions}"
    keys = keys_of(every, maps=maps)
    keys |= {path: _union(keys[path], kinds) for path, kinds in (also or {}).items()}
    assert_keys(name, keys, version=versions.pop(), refuses_unknown_keys=refuses_unknown_keys)


def assert_keys(
    name: str,
    keys: Mapping[str, str],
    *,
    version: int | None,
    refuses_unknown_keys: bool = False,
) -> None:
    """Fail unless these are the keys of the golden file `name`, or write it."""
    found = Format(version=version, refuses_unknown_keys=refuses_unknown_keys, keys=keys)
    path = GOLDEN / f"{name}.json"
    known = read_format(path) if path.exists() else None
    if os.environ.get("TILEFORGE_WRITE_GOLDEN") == "1":
        stored = found if known is None else updated(name, known, found)
        path.parent.mkdir(exist_ok=True)
        path.write_text(stored.to_json(), encoding="utf-8")
        return
    assert known is not None, f"{path} is missing: {_WRITE}"
    problems = differences(name, known, found)
    assert not problems, "\n".join(problems)


_WRITE = "write it with TILEFORGE_WRITE_GOLDEN=1"


def read_format(path: Path) -> Format:
    """Read a golden file."""
    return Format(**json.loads(path.read_text(encoding="utf-8")))


def updated(name: str, known: Format, found: Format) -> Format:
    """Return the new contents; fails if a reader would break although the version is the same."""
    if not _is_raised(known, found):
        broken = breaking(name, known, found)
        assert not broken, "\n".join(broken)
        # Types that depend on the machine, as in `mfu: float | null`, stay.
        keys = {path: _union(known.keys.get(path, ""), kinds) for path, kinds in found.keys.items()}
        return Format(
            version=found.version, refuses_unknown_keys=found.refuses_unknown_keys, keys=keys
        )
    return found


def differences(name: str, known: Format, found: Format) -> list[str]:
    """Return a sentence for each difference from the golden file."""
    if known.version != found.version:
        verb = "is raised" if _is_raised(known, found) else "is not the stored one"
        return [f"{name}: the version {verb}: {known.version} to {found.version}. {_RAISED}"]
    if known.refuses_unknown_keys != found.refuses_unknown_keys:
        return [f"{name}: refuses_unknown_keys is not what is stored. Check {_PAGE}, and {_WRITE}."]
    new = sorted(found.keys.keys() - known.keys.keys())
    new += [path for path in _gains_value(known, found) if path not in new]
    effect = "refuse" if known.refuses_unknown_keys else "ignore"
    more = [
        f"{name}: {path} ({found.keys[path]}) is new, and older releases {effect} it. Check that a "
        f"file without it still loads, and {_WRITE}."
        for path in new
        if path in known.keys or not _needs_version_to_grow(known)
    ]
    return [*breaking(name, known, found), *more]


_ELEMENT = "[]"
"""End of the path of a list's elements."""

_RAISED = (
    f"Keep reading the older one, add its row to {_PAGE}, store a fixture of it, and {_WRITE}."
)


def _is_in_empty_list(path: str, found: Format) -> bool:
    """Return whether the path is an element of a list that was empty, as flags that a CPU lacks."""
    parent, is_element, _ = path.rpartition(_ELEMENT)
    has_elements = any(each.startswith(f"{parent}{_ELEMENT}") for each in found.keys)
    return bool(is_element) and parent in found.keys and not has_elements


def breaking(name: str, known: Format, found: Format) -> list[str]:
    """Return a sentence for each difference that breaks a reader of the same version."""
    fix = (
        f"Raise its {VERSION_KEY} and keep reading version {known.version}"
        if known.version is not None
        else f"It has no version: write the old key too, or give the format a {VERSION_KEY}"
    )
    problems = [
        f"{name}: {path} ({kinds}) is not written any more. {fix}. See {_PAGE}."
        for path, kinds in sorted(known.keys.items())
        if path not in found.keys and not _is_in_empty_list(path, found)
    ]
    gains = set(_gains_value(known, found))
    for path, kinds in sorted(found.keys.items()):
        before = known.keys.get(path)
        if before is None and _needs_version_to_grow(known):
            problems.append(
                f"{name}: {path} ({kinds}) is new, and older releases refuse unknown keys. {fix}. "
                f"See {_PAGE}."
            )
        elif before is not None and path not in gains and not _kinds(kinds) <= _kinds(before):
            problems.append(f"{name}: {path} is {kinds}, it was {before}. {fix}. See {_PAGE}.")
    return problems


def keys_of(documents: Iterable[Any], *, maps: Sequence[str] = ()) -> dict[str, str]:
    """Return the types of every key by path, over all documents."""
    found: dict[str, set[str]] = {}
    for document in documents:
        for path, kind in _walk(document, "", frozenset(maps)):
            found.setdefault(path, set()).add(kind)
    return {path: " | ".join(sorted(kinds)) for path, kinds in sorted(found.items())}


def names_in(folder: Path, *, is_new: Callable[[Path], bool] = lambda path: True) -> dict[str, str]:
    """Return the names of the new files below a folder as keys; numbers become `N`."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    names = {_NUMBER.sub("N", str(path.relative_to(folder))) for path in files if is_new(path)}
    return dict.fromkeys(sorted(names), "file")


def tensors_in(path: Path) -> dict[str, str]:
    """Return dtype and number of dimensions of a safetensors file's tensors, and its metadata."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = {
        f"metadata {key}": str(value) for key, value in header.pop("__metadata__", {}).items()
    }
    return metadata | {
        name: f"{each['dtype']}, {len(each['shape'])} dimensions" for name, each in header.items()
    }


def _walk(value: Any, path: str, maps: frozenset[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        if path:
            yield path, "object"
        for key, inner in value.items():
            place = f"{path}{{}}" if path in maps else f"{path}.{key}".lstrip(".")
            yield from _walk(inner, place, maps)
    elif isinstance(value, list | tuple):
        yield path, "list"
        for inner in value:
            yield from _walk(inner, f"{path}{_ELEMENT}", maps)
    else:
        yield path, _KINDS[type(value)]


def _version_of(document: Any) -> int | None:
    found = document.get(VERSION_KEY) if isinstance(document, dict) else None
    assert found is None or type(found) is int, found
    return found


def _needs_version_to_grow(known: Format) -> bool:
    """Return True if a new key needs a new version, because older readers reject it."""
    return known.refuses_unknown_keys and known.version is not None


def _is_raised(known: Format, found: Format) -> bool:
    return found.version is not None and found.version > (known.version or 0)


def _gains_value(known: Format, found: Format) -> list[str]:
    """Return the keys that were always null and now have a value."""
    return [
        path
        for path, kinds in found.keys.items()
        if known.keys.get(path) == "null" and kinds != "null"
    ]


def _kinds(text: str) -> set[str]:
    return set(text.split(" | ")) - {""}


def _union(first: str, second: str) -> str:
    return " | ".join(sorted(_kinds(first) | _kinds(second)))
