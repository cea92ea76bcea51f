"""Finds the chat templates in a tokenizer's files, in every form that transformers reads.

Source: `PreTrainedTokenizerBase._from_pretrained` and `get_chat_template` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from payload.core.errors import DataError
from payload.core.printable_text import one_line
from payload.core.regular_files import read_bytes
from payload.core.symlink_safety import inside_folder
from payload.core.validation.json_text import parse_json
from payload.data.tokenizers.special_tokens import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_SUFFIX = ".jinja"
_PROCESSOR_FILE = "chat_template.json"
_DEFAULT, _TOOL_USE = "default", "tool_use"
NO_TEMPLATE_FIX = (
    "Use a model that was trained for chat, set a template with --chat-template (prepare), or "
    "leave --chat out (generate)."
)
TOOLS_FIX = (
    "Use a template with tools: --chat-template FILE, or --chat-template trl:qwen2_5 from the "
    "package trl."
)
_TRL = "trl"


def template_path(given: Path) -> Path:
    """Return the file of the package trl that `trl:NAME` means, or any other path unchanged.

    Raises DataError.
    """
    package, _, name = str(given).partition(":")
    if package != _TRL or not name or given.exists():
        return given
    found = find_spec(_TRL)
    if found is None or found.origin is None:
        raise DataError(f"{given}: the package trl is not installed. Install it, or use a file.")
    files = {
        each.stem: each
        for each in (Path(found.origin).parent / "chat_templates").glob(f"*{_SUFFIX}")
    }
    if name not in files:
        raise DataError(
            f"{given}: trl does not have this template. Use one of: {', '.join(sorted(files))}."
        )
    return files[name]


def find_template(folder: Path, config: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Return the file and the text of the template in a tokenizer's folder, or None.

    `config` is tokenizer_config.json. If there are several named templates, the result combines
    two: it uses `tool_use` for conversations with tools, and `default` for all others. Raises
    DataError for a file that cannot be read.
    """
    path = folder / TEMPLATE_FILE
    named = _own_files(folder)
    if not named:
        path, named = folder / CONFIG_FILE, named_templates(config.get("chat_template"))
    if not named and (content := _read(folder / _PROCESSOR_FILE)) is not None:
        path = folder / _PROCESSOR_FILE
        raw = parse_json(content, where=str(path), fix=NO_TEMPLATE_FIX, error=DataError)
        named = named_templates(raw.get("chat_template") if isinstance(raw, dict) else None)
    text = chosen_template(named)
    return None if text is None else (path, text)


def named_templates(given: object) -> dict[str, str]:
    """Return the templates by name.

    `given` is the value of the key `chat_template`: a text, a list or an object.
    """
    if isinstance(given, str):
        return {_DEFAULT: given}
    if isinstance(given, list):
        entries = [each for each in given if isinstance(each, Mapping)]
        given = {each.get("name"): each.get("template") for each in entries}
    if not isinstance(given, Mapping):
        return {}
    return {
        name: text
        for name, text in given.items()
        if isinstance(name, str) and isinstance(text, str) and text.strip()
    }


def chosen_template(named: Mapping[str, str]) -> str | None:
    """Return one program that combines `default` and `tool_use`, or None without `default`."""
    default, tools = named.get(_DEFAULT), named.get(_TOOL_USE)
    if default is None or not default.strip():
        return None
    if tools is None or tools == default:
        return default
    # Jinja removes one line end at the end of a program, and white space around the tags of its
    # blocks, but none next to an expression.
    parts = [f"{{{{ '' }}}}{text.removesuffix(chr(10))}{{{{ '' }}}}" for text in (default, tools)]
    return f"{{% if tools is none %}}{parts[0]}{{% else %}}{parts[1]}{{% endif %}}"


def _own_files(folder: Path) -> dict[str, str]:
    found = {_DEFAULT: _text(folder / TEMPLATE_FILE)}
    more = folder / _FOLDER
    if more.is_dir():
        names = more.glob(f"*{_SUFFIX}")
        found |= {each.name.removesuffix(_SUFFIX): _text(each, home=folder) for each in names}
    return {name: text for name, text in found.items() if text is not None}


def _text(path: Path, *, home: Path | None = None) -> str | None:
    content = _read(path, home=home)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from None


def _read(path: Path, *, home: Path | None = None) -> bytes | None:
    try:
        return read_bytes(inside_folder(path, home=home))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read ({one_line(error).rstrip('.')}). {NO_TEMPLATE_FIX}")
