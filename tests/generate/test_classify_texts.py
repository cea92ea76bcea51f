"""The texts that `generate --classify` reads."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from payload.core.errors import ConfigError
from payload.generate.classify import read_texts


def test_every_line_is_a_text_and_an_empty_line_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\ntwo \r\n")
    arguments = Namespace(input=str(file), prompt=None)
    assert list(read_texts(arguments)) == ["one", "two "]
    for empty in ("", "  "):
        file.write_text(f"one\n{empty}\nthree\n")
        with pytest.raises(ConfigError, match="line 2 is empty, and has no label"):
            list(read_texts(arguments))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt is empty, and has no label"):
        list(read_texts(Namespace(input=None, prompt=" ")))
