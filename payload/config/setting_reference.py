"""The reference of run.toml's settings: values, defaults, units and meanings, for people and tools.

The meaning of a setting is the docstring below its field. The meaning of a section is the docstring
of its class. So this module reads the source of the classes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from payload.config.run_config import RunConfig
from payload.core.one_line import joined_lines
from payload.core.validation.readers import fields_of, members_of

_PAGE = re.compile(r"docs/[\w/]+\.md")
_TITLE = re.compile(r"\[\w+\][,;]?\s*")
_LIMITS = {"low": "at least", "above": "above", "high": "at most"}
_KINDS = {bool: "true, false", str: "text", int: "whole number", float: "number"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of run.toml."""

    section: str
    key: str
    hint: Any
    """Type of the setting's field."""
    default: Any
    limits: Mapping[str, Any]
    """Arguments of the call of `checked` that declares the field."""
    meaning: str
    """Description of the setting, on one line."""

    @property
    def name(self) -> str:
        """Return the name as in `--set`."""
        return f"{self.section}.{self.key}"

    @property
    def unit(self) -> str:
        """Return the unit of the number; empty without a unit."""
        return str(self.limits.get("unit", ""))

    def words(self) -> list[Any]:
        """Return the single values that are allowed: the choices, or words instead of a number."""
        words = [
            word
            for kind in members_of(self.hint)
            if typing.get_origin(kind) is typing.Literal
            for word in typing.get_args(kind)
        ]
        choices = self.limits.get("choices")
        words += (choices() if callable(choices) else choices) or []
        return [*words, "none"] if type(None) in members_of(self.hint) else words

    def plain_kind(self) -> Any:
        """Return the type of the values that are not in `words`, or None if there are only words.

        The type is bool, str, int or float, or tuple for a list of texts.
        """
        if self.limits.get("choices"):
            return None
        kinds = [typing.get_origin(each) or each for each in members_of(self.hint)]
        return next((each for each in kinds if each in (*_KINDS, tuple)), None)

    def values(self, *, code: str = "") -> str:
        """Return the allowed values in words; `code` surrounds each value that the user types."""
        kind = self.plain_kind()
        words = [f"{code}{toml_text(word)}{code}" for word in self.words()]
        if kind is None:
            return ", ".join(words)
        text = "list of texts" if kind is tuple else _KINDS[kind]
        for limit, word in _LIMITS.items():
            if self.limits.get(limit) is not None:
                text += f", {word} {self.limits[limit]}"
        return ", or ".join([text, *words])

    def default_text(self) -> str:
        """Return the default as in run.toml."""
        return toml_text(self.default)


def toml_text(value: Any) -> str:
    """Return a value as in run.toml; the text of a setting contains no quotes."""
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def sentence(phrase: str) -> str:
    """Return a phrase as a sentence: with a capital letter and a full stop."""
    return f"{phrase[0].upper()}{phrase[1:].rstrip('.')}."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SectionReference:
    """One section of run.toml."""

    name: str
    meaning: str
    """Short description of the section; it can be empty."""
    page: str
    """Path of the docs page about these settings, relative to the repository."""
    settings: tuple[Setting, ...]


@functools.cache
def sections() -> Mapping[str, SectionReference]:
    """Return every section by name, in the order of run.toml."""
    return {name: _section(name, each.hint) for name, each in fields_of(RunConfig).items()}


def all_settings() -> Mapping[str, Setting]:
    """Return every setting by its name as in `--set`."""
    return {each.name: each for section in sections().values() for each in section.settings}


def _section(name: str, cls: type[Any]) -> SectionReference:
    described = field_docstrings(cls)
    about = _TITLE.sub("", joined_lines(cls.__doc__ or "", longest=None), count=1)
    page = _PAGE.search(about)
    parts = [part for part in about.split("; ") if not _PAGE.search(part)]
    return SectionReference(
        name=name,
        meaning="; ".join(parts),
        page=page[0] if page else "",
        settings=tuple(
            Setting(
                section=name,
                key=key,
                hint=each.hint,
                default=each.default,
                limits=each.limits,
                meaning=described.get(key, ""),
            )
            for key, each in fields_of(cls).items()
        ),
    )


def field_docstrings(cls: type[Any]) -> Mapping[str, str]:
    """Return the docstring below each field of a class, on one line."""
    return _docstrings(Path(inspect.getfile(cls))).get(cls.__name__, {})


@functools.cache
def _docstrings(path: Path) -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: dict(_below_fields(node)) for node in tree.body if isinstance(node, ast.ClassDef)
    }


def _below_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, joined_lines(text, longest=None)
