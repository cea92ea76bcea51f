"""Command lines made from dataclasses, and help in two lengths: `--help` and `--help-all`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_KEY = "option"
ADVANCED = "advanced options"
"""Heading of the options that only `--help-all` shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The command-line form of a dataclass field."""

    help: str
    names: tuple[str, ...] = ()
    """Flags; the default is made from the field's name."""
    metavar: str | None = None
    """Placeholder of the value; it contains the unit."""
    choices: Collection[str] | Callable[[], Collection[str]] | None = None
    group: str | None = None
    """Heading in the help; None for `options`."""
    advanced: bool = False
    """True if only `--help-all` shows the option."""
    positional: bool = False
    exclusive: bool = False
    """At most one of a command's exclusive options can be given."""
    parse: Callable[[str], object] | None = None
    """Parser of the value; the default is the field's type."""


def option(help: str, *names: str, default: Any = MISSING, **form: Any) -> Any:
    """Return a dataclass field that is also an option; `form` has the fields of `Option`."""
    metadata = {_KEY: Option(help=help, names=names, **form)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def from_arguments(kind: type[_T], arguments: argparse.Namespace) -> _T:
    """Return the options of a command from the parsed values of the same names."""
    return kind(**{each.name: getattr(arguments, each.name) for each in fields(cast(Any, kind))})


class HelpFormatter(argparse.HelpFormatter):
    """Wraps lines only at spaces, so that options stay whole.

    Text with line breaks is not wrapped.
    """

    def add_argument(self, action: argparse.Action) -> None:
        """Add an action.

        Unlike argparse, this widens the column of names by the indent of subcommands.
        """
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(f"{indent}{line}\n" for line in text.splitlines()).rstrip("\n")
        return "\n".join(f"{indent}{line}" for line in self._split_lines(text, width - len(indent)))

    def _split_lines(self, text: str, width: int) -> list[str]:
        plain = self._whitespace_matcher.sub(" ", text).strip()
        return textwrap.wrap(plain, width, break_on_hyphens=False, break_long_words=False)


class CommandParser(argparse.ArgumentParser):
    """A parser with two kinds of help: `--help` shows common options, `--help-all` shows all
    options."""

    def __init__(self, *, example: str = "", notes: str = "", **settings: Any) -> None:
        """Make the parser.

        The help prints `example` after the description. The full help ends with `notes`.
        """
        super().__init__(add_help=False, formatter_class=HelpFormatter, **settings)
        self.example, self.notes = example, notes
        self._advanced: list[argparse._ArgumentGroup] = []
        self._positionals.title, self._optionals.title = "arguments", "options"
        self.add_argument("-h", "--help", action="help", help="show the common options and exit")
        self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def add_advanced_group(self, title: str = ADVANCED) -> argparse._ArgumentGroup:
        """Return a new group that only `--help-all` shows."""
        group = self.add_argument_group(title)
        self._advanced.append(group)
        return group

    def refuse_option(self, name: str, fix: str) -> None:
        """Reject an option that people expect here; `fix` states where the option belongs."""
        self.add_argument(name, action=_Refuse, const=fix, help=argparse.SUPPRESS)

    def add_older_spelling(self, name: str, action: argparse.Action) -> None:
        """Accept `name` for the option `action`; the help does not show the older spelling."""
        self._option_string_actions[name] = action

    def add_options(self, kind: type[Any]) -> None:
        """Add an option for each field of a dataclass that was made with `option`."""
        hints, groups = get_type_hints(kind), dict[str, argparse._ArgumentGroup]()
        exclusive: argparse._MutuallyExclusiveGroup | None = None
        for each in fields(kind):
            form: Option | None = each.metadata.get(_KEY)
            if form is None:
                continue
            title = form.group or (ADVANCED if form.advanced else None)
            container: argparse._ActionsContainer = self
            if form.exclusive:
                container = exclusive = exclusive or self.add_mutually_exclusive_group()
            elif title is not None:
                if title not in groups:
                    make = self.add_advanced_group if form.advanced else self.add_argument_group
                    groups[title] = make(title)
                container = groups[title]
            _add_option(container, each, form, hints[each.name])

    def format_usage(self) -> str:
        """Return one line with the required options and the arguments."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._short_usage(), (), ())
        return formatter.format_help()

    def format_help(self) -> str:
        """Return the help with the common options."""
        return self._help(is_full=False)

    def format_full_help(self) -> str:
        """Return the help with all options."""
        return self._help(is_full=True)

    def _help(self, *, is_full: bool) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._short_usage(), (), ())
        formatter.add_text(self.description)
        if self.example:
            formatter.add_text(f"Example: {self.example}")
        for group in self._action_groups:
            if is_full or group not in self._advanced:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        hidden = sum(len(group._group_actions) for group in self._advanced)
        if is_full:
            formatter.add_text(self.notes)
        elif hidden or self.notes:
            more = "more examples"
            if hidden:
                more = f"{hidden} more option{'s' * (hidden > 1)}"
            formatter.add_text(f"--help-all shows {more}.")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _short_usage(self) -> str:
        required, arguments = [], []
        for action in self._actions:
            metavar = action.metavar or action.dest.upper()
            name = metavar if isinstance(metavar, str) else " ".join(metavar)
            if action.option_strings:
                required += [f"{action.option_strings[0]} {name}"] if action.required else []
            elif isinstance(action, argparse._SubParsersAction):
                arguments.append(f"{name} ...")
            elif action.nargs in ("?", "*"):
                arguments.append(f"[{name}]" if action.nargs == "?" else f"[{name} ...]")
            elif action.choices is not None and action.metavar is None:
                arguments.append("{" + ",".join(map(str, action.choices)) + "}")
            else:
                arguments.append(name)
        has_verbs = any(isinstance(each, argparse._SubParsersAction) for each in self._actions)
        optional = [] if has_verbs else ["[OPTION ...]"]
        rest = " ".join([*required, *optional, *arguments])
        width = self._get_formatter()._width
        fits = len(f"usage: {self.prog} {rest}") <= width
        return "%(prog)s" + (" " if fits else "\n         ") + rest.replace("%", "%%")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # `--he` remains an abbreviation of `--help` alone.
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) < 2 else [each for each in found if each[1] != "--help-all"]


class _HelpAll(argparse.Action):
    """Prints the full help, and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        full = parser.format_full_help() if isinstance(parser, CommandParser) else None
        parser._print_message(full or parser.format_help(), sys.stdout)
        parser.exit()


class _Refuse(argparse.Action):
    """Ends the process with a usage error; `const` is the sentence with the fix."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, help: str) -> None:
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs=0,
            const=const,
            help=help,
        )

    def __call__(self, parser: argparse.ArgumentParser, *values: Any) -> None:
        parser.error(f"no option {values[-1]}. {self.const}")


def _add_option(
    container: argparse._ActionsContainer, each: Field[Any], form: Option, hint: Any
) -> None:
    """Add the option of one dataclass field. `hint` is the field's type."""
    kind, is_list = _value_type(hint)
    choices = form.choices() if callable(form.choices) else form.choices
    if choices is None and get_origin(kind) is Literal:
        choices, kind = get_args(kind), str
    settings: dict[str, Any] = {"help": form.help, "metavar": form.metavar}
    if kind is bool:
        settings = {"help": form.help, "action": "store_true"}
    else:
        settings |= {"default": _default(each, is_list=is_list)}
        parse = form.parse or kind
        settings |= {} if parse is str else {"type": parse}
        settings |= {} if choices is None else {"choices": choices}
    if form.positional:
        settings["nargs"] = "*" if is_list else "?"
        if is_list:
            del settings["default"]  # argparse then uses an empty list
        container.add_argument(each.name, **settings)
        return
    if is_list:
        settings["action"] = "append"
    names = form.names or (f"--{each.name.replace('_', '-')}",)
    container.add_argument(*names, dest=each.name, **settings)


def _default(each: Field[Any], *, is_list: bool) -> object:
    if each.default_factory is not MISSING:
        return each.default_factory()
    if each.default is not MISSING:
        return each.default
    return [] if is_list else None


def _value_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and True if the option collects several values."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) in (list, Sequence):
        return get_args(hint)[0], True
    return hint, False
